"""The cache of inspections: never wrong, and never in the way."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from manylora.adapters import peft as peft_module
from manylora.adapters import registry as registry_module
from manylora.adapters.files import CONFIG_NAME, WEIGHTS_NAME, read_tensors
from manylora.adapters.peft import TextCheck
from manylora.adapters.registry import Registry, default_path, fingerprint
from manylora.protocol.executor import AdapterError
from manylora.tensorfile import StoredTensor
from tests.adapters.tiny import PREFIX, edit_config, geometry, inspect, make
from tests.text import made


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "plain"
    make(folder, r=4, target_modules=["q_proj"])
    return folder


@pytest.fixture
def adapter(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "copy"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The weights files whose headers were read."""
    seen: list[Path] = []

    def noted(path: Path) -> dict[str, StoredTensor]:
        seen.append(path)
        return read_tensors(path)

    monkeypatch.setattr(peft_module, "read_tensors", noted)
    return seen


def registry(path: Path) -> Registry:
    return Registry(geometry(), PREFIX, path)


def test_a_second_start_reads_no_header(adapter: Path, tmp_path: Path, reads: list[Path]) -> None:
    path = tmp_path / "cache" / "x.sqlite"
    first = registry(path)
    spec = first.inspect(adapter)
    first.close()
    first.close()
    assert len(reads) == 1
    second = registry(path)
    assert second.inspect(adapter) == spec == inspect(adapter)
    assert second.inspect(adapter, max_rank=4) == spec
    assert len(reads) == 2  # the one of ``inspect`` above
    with pytest.raises(AdapterError, match="rank 4"):
        second.inspect(adapter, max_rank=2)
    with pytest.raises(AdapterError) as caught:
        second.inspect(tmp_path / "nothing")
    assert caught.value.status == 404


