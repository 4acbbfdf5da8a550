"""The adapter store's folder: private, bounded, and safe among processes that use it and die."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from manylora.adapters import storefolder
from manylora.adapters.storefolder import NoRoom, StoreFolder
from manylora.config import AdapterSettings, ConfigError
from manylora.executor.build import build_worker
from manylora.flags import build_settings, read_config_file
from tests.executor.tiny import settings_for, write_model

PLENTY = 2**30


def nothing() -> None:
    """A check that never breaks off."""


def put(folder: StoreFolder, name: str, size: int, fill: bytes = b"x") -> None:
    with folder.created(name, size, nothing) as file:
        os.pwrite(file, fill * size, 0)


def sizes(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in path.iterdir() if file.name != "lock"}


def leave_free(monkeypatch: pytest.MonkeyPatch, path: Path, num_bytes: int) -> None:
    """The disk has so many bytes for this store and nothing else."""
    real = os.fstatvfs

    def small(file: int) -> os.statvfs_result:
        values = list(real(file))
        values[1], values[4] = 1, num_bytes - sum(sizes(path).values())
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "fstatvfs", small)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "store"


def test_what_is_made_is_private_whatever_the_mask(path: Path) -> None:
    for mask in (0, 0o077):
        before = os.umask(mask)
        try:
            folder = StoreFolder(path.with_name(f"{mask}"), PLENTY)
            put(folder, "a", 10)
        finally:
            os.umask(before)
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in folder.path.glob("*.packed")} == {0o600}
        folder.close()
        folder.close()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("file", "not a folder"), ("link", "symbolic link"), ("dangling", "symbolic link"),
        ("under a file", ""), ("open to a group", "0700"), ("open to all", "0700"), ("another user's", "0700"),
        ("nul", ""), ("read-only", os.strerror(errno.EROFS)), ("full", os.strerror(errno.ENOSPC)),
        ("no locks", os.strerror(errno.ENOLCK)),
    ],
)  # fmt: skip
def test_what_cannot_serve_is_refused_in_one_line(
    wrong: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    fails = {"read-only": ("open", errno.EROFS), "full": ("pwrite", errno.ENOSPC)}
    if wrong == "file":
        path.write_bytes(b"")
    elif wrong in ("link", "dangling"):
        if wrong == "link":
            (tmp_path / "real").mkdir(0o700)
        path.symlink_to(tmp_path / "real")
    elif wrong == "under a file":
        (tmp_path / "file").write_bytes(b"")
        path = tmp_path / "file" / "store"
    elif wrong.startswith("open to"):
        path.mkdir()
        path.chmod(0o750 if "group" in wrong else 0o777)
    elif wrong == "another user's":
        path.mkdir(0o700)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    elif wrong == "nul":
        path = tmp_path / "a\0b"
    elif wrong == "no locks":

        def flock(*_: Any) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", flock)
    else:
        path.mkdir(0o700)
        call, number = fails[wrong]
        real = getattr(os, call)

        def failing(what: Any, *arguments: Any, **named: Any) -> Any:
            if call == "pwrite" or (arguments and arguments[0] & os.O_CREAT):
                raise OSError(number, os.strerror(number))
            return real(what, *arguments, **named)

        monkeypatch.setattr(os, call, failing)
        if wrong == "full":
            leave_free(monkeypatch, path, 0)
    with pytest.raises(ConfigError) as refused:
        StoreFolder(path, PLENTY)
    assert "--adapter-store" in str(refused.value)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    monkeypatch.undo()
    if wrong in ("read-only", "full"):
        assert set(sizes(path)) <= {"lock"}


def test_no_more_than_half_of_the_free_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store holds counts as free: it would be."""
    folder = StoreFolder(path, PLENTY)
    leave_free(monkeypatch, path, 1000)
    for number in range(10):
        put(folder, f"{number}", 100)
        assert sum(sizes(path).values()) <= 500
        assert folder.held_bytes == sum(sizes(path).values())
    assert sorted(sizes(path)) == [f"{number}.packed" for number in range(5, 10)]
    assert not folder.has_room(1)
    with pytest.raises(NoRoom):
        put(folder, "large", 501)
    assert len(sizes(path)) == 5, "nothing goes for what does not fit anyway"


