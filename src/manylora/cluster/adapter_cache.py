"""A machine's folder of adapters' files, by their digest, all together no larger than allowed.

Several processes use one folder at once. A version's folder appears whole under its digest, is its user's alone,
and is never written again; while a process has it (``take`` to ``release``, or the process's end) it stays. What
is there is not trusted: it is compared with its digest each time that it is taken. Does not know where files come
from.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from manylora.cluster.digests import ADAPTER_FILES, adapter_digest
from manylora.config import ConfigError
from manylora.types import AdapterId

_PART = ".part"
"""The end of the names of what is being written."""
_SIZE = "size"
"""Of what is being written: a file that says how many bytes it will have."""
_DEFAULT_BYTES = 50 * 2**30
_SAFE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class CacheFull(Exception):
    """There is no room; the message says of how much."""


class AdapterCache:
    """Used by one thread. Raises OSError where the disk does."""

    def __init__(self, path: Path, most_bytes: int | None) -> None:
        """Makes the folder where it is not there. Raises ConfigError where it cannot be used."""
        self.path = path
        self._most_bytes = most_bytes or _DEFAULT_BYTES
        self._taken: dict[AdapterId, int] = {}
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = path.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
                raise ConfigError(
                    f"--adapter-cache {path} must be a folder that is yours alone: chmod 700 it"
                )
            with self._locked():
                self._make_room(0)
        except OSError as error:
            raise ConfigError(f"--adapter-cache {path} cannot be used: {error.strerror}") from error
        except CacheFull:
            pass  # of what others have: theirs to give up

    def take(self, adapter: AdapterId, digest: str) -> Path | None:
        """The folder with these files, for a version, until ``release``; None where it is not there, or was not as
        its digest says and is gone now."""
        folder = self.path / digest
        if adapter in self._taken:
            return folder
        with self._locked():
            try:
                lock = os.open(folder, _SAFE)
            except FileNotFoundError:
                return None
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # those that remove have the folder's lock
        if adapter_digest(folder) != digest:
            os.close(lock)
            with self._locked():
                shutil.rmtree(folder, ignore_errors=True)
            return None
        os.utime(folder)
        self._taken[adapter] = lock
        return folder

    def release(self, adapter: AdapterId) -> None:
        """The version has no use for its files any more, if it had any."""
        if (lock := self._taken.pop(adapter, None)) is not None:
            os.close(lock)

    @contextlib.contextmanager
    def made(self, adapter: AdapterId, digest: str, num_bytes: int) -> Iterator[Path]:
        """An empty folder for so many bytes of files; if that ends well it is the version's, under its digest,
        unless another process was faster; else it is gone. What was used longest ago, and by no process now, gives
        way. Raises CacheFull."""
        part = self.path / f"{digest}.{secrets.token_hex(8)}{_PART}"
        lock = -1
        try:
            with self._locked():
                self._make_room(num_bytes)
                part.mkdir(mode=0o700)
                lock = os.open(part, _SAFE)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (part / _SIZE).write_text(str(num_bytes))  # it counts from now on
            yield part
            (part / _SIZE).unlink()
            with self._locked():
                if not (self.path / digest).exists():
                    part.rename(self.path / digest)
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    self._taken[adapter], lock = lock, -1
        finally:
            if lock >= 0:
                os.close(lock)
            shutil.rmtree(part, ignore_errors=True)

    def _make_room(self, num_bytes: int) -> None:
        """With the lock."""
        held = [(self._num_bytes(each), each) for each in self._entries()]
        total = sum(size for size, _ in held)
        for size, entry in held:
            is_left = entry.suffix == _PART
            if (is_left or total + num_bytes > self._most_bytes) and _is_free(entry):
                shutil.rmtree(entry, ignore_errors=True)
                total -= size
        if total + num_bytes > self._most_bytes:
            raise CacheFull(
                f"--adapter-cache {self.path} may take {self._most_bytes} bytes, {total} are in use and "
                f"{num_bytes} more are needed"
            )

    def _entries(self) -> list[Path]:
        """Folders, the one that was used longest ago first."""
        found = []
        for entry in self.path.iterdir():
            with contextlib.suppress(FileNotFoundError):
                about = entry.lstat()
                if stat.S_ISDIR(about.st_mode):
                    found.append((about.st_mtime_ns, entry))
        return [entry for _, entry in sorted(found)]

    def _num_bytes(self, entry: Path) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int((entry / _SIZE).read_text())
        sizes = 0
        for name in ADAPTER_FILES:
            with contextlib.suppress(OSError):
                sizes += (entry / name).lstat().st_size
        return sizes

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """All of them are short."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(self.path / "lock", flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _is_free(entry: Path) -> bool:
    """Whether no process has it."""
    try:
        lock = os.open(entry, _SAFE)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
