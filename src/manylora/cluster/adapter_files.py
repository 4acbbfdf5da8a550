"""Keeps adapters' files on a machine: computes their digests, caches them in a folder, and copies them from
the router's machine.

Several processes share one folder, which never grows beyond its bound. A version's files appear whole under
their digest. They belong to their user alone and are never written again. They stay while a process uses
them, from ``take`` to ``release`` or to the process's end. The folder is not trusted: each ``take`` compares
the files with their digest.

The copy asks for a piece when the piece before has arrived. So a copy of gigabytes never has more than one
piece under way. Neither the router's decisions nor tokens wait for it: they use other links. This module does
not know what the files hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from manylora.cluster import messages
from manylora.cluster.link import REDIAL_S, Credentials, Hello, Link, LinkError, LinkRefused, redial
from manylora.config.declaring import ConfigError
from manylora.protocol.executor import AdapterError
from manylora.types import AdapterId

_CHUNK_BYTES = 1 << 20
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

_PART = ".part"
"""The suffix of a folder whose files are still being written."""
_SIZE = "size"
"""The name of a file in an unfinished folder. It holds the number of bytes that the folder's files will have."""
_DEFAULT_BYTES = 50 * 2**30
"""The bound of a cache folder whose size the user does not set."""
_SAFE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

PATIENCE_S = 10.0
"""How long a copy waits for a router that is gone. Another router has taken its place by then."""

_Answer = TypeVar("_Answer", messages.Files, messages.FilePiece)


def model_digest(folder: Path) -> str:
    """Digest a model's folder: the content of its small files, and names and sizes of its weights."""
    state = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            state.update(f"{path.name} {path.stat().st_size}\0".encode("utf-8", "replace"))
        elif path.suffix in (".json", ".jinja") and path.is_file():
            state.update(
                f"{path.name}\0".encode("utf-8", "replace") + hashlib.sha256(path.read_bytes()).digest()
            )
    return state.hexdigest()


def adapter_digest(folder: Path) -> str:
    """Digest all bytes of the files in an adapter's folder that an engine reads. Returns "" where a file
    cannot be read."""
    state = hashlib.sha256()
    try:
        for name in ADAPTER_FILES:
            with (folder / name).open("rb") as file:
                state.update(f"{name} {os.fstat(file.fileno()).st_size}\0".encode())
                while chunk := file.read(_CHUNK_BYTES):
                    state.update(chunk)
    except OSError:
        return ""
    return state.hexdigest()


class CacheFull(Exception):
    """A lack of room in the cache folder; the message gives the bytes allowed, used and needed."""


