"""The cluster's folder: its lock, its secret, its admin socket. Does not know what any of them is for.

Everything in it is its owner's alone (0700, files 0600). One cluster at a time has it: the lock is the folder's
own, so no file that vanishes gives it up. A folder that vanishes is made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from manylora.config.declaring import ConfigError

log = logging.getLogger("manylora")

SECRET = "secret"
"""The file's name."""
_SECRET_BYTES = 32
_TRIES, _TRY_S = 5, 0.02
_LEAST_SECRET_BYTES = 16
_MOST_SECRET_BYTES = 4096


def default_folder(port: int) -> Path:
    """The folder of this user's cluster on this port: among the user's state, which nothing cleans up. Where that
    cannot be written or locked, as on some network file systems, it is in the system's temporary folder."""
    state = os.environ.get("XDG_STATE_HOME", "")
    root = (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "manylora"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(root, os.W_OK):
            raise PermissionError
        with contextlib.suppress(BlockingIOError):  # another looks as well
            os.close(_locked(root))
    except (OSError, RuntimeError):  # the latter where there is no home
        root = Path(tempfile.gettempdir()) / f"manylora-{os.getuid()}"
    return root / f"cluster-{port}"


def read_secret(path: Path) -> bytes:
    """A secret file's content. Raises ConfigError where it cannot be read, or where others can read it."""
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            secret = file.read(_MOST_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"cannot read the cluster's secret {path}: {error.strerror}") from error
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise ConfigError(
            f"the cluster's secret {path} can be read by others: chmod 600 it, and make it yours"
        )
    if not _LEAST_SECRET_BYTES <= len(secret) <= _MOST_SECRET_BYTES:
        raise ConfigError(f"the cluster's secret {path} must have {_LEAST_SECRET_BYTES} bytes at least")
    return secret


class Folder:
    """Opened for one cluster; raises ConfigError where that cannot be. ``close`` lets the next have it. ``path``:
    where it is now."""

    def __init__(self, path: Path, *, is_lasting: bool) -> None:
        """``is_lasting``: what it holds outlives the cluster."""
        self.path = path
        self._is_lasting = is_lasting
        self._lock = self._take(path)
        self.secret = secrets.token_hex(_SECRET_BYTES).encode()
        try:
            self._make_secret()
            self.secret = read_secret(self.secret_path)
        except BaseException:
            self.close()
            raise

    def _take(self, path: Path) -> int:
        """Make the folder where it is not there; the descriptor that holds its lock. Raises ConfigError."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_lasting:
                _check_private(path.parent)
            for _ in range(_TRIES):
                path.mkdir(mode=0o700, exist_ok=True)
                _check_private(path)
                try:
                    lock = _locked(path)
                except BlockingIOError:  # a process that only looks has it for a moment
                    time.sleep(_TRY_S)
                    continue
                if _is_at(lock, path):
                    return lock
                os.close(lock)  # it was removed meanwhile
        except OSError as error:
            raise ConfigError(f"cannot use the cluster's folder {path}: {error.strerror}") from error
        raise ConfigError(f"another cluster uses the folder {path}")

    def mend(self) -> None:
        """Make again what has vanished; beside its place where another cluster has that by now. Raises
        ConfigError."""
        if not _is_at(self._lock, self.path):
            path = self.path
            try:
                lock = self._take(path)
            except ConfigError:
                path = path.with_name(f"{path.name}-{os.getpid()}")
                lock = self._take(path)
            os.close(self._lock)
            self.path, self._lock = path, lock
            log.warning("the cluster's folder has vanished, and is made again: %s", path)
        self._make_secret()

    def _make_secret(self) -> None:
        """Write the secret's file unless it is there."""
        try:
            descriptor = os.open(self.secret_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return
        except OSError as error:
            raise ConfigError(f"cannot write {self.secret_path}: {error.strerror}") from error
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.secret + b"\n")

    @property
    def secret_path(self) -> Path:
        return self.path / SECRET

    def close(self) -> None:
        """Give the folder up, and remove what has no use any more."""
        if self._is_lasting:
            for name in ("admin.sock", *(file.name for file in self.path.glob("*.step"))):
                (self.path / name).unlink(missing_ok=True)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def is_in_use(folder: Path) -> bool:
    """Whether a cluster has the folder whose supervisor lives."""
    return _is_free(folder) is False


def was_left(folder: Path) -> bool:
    """Whether a cluster had the folder whose supervisor has died: its socket is there, and its lock is free."""
    return admin_socket(folder).exists() and _is_free(folder) is True


def _is_free(folder: Path) -> bool | None:
    """Whether no supervisor has the folder's lock; None where that cannot be seen."""
    try:
        os.close(_locked(folder, fcntl.LOCK_SH))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _locked(folder: Path, how: int = fcntl.LOCK_EX) -> int:
    """A descriptor of the folder that holds its lock. Raises OSError; BlockingIOError where another has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether this open folder is the one at the path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


def remove_left(root: Path) -> None:
    """Remove folders of clusters whose supervisors have died: nothing holds their locks."""
    for folder in root.glob("cluster-*"):
        with contextlib.suppress(OSError):
            lock = _locked(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def admin_socket(folder: Path) -> Path:
    """Where the router listens for the operator."""
    return folder / "admin.sock"


@contextlib.contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """The socket's path by the folder's descriptor. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{admin_socket(folder).name}"
    finally:
        os.close(descriptor)


def step_file(folder: Path, replica: int, epoch: int) -> Path:
    """Where a replica says which requests its step is of."""
    return folder / f"r{replica}.e{epoch}.step"


def _check_private(path: Path) -> None:
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise ConfigError(f"the cluster's folder {path} is no folder")
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise ConfigError(f"the cluster's folder {path} must be yours alone: chmod 700 it")