def test_a_changed_file_is_inspected_again(adapter: Path, tmp_path: Path, reads: list[Path]) -> None:
    cache = registry(tmp_path / "x.sqlite")
    assert cache.inspect(adapter).scales[0][0] == 2.0
    edit_config(adapter, lora_alpha=80)
    assert cache.inspect(adapter).scales[0][0] == 20.0
    stat = os.stat(adapter / WEIGHTS_NAME)
    os.utime(adapter / WEIGHTS_NAME, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    cache.inspect(adapter)
    assert len(reads) == 3
    edit_config(adapter, use_dora=True)
    with pytest.raises(AdapterError, match="DoRA"):
        cache.inspect(adapter)
    (adapter / CONFIG_NAME).unlink()
    with pytest.raises(AdapterError, match="holds no"):
        cache.inspect(adapter)


def test_models_do_not_share_entries(adapter: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    registry(path).inspect(adapter)
    with pytest.raises(AdapterError, match="layer 2"):
        Registry(geometry(layers=2), PREFIX, path).inspect(adapter)
    with pytest.raises(AdapterError, match="module"):
        Registry(geometry(), "decoder.layers", path).inspect(adapter)
    assert fingerprint(geometry(), PREFIX) == fingerprint(geometry(itemsize=2, page_tokens=16), PREFIX + ".")
    layers = geometry().layers
    fewer = dataclasses.replace(geometry(), layers=tuple(groups[:2] for groups in layers))
    differing = dataclasses.replace(geometry(), layers=(*layers[1:], layers[0][:2]))
    others = (geometry(), geometry(layers=2), fewer, differing)
    assert len({fingerprint(g, PREFIX) for g in others}) == 4


def test_caches_of_models_with_equal_layers_stay_valid() -> None:
    assert fingerprint(geometry(), PREFIX) == "790e48d86d524dec48517b00157a3e1f"


@pytest.mark.parametrize("damage", ["garbage", "truncated", "middle", "row", "empty", "other table"])
def test_a_damaged_database_is_no_error(damage: str, adapter: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    cache = registry(path)
    expected = cache.inspect(adapter)
    for i in range(50):
        cache.inspect(Path(shutil.copytree(adapter, tmp_path / f"a{i}")))
    cache.close()
    data = path.read_bytes()
    if damage == "garbage":
        path.write_bytes(os.urandom(len(data)))
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2 + 100])
    elif damage == "middle":
        path.write_bytes(data[:4096] + os.urandom(len(data) - 8192) + data[-4096:])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        with sqlite3.connect(path) as connection:
            table = registry_module._TABLE
            if damage == "row":
                connection.execute(f"UPDATE {table} SET spec = '{{\"path\": 3}}'")
            else:
                connection.execute(f"DROP TABLE {table}")
                connection.execute(f"CREATE TABLE {table} (other INTEGER)")
        connection.close()
    for _ in range(2):
        cache = registry(path)
        assert cache.inspect(adapter) == expected
        assert cache.inspect(tmp_path / "a7").rank == 4
        cache.close()


def test_a_path_that_is_no_text_is_remembered_too(adapter: Path, tmp_path: Path, reads: list[Path]) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    shutil.copytree(adapter, folder)
    cache = registry(tmp_path / "x.sqlite")
    assert cache.inspect(folder) == cache.inspect(folder)
    assert len(reads) == 1


def test_a_place_that_cannot_be_used_is_no_error(
    adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.sqlite").mkdir()
    for path in (tmp_path / "file" / "x.sqlite", tmp_path / "folder.sqlite", Path("/proc/nothing/x.sqlite")):
        caplog.clear()
        cache = registry(path)
        for _ in range(3):
            assert cache.inspect(adapter).rank == 4
        assert len(caplog.records) == 1


def test_a_locked_database_is_left_alone(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry_module, "_BUSY_TIMEOUT_S", 0.05)
    path = tmp_path / "x.sqlite"
    registry(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    cache = registry(path)
    for _ in range(3):
        assert cache.inspect(adapter).rank == 4
    assert len(caplog.records) == 1
    other.execute("COMMIT")
    assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_two_that_make_the_database_at_once_wait_for_each_other(
    adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks of one model start together."""
    path = tmp_path / "x.sqlite"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    other.execute("CREATE TABLE what_it_makes (x)")
    ending = threading.Timer(0.2, other.execute, ("COMMIT",))
    ending.start()
    cache = registry(path)
    assert cache.inspect(adapter).rank == 4
    ending.join()
    other.close()
    assert not caplog.records


def test_a_read_only_database_is_read(
    adapter: Path, tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.sqlite"
    registry(path).inspect(adapter)
    original = sqlite3.connect

    def read_only(database: Path, **options: object) -> sqlite3.Connection:
        return original(f"file:{database}?mode=ro", uri=True, **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(sqlite3, "connect", read_only)
    cache = registry(path)
    cache.inspect(adapter)
    assert len(reads) == 1
    edit_config(adapter, lora_alpha=99)
    assert cache.inspect(adapter).scales[0][0] == 99 / 4


def test_threads_and_processes_share_it(adapter: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    folders = [Path(shutil.copytree(adapter, tmp_path / f"a{i}")) for i in range(30)]
    (tmp_path / "geometry").write_bytes(pickle.dumps(geometry()))
    script = (
        "import pickle, sys\n"
        "from pathlib import Path\n"
        "from manylora.adapters.registry import Registry\n"
        "geometry = pickle.loads(Path(sys.argv[2]).read_bytes())\n"
        "cache = Registry(geometry, 'model.layers', Path(sys.argv[1]))\n"
        "print(sum(cache.inspect(Path(p)).rank for p in sys.argv[3:]), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script, str(path), str(tmp_path / "geometry"), *map(str, folders)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    cache = registry(path)
    ranks: list[int] = []
    threads = [
        threading.Thread(target=lambda: ranks.extend(cache.inspect(folder).rank for folder in folders))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out, err = other.communicate(timeout=120)
    assert ranks == [4] * 120
    assert out.split() == ["120", "False"], err
    assert "not usable" not in err


def test_the_default_place_follows_the_users_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_path() == Path("/somewhere/manylora/adapters.sqlite")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setattr(sys, "platform", "linux")
    assert default_path() == Path("/home/someone/.cache/manylora/adapters.sqlite")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_path() == Path("/home/someone/Library/Caches/manylora/adapters.sqlite")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_path() is None


@pytest.mark.parametrize("in_place", [False, True])
def test_a_file_replaced_by_one_of_its_size_and_time_is_inspected_again(
    adapter: Path, tmp_path: Path, in_place: bool
) -> None:
    cache = registry(tmp_path / "x.sqlite")
    assert cache.inspect(adapter).scales[0][0] == 2.0
    path = adapter / CONFIG_NAME
    status, text = os.stat(path), path.read_text()
    time.sleep(0.02)  # a file system's clock ticks
    other = path if in_place else tmp_path / "other"
    other.write_text(text.replace('"lora_alpha": 8', '"lora_alpha": 4'))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)
    assert (os.stat(path).st_size, os.stat(path).st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert registry(tmp_path / "x.sqlite").inspect(adapter).scales[0][0] == 1.0


def test_an_adapters_tokenizer_is_looked_at_with_it(adapter: Path, tmp_path: Path) -> None:
    """What was found is remembered until one of its files is another, or the base's are."""
    base, path = made.layout_5(tmp_path / "base"), tmp_path / "x.sqlite"
    (base / "config.json").write_text(json.dumps({"vocab_size": 400}))
    shutil.copy(base / "tokenizer.json", adapter)

    def warnings() -> tuple[str, ...]:
        return Registry(geometry(), PREFIX, path, TextCheck(base, base)).inspect(adapter).warnings

    assert warnings() == ()
    (adapter / "tokenizer_config.json").write_text(json.dumps({"extra_special_tokens": ["<|one|>"]}))
    assert ["no row" in warning for warning in warnings()] == [True]
    assert ["no row" in warning for warning in warnings()] == [True]
    (base / "config.json").write_text(json.dumps({"vocab_size": 401}))
    (base / "generation_config.json").write_text("{}")
    assert warnings() == ()
    made.write_folder(adapter, made.metaspace(), {})
    with pytest.raises(AdapterError, match="not the base model's"):
        warnings()
