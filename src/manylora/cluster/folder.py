"""Keeps the cluster's folder: its lock, its secret and the path of its admin socket. Does not know how they
are used.

The folder and its content belong to its owner alone (modes 0700 and 0600). One cluster at a time uses it. The
lock is on the folder itself, so no vanished file can release it. A folder that vanishes is made again.
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
"""The name of the secret's file."""
_SECRET_BYTES = 32
_TRIES, _TRY_S = 5, 0.02
_LEAST_SECRET_BYTES = 16
_MOST_SECRET_BYTES = 4096


def default_folder(port: int) -> Path:
    """Return the folder of this user's cluster on this port. It is in the user's state folder, which nothing
    cleans up. Where that cannot be written or locked, as on some network file systems, it is in the system's
    temporary folder."""
    state = os.environ.get("XDG_STATE_HOME", "")
    root = (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "manylora"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(root, os.W_OK):
            raise PermissionError
        with contextlib.suppress(BlockingIOError):  # another process tests the folder at this moment
            os.close(_locked(root))
    except (OSError, RuntimeError):  # RuntimeError: the user has no home folder
        root = Path(tempfile.gettempdir()) / f"manylora-{os.getuid()}"
    return root / f"cluster-{port}"


def read_secret(path: Path) -> bytes:
    """Read a secret file's content. Raises ConfigError where it cannot be read, where others can read it, or
    where its length is not allowed."""
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
    """A folder that is locked for one cluster until ``close``. ``path``: its present place. Raises
    ConfigError where it cannot be used."""

    def __init__(self, path: Path, *, is_lasting: bool) -> None:
        """Lock the folder, and write its secret if it has none. ``is_lasting``: its content outlives the
        cluster."""
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
        """Make the folder where it does not exist, and return the descriptor that holds its lock. Raises
        ConfigError."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_lasting:
                _check_private(path.parent)
            for _ in range(_TRIES):
                path.mkdir(mode=0o700, exist_ok=True)
                _check_private(path)
                try:
                    lock = _locked(path)
                except BlockingIOError:  # a process that only tests the lock holds it for a moment
                    time.sleep(_TRY_S)
                    continue
                if _is_at(lock, path):
                    return lock
                os.close(lock)  # the folder was removed before it was locked
        except OSError as error:
            raise ConfigError(f"cannot use the cluster's folder {path}: {error.strerror}") from error
        raise ConfigError(f"another cluster uses the folder {path}")

    def mend(self) -> None:
        """Make the folder and the secret again where they have vanished. Where another cluster has taken the
        place, the new folder is beside it. Raises ConfigError."""
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
        """Unlock the folder, and remove content that has no use any more."""
        if self._is_lasting:
            for name in ("admin.sock", *(file.name for file in self.path.glob("*.step"))):
                (self.path / name).unlink(missing_ok=True)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def is_in_use(folder: Path) -> bool:
    """Return whether a living supervisor has the folder."""
    return _is_free(folder) is False


def was_left(folder: Path) -> bool:
    """Return whether the folder's supervisor has died: its socket exists, and its lock is free."""
    return admin_socket(folder).exists() and _is_free(folder) is True


def _is_free(folder: Path) -> bool | None:
    """Return whether no supervisor has the folder's lock. Returns None where that cannot be found out."""
    try:
        os.close(_locked(folder, fcntl.LOCK_SH))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _locked(folder: Path, how: int = fcntl.LOCK_EX) -> int:
    """Lock the folder and return the descriptor that holds the lock. Raises OSError, and BlockingIOError
    where another process has the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether this open folder is the one at the path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


def remove_left(root: Path) -> None:
    """Remove the folders of clusters whose supervisors have died: no process holds their locks."""
    for folder in root.glob("cluster-*"):
        with contextlib.suppress(OSError):
            lock = _locked(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def admin_socket(folder: Path) -> Path:
    """Return the path of the socket on which the router listens for the operator."""
    return folder / "admin.sock"


@contextlib.contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """Yield a path of the admin socket that goes through the folder's open descriptor. A socket's path may
    have 107 bytes only, and this one is always short. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{admin_socket(folder).name}"
    finally:
        os.close(descriptor)


def step_file(folder: Path, replica: int, epoch: int) -> Path:
    """Return the path of the file in which a replica notes the requests of its step."""
    return folder / f"r{replica}.e{epoch}.step"


def _check_private(path: Path) -> None:
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise ConfigError(f"the cluster's folder {path} is no folder")
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise ConfigError(f"the cluster's folder {path} must be yours alone: chmod 700 it")
