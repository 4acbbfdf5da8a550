"""The cluster's folder, its log of adapters, notes of steps, and a request's account at the front end."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

import msgspec
import pytest

from manylora.cluster import local, messages
from manylora.cluster.adapter_files import adapter_digest
from manylora.cluster.blame import StepNote, read_step
from manylora.cluster.folder import Folder, default_folder, is_in_use, read_secret, remove_left
from manylora.cluster.local import LocalLauncher
from manylora.cluster.open_request import OpenRequest
from manylora.cluster.recording import journal_name
from manylora.cluster.registry import AdapterLog
from manylora.config.cold_start import ColdStartConfig
from manylora.config.declaring import ConfigError
from manylora.config.sections import CacheSettings, EngineSettings, ModelSettings
from manylora.engine.client import RELEASED, Delta, GenerationRequest, Timing
from manylora.engine.ledger import Ledger
from manylora.protocol.hashing import prefix_hashes
from manylora.protocol.routing import Assign
from manylora.types import SamplingParams
from tests.cluster.process import ADAPTERS
from tests.e2e.process import MODEL


def test_a_folder_is_its_owners_alone_and_one_clusters(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "cluster", is_lasting=True)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.secret_path.stat().st_mode) == 0o600
    secret = read_secret(folder.secret_path)
    with pytest.raises(ConfigError, match="another cluster"):
        Folder(tmp_path / "cluster", is_lasting=True)
    folder.close()
    again = Folder(tmp_path / "cluster", is_lasting=True)
    assert read_secret(again.secret_path) == secret
    again.close()
    passing = Folder(tmp_path / "other" / "cluster", is_lasting=False)
    passing.close()
    assert not passing.path.exists()


def test_a_folder_that_vanishes_is_made_again(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "cluster", is_lasting=True)
    secret = read_secret(folder.secret_path)
    for vanished in (folder.secret_path, folder.path):
        shutil.rmtree(vanished) if vanished.is_dir() else vanished.unlink()
        folder.mend()
        assert folder.path == tmp_path / "cluster"
        assert read_secret(folder.secret_path) == secret == folder.secret
        assert is_in_use(folder.path)
        with pytest.raises(ConfigError, match="another cluster"):
            Folder(folder.path, is_lasting=True)
    folder.close()
    assert not is_in_use(folder.path)


def test_no_file_gives_a_folder_up(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "cluster", is_lasting=True)
    for file in folder.path.iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match="another cluster"):
        Folder(folder.path, is_lasting=True)
    # Where the folder itself is gone another cluster may have the place; each has its own then.
    shutil.rmtree(folder.path)
    other = Folder(tmp_path / "cluster", is_lasting=True)
    folder.mend()
    assert folder.path != other.path
    assert folder.secret != other.secret
    assert read_secret(folder.secret_path) == folder.secret
    folder.close()
    other.close()


def test_a_start_removes_what_no_cluster_holds(tmp_path: Path) -> None:
    left = Folder(tmp_path / "cluster-1", is_lasting=False)
    os.close(left._lock)  # as the system does where the supervisor is killed
    alive = Folder(tmp_path / "cluster-2", is_lasting=False)
    (tmp_path / "of another").mkdir()
    remove_left(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster-2", "of another"]
    assert read_secret(alive.secret_path) == alive.secret
    alive.close()


def test_the_default_folder_is_among_the_users_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert default_folder(1) == tmp_path / "home" / ".local" / "state" / "manylora" / "cluster-1"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # which its specification says to ignore
    assert default_folder(1) == tmp_path / "home" / ".local" / "state" / "manylora" / "cluster-1"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_folder(1) == tmp_path / "state" / "manylora" / "cluster-1"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    elsewhere = tmp_path / f"manylora-{os.getuid()}" / "cluster-1"
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a file"))
    assert default_folder(1) == elsewhere
    # A file system over the network may lock no folder.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("manylora.cluster.folder.fcntl.flock", lambda *args: os.close(-1))
    assert default_folder(1) == elsewhere


def test_a_folder_that_others_may_use_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir(mode=0o755)
    os.chmod(folder, 0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        Folder(folder, is_lasting=True)
    short = tmp_path / "secret"
    short.write_text("short")
    short.chmod(0o600)
    with pytest.raises(ConfigError, match="16 bytes"):
        read_secret(short)


@pytest.mark.parametrize(
    ("on_machine", "in_container", "found"),
    [(2, 2, ["0", "1"]), (0, 2, ["0", "1"]), (8, 2, ["0", "1"]), (1, 0, ["0"]), (0, 0, [])],
)
def test_gpus_are_those_that_a_container_has(
    on_machine: int, in_container: int, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_GPUS", tmp_path / "gpus")
    monkeypatch.setattr(local, "_DEVICES", tmp_path / "dev")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for number in range(on_machine):
        (tmp_path / "gpus" / f"0000:{number}").mkdir(parents=True)
    for number in range(in_container):
        (tmp_path / "dev" / f"nvidia{number + 3}").mkdir(parents=True)
    (tmp_path / "dev" / "nvidiactl").mkdir(parents=True)
    assert local.gpus() == found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7")
    assert local.gpus() == ["5", "7"]


def listing(number: int, name: str, state: str = "listed") -> messages.Listing:
    return messages.Listing(0, number, name, f"/adapters/{name}", "", 8, 2, 1, state)


def test_the_log_is_all_that_there_is(tmp_path: Path) -> None:
    log = AdapterLog(tmp_path / "registry.sqlite")
    first = log.new_id()
    log.append(listing(first, "a"), listing(log.new_id(), "b"))
    assert (log.revision, sorted(log.current)) == (1, [1, 2])
    third = log.new_id()
    replaced = msgspec.structs.replace(log.current[first], state="leaving")
    log.append(listing(third, "a"), replaced)
    found = log.find("a")
    assert found is not None
    assert (found.id, found.revision) == (third, 2)
    log.append(msgspec.structs.replace(replaced, state="gone"))
    log.close()
    again = AdapterLog(tmp_path / "registry.sqlite")
    assert again.current == log.current
    assert again.revision == 3
    assert again.new_id() == 4  # an id is never given again
    again.close()


def test_a_log_whose_file_is_lost_is_restored(tmp_path: Path) -> None:
    log = AdapterLog(tmp_path / "registry.sqlite")
    kept = [listing(2, "a"), listing(5, "b", "leaving")]
    log.restore(kept, 7)
    assert [(each.id, each.name, each.state) for each in log.current.values()] == [
        (2, "a", "listed"),
        (5, "b", "leaving"),
    ]
    assert log.new_id() == 8
    log.restore([listing(9, "c")], 7)  # it is not lost any more
    assert sorted(log.current) == [2, 5]
    log.close()
    again = AdapterLog(tmp_path / "registry.sqlite")
    assert sorted(again.current) == [2, 5]
    again.close()


def test_a_log_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "registry.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    with pytest.raises(ConfigError, match="registry"):
        AdapterLog(tmp_path / "registry.sqlite")


def test_what_a_step_was_of_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "step"
    assert read_step(path) is None
    note = StepNote(path)
    assert read_step(path) == []
    note.begin(["a-1", "b-2"])
    assert sorted(read_step(path) or []) == ["a-1", "b-2"]
    note.end()
    assert read_step(path) == []
    note.begin([f"request-{number}" for number in range(100_000)])
    assert len(read_step(path) or []) > 10_000  # as many as there is room for


def test_an_adapters_digest(tmp_path: Path) -> None:
    folder = next(iter(sorted(ADAPTERS.iterdir())))
    assert adapter_digest(folder) == adapter_digest(folder) != ""
    assert adapter_digest(tmp_path) == ""


def test_names_of_journals() -> None:
    assert journal_name("x.journal", "router", 1) == "x.journal.router"
    assert journal_name("x.journal", "r0", 1) == "x.journal.r0.e1"
    assert journal_name("x.journal", "r3", 2) == "x.journal.r3.e2"


def test_only_the_present_attempts_next_tokens_are_taken() -> None:
    asked = GenerationRequest("id", (1, 2, 3), SamplingParams(max_tokens=8, n=2))
    taken = OpenRequest(asked, Ledger(asked, lambda: 0.0), 5, (), 8)
    assert taken.as_asked().attempts == 0
    sent = taken.assign(Assign("id", 1, 0, 1), epoch=1)
    assert (sent.attempt, sent.version, sent.resume) == (1, 5, ())
    first = Delta("id", 0, (7, 8), attempt=1, start=0, timing=Timing(num_cached_tokens=2))
    assert taken.ledger.may_take(first)
    assert taken.take(first) == first
    assert not taken.ledger.may_take(first)  # it came already
    assert not taken.ledger.may_take(Delta("id", 0, (9,), attempt=2, start=2))
    progress = taken.progress(0)
    assert progress is not None
    assert progress.position == 2
    assert taken.progress(0) is None
    for sample in (0, 1):
        assert not taken.is_released
        taken.take(Delta("id", sample, finish_reason=RELEASED, attempt=1))
    assert taken.is_released
    again = taken.assign(Assign("id", 2, 1, 1, failures=1), epoch=4)
    assert (again.attempt, again.resume) == (2, ((7, 8), ()))
    assert again.params.seed == sent.params.seed
    assert taken.as_held().asked.failures == 1
    assert taken.recomputes
    out = taken.take(Delta("id", 0, (9,), attempt=2, start=2, timing=Timing(num_cached_tokens=3)))
    assert out is not None
    assert out.timing.num_cached_tokens == 0  # said already


def test_the_router_is_told_what_replies_have_added_to_the_cache() -> None:
    prompt = tuple(range(100))
    asked = GenerationRequest("id", prompt, SamplingParams(max_tokens=99, n=2), cache_scope="mine")
    taken = OpenRequest(asked, Ledger(asked, lambda: 0.0), 5, prefix_hashes(5, "mine", prompt), 8)
    taken.assign(Assign("id", 1, 0, 1), epoch=1)
    replies = tuple(range(200, 230)), tuple(range(300, 399))
    for sample, reply in enumerate(replies):
        taken.take(Delta("id", sample, reply, attempt=1, start=0, finish_reason="length"))
    ended = taken.as_ended()
    assert (ended.request, ended.output_tokens) == ("id", 64)
    found = [prefix_hashes(5, "mine", (*prompt, *reply)) for reply in replies]
    assert ended.blocks == found[0][1:] + found[1][1:]
    assert [len(each) for each in found] == [2, 3]


def test_gpus_are_given_by_number_and_shared_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    settings = EngineSettings(ModelSettings(MODEL, device="cuda"), cache=CacheSettings(device_pool=2**30))
    alone = LocalLauncher(settings, 2, 2, 1)
    assert [alone.environment(replica)["CUDA_VISIBLE_DEVICES"] for replica in (0, 1)] == ["3", "5"]
    assert alone.most_replicas == 2
    shared = LocalLauncher(settings, 4, 4, 2)
    names = [shared.environment(replica)["CUDA_VISIBLE_DEVICES"] for replica in range(4)]
    assert names == ["3", "3", "5", "5"]
    assert shared.most_replicas == 4
    with pytest.raises(ConfigError, match="need 3 GPUs"):
        LocalLauncher(settings, 5, 5, 2)
    without_pool = EngineSettings(ModelSettings(MODEL, device="cuda"))
    with pytest.raises(ConfigError, match="needs --device-pool"):
        LocalLauncher(without_pool, 4, 4, 2)


@pytest.mark.parametrize(
    ("per_gpu", "count", "expected"),
    [(1, 2, ["3,5", "7,8"]), (2, 4, ["3,5", "3,5", "7,8", "7,8"])],
)
def test_a_replica_gets_a_gpu_for_each_of_its_ranks(
    per_gpu: int, count: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7,8,9")
    model, cache = ModelSettings(MODEL, device="cuda"), CacheSettings(device_pool=2**30)
    settings = EngineSettings(model, cache=cache, tensor_parallel_size=2)
    node = LocalLauncher(settings, count, count, per_gpu)
    assert node.most_replicas == count
    found = [node.environment(replica)["CUDA_VISIBLE_DEVICES"] for replica in range(count)]
    assert found == expected
    # The number of a replica may be larger, where others have been removed.
    assert node.environment(count + 1) == node.environment(1)
    with pytest.raises(ConfigError, match=f"{count + 1} replicas need 6 GPUs, and there are 5"):
        LocalLauncher(settings, count + 1, count + 1, per_gpu)


@pytest.mark.parametrize(
    ("mode", "asked", "cores", "expected"),
    [
        ("cpu", "auto", 8, ("cpu", "4", 8)),
        ("cpu", "2", 1, ("cpu", "2", 4)),
        ("cpu", "auto", 1, ("cpu", "1", 2)),
        ("auto", "auto", 8, ("auto", "auto", 0)),
        ("layerwise", "auto", 8, ("layerwise", "auto", 0)),
    ],
)
def test_cpu_threads_are_shared_out(
    mode: str, asked: str, cores: int, expected: tuple[str, str, int]
) -> None:
    """Of the third of several replicas, each of which has so many cores."""
    found = ColdStartConfig(mode, cpu_workers=asked).share(2, cores)
    assert (found.mode, found.cpu_workers, found.cores_before) == expected