def test_what_is_being_written_counts_and_stays(path: Path) -> None:
    one, other = StoreFolder(path, 300), StoreFolder(path, 300)
    put(one, "old", 100)
    with one.created("new", 150, nothing) as file:
        os.pwrite(file, b"1" * 150, 0)
        with pytest.raises(NoRoom, match="at the moment"):
            put(other, "large", 200)
        assert list(sizes(path)) != []
        put(other, "small", 150)
        other.shrink(nothing)
        assert sum(sizes(path).values()) == 300
    assert sizes(path) == {"new.packed": 150, "small.packed": 150}


def test_a_lock_that_is_kept_is_not_waited_for_without_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = StoreFolder(path, PLENTY), StoreFolder(path, PLENTY)
    monkeypatch.setattr(storefolder, "_LOCK_WAIT_S", 0.05)

    class Closing(Exception):
        """The engine closes meanwhile."""

    def check() -> None:
        raise Closing

    with one._locked(nothing):
        with pytest.raises(TimeoutError, match="lock"):
            put(other, "a", 10)
        with pytest.raises(Closing), other.created("a", 10, check):
            pass
    put(other, "a", 10)
    assert sizes(path) == {"a.packed": 10}


WRITER = """
import os, sys
from pathlib import Path
from manylora.adapters.storefolder import StoreFolder
mode, path, limit, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
folder = StoreFolder(path, limit)
print("ready", flush=True)
if mode == "hang":
    with folder.created("hanging", 150, lambda: None) as file:
        os.pwrite(file, b"h" * 75, 0)
        print("writing", flush=True)
        sys.stdin.read()
for turn in range(60):
    with folder.created(f"{turn % 5}", 100, lambda: None) as file:
        os.pwrite(file, number.encode() * 100, 0)
    try:
        with folder.opened(f"{turn % 4}") as (file, _):
            found = os.pread(file, 200, 0)
            assert len(found) == 100 and len(set(found)) == 1, found
    except FileNotFoundError:
        pass
"""


def started(mode: str, path: Path, limit: int, number: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, mode, str(path), str(limit), str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_processes_share_a_store(path: Path) -> None:
    watched, most = StoreFolder(path, PLENTY), 0
    processes = [started("write", path, 350, number) for number in range(3)]
    while any(process.poll() is None for process in processes):
        with watched._locked(nothing):
            most = max(most, sum(entry.num_bytes for entry in watched._entries()))
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert most == 300
    assert set(sizes(path).values()) == {100}
    for process in processes:
        process.communicate()


def test_a_process_that_is_killed_while_it_writes(path: Path) -> None:
    folder = StoreFolder(path, 300)
    put(folder, "mine", 100)
    process = started("hang", path, 300, 0)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    (part,) = (file for file in path.iterdir() if file.name.endswith(".part"))
    folder.shrink(nothing)
    assert part.exists(), "it is being written"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert part.exists()
    StoreFolder(path, 300).shrink(nothing)
    assert sizes(path) == {"mine.packed": 100}


def test_settings_from_each_place(tmp_path: Path) -> None:
    given = {"adapter_store": "packed", "adapter_store_size": "3GiB"}
    expected = AdapterSettings(store="packed", store_bytes=3 * 2**30)
    assert build_settings({"model": "m", **given})[0].adapters == expected
    file = tmp_path / "serve.yaml"
    file.write_text("model: m\nadapter-store: packed\nadapter-store-size: 3GiB\n")
    assert build_settings(read_config_file(str(file)))[0].adapters == expected
    assert build_settings({"model": "m", "adapter_store": "p"})[0].adapters == AdapterSettings(store="p")
    for wrong, says in (
        ({"adapter_store_size": "1GiB"}, "--adapter-store-size needs --adapter-store"),
        ({**given, "adapter_store_size": 0}, "--adapter-store-size must be at least 1, got 0"),
        ({**given, "adapter_store_size": "much"}, "--adapter-store-size: 'much' is not a size"),
        ({"adapter_store": " "}, "--adapter-store must be"),
    ):
        with pytest.raises(ConfigError, match=says):
            build_settings({"model": "m", **wrong})


def test_a_bad_store_ends_the_start_before_weights_are_read(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    settings = dataclasses.replace(
        settings_for(model), adapters=AdapterSettings(store=str(model / "config.json"))
    )
    before = {thread.ident for thread in threading.enumerate()}
    with pytest.raises(ConfigError, match=r"--adapter-store .* is not a folder"):
        build_worker(settings, registry_path=tmp_path / "x.sqlite")
    assert {thread.ident for thread in threading.enumerate()} <= before