class AdapterCache:
    """A machine's folder of adapters' files. Used by one thread. Raises OSError where the disk fails."""

    def __init__(self, path: Path, most_bytes: int | None) -> None:
        """Create the folder if it does not exist, remove unfinished copies, and evict down to the bound.
        Raises ConfigError where the folder cannot be used."""
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
            pass  # the files are in use by other processes, which will release them

    def take(self, adapter: AdapterId, digest: str) -> Path | None:
        """Take the folder with these files for a version, and keep it until ``release``. Returns None where
        it does not exist, or where its files do not have this digest: then it is removed."""
        folder = self.path / digest
        if adapter in self._taken:
            return folder
        with self._locked():
            try:
                lock = os.open(folder, _SAFE)
            except FileNotFoundError:
                return None
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # no wait: removers hold the lock
        if adapter_digest(folder) != digest:
            os.close(lock)
            with self._locked():
                shutil.rmtree(folder, ignore_errors=True)
            return None
        os.utime(folder)
        self._taken[adapter] = lock
        return folder

    def release(self, adapter: AdapterId) -> None:
        """Release the version's files, if it has any."""
        if (lock := self._taken.pop(adapter, None)) is not None:
            os.close(lock)

    @contextlib.contextmanager
    def made(self, adapter: AdapterId, digest: str, num_bytes: int) -> Iterator[Path]:
        """Make an empty folder for ``num_bytes`` bytes of files. After the block, the folder is the
        version's, under its digest, unless another process was faster. After an error it is removed. To make
        room, folders that no process uses are evicted, the least recently used first. Raises CacheFull."""
        part = self.path / f"{digest}.{secrets.token_hex(8)}{_PART}"
        lock = -1
        try:
            with self._locked():
                self._make_room(num_bytes)
                part.mkdir(mode=0o700)
                lock = os.open(part, _SAFE)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (part / _SIZE).write_text(str(num_bytes))  # the room is reserved from now on
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
        """Remove unfinished copies, and evict unused folders until ``num_bytes`` more fit. The caller holds
        the folder's lock. Raises CacheFull."""
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
        """List the folders, the least recently used first."""
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
        """Hold the folder's lock during the block, which must be short."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(self.path / "lock", flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _is_free(entry: Path) -> bool:
    """Return whether no process uses this folder."""
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


class FileSource(NamedTuple):
    """The router that files are copied from, whichever process is the router at the moment."""

    address: tuple[str, int]
    credentials: Credentials
    hello: Hello


def pull(source: FileSource, cache: AdapterCache, listing: messages.Listing) -> Path:
    """Return the folder in the cache that has a version's files, and copy them where it lacks them. The
    folder stays until ``cache.release``. Blocks, so it needs a thread of its own. Raises AdapterError."""
    try:
        if listing.digest and (folder := cache.take(listing.id, listing.digest)) is not None:
            return folder
        return asyncio.run(_Pull(source, cache, listing.id).run(listing.digest))
    except CacheFull as error:
        raise AdapterError(f"adapter {listing.name!r} cannot be kept: {error}", status=503) from error
    except OSError as error:
        raise AdapterError(
            f"adapter {listing.name!r} cannot be kept in {cache.path}: {error.strerror}", status=503
        ) from error


class _Pull:
    """A copy of one version's files over links that may end."""

    def __init__(self, source: FileSource, cache: AdapterCache, adapter: AdapterId) -> None:
        self._source = source
        self._cache = cache
        self._id = adapter
        self._link: Link | None = None

    async def run(self, digest: str) -> Path:
        """Copy the files. Raises AdapterError, OSError and CacheFull."""
        try:
            files = await self._ask(messages.AskFiles(self._id), messages.Files)
            is_named = digest in ("", files.digest) and re.fullmatch("[0-9a-f]{64}", files.digest)
            if not is_named or len(files.sizes) != len(ADAPTER_FILES) or min(files.sizes) < 0:
                raise AdapterError("the router names other files than the registry has")
            if not digest and (folder := self._cache.take(self._id, files.digest)) is not None:
                return folder
            with self._cache.made(self._id, files.digest, sum(files.sizes)) as folder:
                for number, size in enumerate(files.sizes):
                    await self._copy(number, size, folder / ADAPTER_FILES[number])
                if adapter_digest(folder) != files.digest:
                    raise AdapterError("the files that came are not those that were loaded")
            taken = self._cache.take(self._id, files.digest)
            if taken is None:
                raise AdapterError(f"the files in {self._cache.path} change by themselves", status=503)
            return taken
        finally:
            if self._link is not None:
                self._link.abort()

    async def _copy(self, number: int, size: int, path: Path) -> None:
        with path.open("xb") as file:
            for offset in range(0, size, messages.PIECE_BYTES):
                num_bytes = min(messages.PIECE_BYTES, size - offset)
                ask = messages.AskPiece(self._id, number, offset, num_bytes)
                piece = await self._ask(ask, messages.FilePiece)
                if len(piece.data) != num_bytes:
                    raise AdapterError("the adapter's files have become shorter while they were copied")
                file.write(piece.data)

    async def _ask(self, message: messages.ToRouterFromPuller, kind: type[_Answer]) -> _Answer:
        """Ask the router, and ask its successor where the router ends before it answers. Raises AdapterError."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                if self._link is None or not self._link.is_open:
                    patience_s = until_s - time.monotonic()
                    self._link = await redial(*self._source, messages.ToPullerFromRouter, most_s=patience_s)
            except LinkRefused as error:
                raise AdapterError(f"the router gives no files: {error}", status=503) from error
            except LinkError as error:
                raise AdapterError(f"the router cannot be reached: {error}", status=503) from error
            self._link.send(message)
            answer = await self._link.receive()
            if isinstance(answer, messages.NoFiles):
                raise AdapterError(answer.error.message, answer.error.status)
            if isinstance(answer, kind):
                return answer
            if answer is not None:
                raise AdapterError("the router has answered something else")
            if time.monotonic() > until_s:
                raise AdapterError("the router ends each link for files", status=503)
            await asyncio.sleep(REDIAL_S)
