"""The folder of an adapter store: private files by name, all together no larger than allowed.

Several processes may use one folder at once: a file appears whole under its name and is never written again, and
the folder's lock is held while room is made and taken. Follows no symbolic link. Does not know what files hold. No
torch here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from manylora.config import AdapterSettings, ConfigError

_FILE, _PART = ".packed", ".part"
"""Ends of names: of files, and of what is being written."""

_LOCK = "lock"
_LOCK_WAIT_S, _LOCK_POLL_S = 5.0, 0.01
_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""What is opened is no link, is not handed to other programs, and does not block where it is a pipe."""

_DIRECT: int = getattr(os, "O_DIRECT", 0)


_PROBE = b"\0" * 4096


class NoRoom(Exception):
    """A file is larger than all that the store may hold."""


class _Entry(NamedTuple):
    """``used_ns``: when it was last used."""

    used_ns: int
    name: str
    num_bytes: int


class StoreFolder:
    """Thread-safe. Names are given without their end."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        """Makes the folder where it is not there. Raises ConfigError, one line, where it cannot serve."""
        self.path = path
        self._most_bytes = most_bytes
        self.held_bytes = 0
        """What the files took when this process last counted."""
        try:
            self._folder = _open_folder(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--adapter-store {path} cannot be used: {_reason(error)}") from error
        try:
            self._try_out()
        except OSError as error:
            self.close()
            raise ConfigError(f"--adapter-store {path} cannot be written: {_reason(error)}") from error

    def close(self) -> None:
        """Idempotent."""
        if self._folder >= 0:
            os.close(self._folder)
        self._folder = -1

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[tuple[int, int | None]]:
        """The file, and the same file for direct reads where its file system has these.

        Raises FileNotFoundError, and another OSError where it is not a private file of this user.
        """
        with contextlib.ExitStack() as undo:
            file = os.open(name + _FILE, os.O_RDONLY | _SAFE, dir_fd=self._folder)
            undo.callback(os.close, file)
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or not _is_private(status):
                raise OSError(errno.EPERM, "it is not a private file of this user")
            direct = None
            if _DIRECT:
                with contextlib.suppress(OSError):
                    direct = os.open(name + _FILE, os.O_RDONLY | _DIRECT | _SAFE, dir_fd=self._folder)
            if direct is not None:
                undo.callback(os.close, direct)
                if not os.path.samestat(os.fstat(direct), status):  # replaced in between
                    direct = None
            yield file, direct

    def note_use(self, file: int) -> None:
        """An open file has been used: of those that must go, it goes late."""
        with contextlib.suppress(OSError):  # others may have made the store read-only
            os.utime(file)

    def names(self) -> list[str]:
        """Of all files, in no order. Raises OSError."""
        found = os.listdir(self._folder)
        return [name.removesuffix(_FILE) for name in found if name.endswith(_FILE)]

    def remove(self, name: str) -> None:
        """Whether or not it is there. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name + _FILE, dir_fd=self._folder)

    def shrink(self, check: Callable[[], None]) -> None:
        """Remove what was left behind, and what is too much. Raises OSError, and what ``check`` raises."""
        with self._locked(check), contextlib.suppress(NoRoom):
            self._make_room(0)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a file of so many bytes would push out no other. Raises OSError."""
        held = sum(entry.num_bytes for entry in self._entries())
        return held + num_bytes <= self._limit(held)

    @contextlib.contextmanager
    def created(self, name: str, num_bytes: int, check: Callable[[], None]) -> Iterator[int]:
        """An empty file of so many bytes, to be filled; under its name if that ends well, else gone.

        The least recently used files give way to it. Raises NoRoom, OSError, and what ``check``, which is called
        while it waits for others, raises.
        """
        part = f"{name}.{os.getpid()}.{secrets.token_hex(4)}{_PART}"
        with self._locked(check):
            self.remove(name)
            self._make_room(num_bytes)
            file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, 0o600, dir_fd=self._folder)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held while it is written
                os.fchmod(file, 0o600)
                _reserve(file, num_bytes)  # it counts from now on
                self.held_bytes += num_bytes
            except BaseException:
                self._drop_part(file, part)
                raise
        try:
            yield file
            with self._locked(check):  # a count meets it under one name
                os.rename(part, name + _FILE, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            self._drop_part(file, part)
            self.held_bytes = max(0, self.held_bytes - num_bytes)
            raise
        os.close(file)
        with contextlib.suppress(OSError):
            os.fsync(self._folder)

    def _drop_part(self, file: int, part: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=self._folder)
        os.close(file)

    def _try_out(self) -> None:
        """Raises OSError where files cannot be written here."""
        part = f"probe.{os.getpid()}.{secrets.token_hex(4)}{_PART}"
        with self._locked(lambda: None):
            self.held_bytes = sum(entry.num_bytes for entry in self._entries())
            file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, 0o600, dir_fd=self._folder)
            try:
                if self.held_bytes + len(_PROBE) <= self._most_bytes:  # a full disk has no limit worth asking
                    os.pwrite(file, _PROBE, 0)
                    os.fsync(file)
            finally:
                self._drop_part(file, part)

    def _limit(self, held: int) -> int:
        """Bytes that all files may take: as set, and at most half of what would be free without them."""
        disk = os.fstatvfs(self._folder)
        return min(self._most_bytes, (disk.f_bavail * disk.f_frsize + held) // 2)

    def _entries(self) -> list[_Entry]:
        """Files, and what any process is writing. Raises OSError."""
        found = []
        for name in os.listdir(self._folder):
            if name.endswith((_FILE, _PART)):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
                    if not stat.S_ISDIR(status.st_mode):  # which this has not made
                        found.append(_Entry(status.st_mtime_ns, name, status.st_size))
        return found

    def _make_room(self, num_bytes: int) -> None:
        """For so many bytes more. With the lock. Raises NoRoom, and OSError."""
        entries = [entry for entry in self._entries() if not self._is_abandoned(entry.name)]
        held = sum(entry.num_bytes for entry in entries)
        limit = self._limit(held)
        if num_bytes > limit:
            raise NoRoom(f"{num_bytes} bytes do not fit into an adapter store of {limit}")
        for entry in sorted(entries):
            if held + num_bytes <= limit:
                break
            if entry.name.endswith(_FILE):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.name, dir_fd=self._folder)
                held -= entry.num_bytes
        self.held_bytes = held
        if held + num_bytes > limit:  # of what others are writing
            raise NoRoom(f"{num_bytes} bytes do not fit into the adapter store at the moment")

    def _is_abandoned(self, name: str) -> bool:
        """Whether this was being written by a process that is gone; then it is gone, too. With the lock."""
        if not name.endswith(_PART):
            return False
        try:
            file = os.open(name, os.O_RDWR | _SAFE, dir_fd=self._folder)
        except FileNotFoundError:
            return True
        except OSError:  # not made by us
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=self._folder)
        except (BlockingIOError, FileNotFoundError):
            return False
        finally:
            os.close(file)
        return True

    @contextlib.contextmanager
    def _locked(self, check: Callable[[], None]) -> Iterator[None]:
        """Raises TimeoutError where another keeps the lock, though everyone needs it for moments only."""
        file = os.open(_LOCK, os.O_RDWR | os.O_CREAT | _SAFE, 0o600, dir_fd=self._folder)
        try:
            by_s = time.monotonic() + _LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > by_s:
                        raise TimeoutError(errno.ETIMEDOUT, "another process keeps its lock") from None
                check()
                time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(file)


def open_store_folder(settings: AdapterSettings) -> StoreFolder | None:
    """The folder that these name, if any. Raises ConfigError."""
    if settings.store is None:
        return None
    return StoreFolder(Path(settings.store), settings.most_store_bytes)


def _open_folder(path: Path) -> int:
    """A descriptor. Raises OSError and ValueError."""
    is_new = False
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(0o700)
        is_new = True
    if path.is_symlink():
        raise ValueError("it is a symbolic link")
    if not path.is_dir():
        raise ValueError("it is not a folder")
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if is_new:
            os.fchmod(folder, 0o700)
        if not _is_private(os.fstat(folder)):
            raise ValueError("others may use it, too: give one that is only yours (mode 0700)")
    except BaseException:
        os.close(folder)
        raise
    return folder


def _reserve(file: int, num_bytes: int) -> None:
    """Raises OSError where the disk is full, if its file system can tell ahead."""
    try:
        os.posix_fallocate(file, 0, num_bytes)
        return
    except AttributeError:  # not on every system
        pass
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    os.ftruncate(file, num_bytes)


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
