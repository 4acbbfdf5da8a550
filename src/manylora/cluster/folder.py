"""The cluster's folder: its lock, its secret, its admin socket. Does not know what any of them is for.

Everything in it is its owner's alone (0700, files 0600). One cluster at a time has it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path

from manylora.config import ConfigError

SECRET = "secret"
"""The file's name."""
_SECRET_BYTES = 32
_TRIES, _TRY_S = 5, 0.02
_LEAST_SECRET_BYTES = 16
_MOST_SECRET_BYTES = 4096


def default_folder(port: int) -> Path:
    """The folder of this user's cluster on this port."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    root = Path(runtime) if runtime and os.path.isdir(runtime) else Path(tempfile.gettempdir())
    return root / f"manylora-{os.getuid()}" / f"cluster-{port}"


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
    """Opened for one cluster; raises ConfigError where that cannot be. ``close`` lets the next have it."""

    def __init__(self, path: Path, *, is_lasting: bool) -> None:
        """``is_lasting``: what it holds outlives the cluster."""
        self.path = path
        self._is_lasting = is_lasting
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not is_lasting:
                _check_private(path.parent)
            path.mkdir(mode=0o700, exist_ok=True)
            _check_private(path)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot use the cluster's folder {path}: {error.strerror}") from error
        if not self._take():
            os.close(self._lock)
            raise ConfigError(f"another cluster uses the folder {path}")
        try:
            self._make_secret()
        except BaseException:
            self.close()
            raise

    def _take(self) -> bool:
        """Whether no other has the lock; a process that only looks has it for a moment."""
        for _ in range(_TRIES):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                time.sleep(_TRY_S)
            else:
                return True
        return False

    def _make_secret(self) -> None:
        try:
            descriptor = os.open(self.secret_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            read_secret(self.secret_path)
            return
        except OSError as error:
            raise ConfigError(f"cannot write {self.secret_path}: {error.strerror}") from error
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(_SECRET_BYTES) + "\n")

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
        with (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def admin_socket(folder: Path) -> Path:
    """Where the router listens for the operator."""
    return folder / "admin.sock"


def step_file(folder: Path, replica: int, epoch: int) -> Path:
    """Where a replica says which requests its step is of."""
    return folder / f"r{replica}.e{epoch}.step"


def _check_private(path: Path) -> None:
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise ConfigError(f"the cluster's folder {path} is no folder")
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise ConfigError(f"the cluster's folder {path} must be yours alone: chmod 700 it")
