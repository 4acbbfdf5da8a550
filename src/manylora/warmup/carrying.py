"""Caches of compiled kernels as one file, carried to other machines of the same kind.

The file is a compressed tar: first what kind of machine it is of, then the caches' files. They are programs, so
the file deserves the trust that the machine has which wrote it.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import secrets
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from manylora.config import ConfigError
from manylora.kernels.caches import cache_folders, machine_kind, moved

_HEAD = "manylora-kernels.json"
_FORMAT = 1
_UNFINISHED = ("tmp.", "lock")
"""How the names of folders and files begin that a compiler is still at work on."""


class _Cached(NamedTuple):
    target: Path
    data: bytes
    mtime: float
    mode: int


@contextlib.contextmanager
def exporting(path: Path) -> Iterator[None]:
    """What is cached when the block has ended is written to the file, which is there once it is whole. Raises
    ConfigError, before the block where that can be known."""
    if path.is_dir():
        raise ConfigError(f"--export {path} is a folder")
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        file = open(scratch, "xb")  # noqa: SIM115  # closed below
    except OSError as error:
        raise ConfigError(f"--export {path}: {error.strerror}") from error
    try:
        with file:
            yield
            try:
                count = _write(file)
                file.flush()
                os.fsync(file.fileno())
                scratch.replace(path)
            except OSError as error:
                raise ConfigError(f"--export {path}: {error.strerror}") from error
    finally:
        scratch.unlink(missing_ok=True)
    print(f"exported {count} files of compiled kernels to {path}")


def import_caches(path: Path) -> None:
    """Put into the caches what the file holds and they do not. Raises ConfigError, and changes nothing, where it
    is not a whole export, or one of another kind of machine."""
    try:
        with gzip.open(path) as stream:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                files = _read(archive, cache_folders())
            while stream.read(2**20):  # to the end, where its checksum is
                pass
    except ConfigError:
        raise
    except (EOFError, KeyError, UnicodeError, ValueError, tarfile.TarError, zlib.error) as error:
        raise ConfigError(
            f"--import {path} is not an export of kernels, or not a whole one: {error}"
        ) from error
    except OSError as error:
        reason = error.strerror or f"it is not an export of kernels, or not a whole one: {error}"
        raise ConfigError(f"--import {path}: {reason}") from error
    try:
        count = sum(_put(cached) for cached in files)
    except OSError as error:
        raise ConfigError(f"--import {path}: {error.filename}: {error.strerror}") from error
    print(f"imported {count} files of compiled kernels from {path}, {len(files) - count} more were there")


def _write(file: IO[bytes]) -> int:
    """How many files of the caches were written."""
    count = 0
    with (
        gzip.GzipFile("", "wb", compresslevel=3, fileobj=file, mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        head = json.dumps({"format": _FORMAT, "kind": machine_kind()}).encode()
        described = tarfile.TarInfo(_HEAD)
        described.size = len(head)
        archive.addfile(described, io.BytesIO(head))
        for name, folder in cache_folders().items():
            for found in sorted(folder.rglob("*")):
                inside = found.relative_to(folder)
                if any(part.startswith(_UNFINISHED) for part in inside.parts):
                    continue
                if found.is_symlink() or not found.is_file():
                    continue
                member = archive.gettarinfo(found, f"{name}/{inside.as_posix()}")
                member.uid = member.gid = 0
                member.uname = member.gname = ""
                with open(found, "rb") as opened:
                    archive.addfile(member, opened)
                count += 1
    return count


def _read(archive: tarfile.TarFile, folders: Mapping[str, Path]) -> list[_Cached]:
    """All of it, as it is to be. Raises ConfigError for another kind of machine, ValueError for what no export
    holds."""
    head = archive.next()
    if head is None or head.name != _HEAD:
        raise ValueError("it does not begin like one")
    _check(json.loads(_content(archive, head)))
    found = []
    while (member := archive.next()) is not None:
        name = PurePosixPath(member.name)
        if not member.isreg() or name.is_absolute() or ".." in name.parts or len(name.parts) < 2:
            raise ValueError(f"it has {member.name!r}")
        folder = folders.get(name.parts[0])
        if folder is None:
            raise ValueError(f"it has {member.name!r}, and nothing here has such a cache")
        target = folder.joinpath(*name.parts[1:])
        data = moved(target.name, _content(archive, member), target.parent)
        found.append(_Cached(target, data, member.mtime, member.mode & 0o700))
    return found


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    opened = archive.extractfile(member)
    if opened is None:
        raise ValueError(f"{member.name!r} is no file")
    return opened.read()


def _check(head: object) -> None:
    if not isinstance(head, dict) or head.get("format") != _FORMAT or not isinstance(head.get("kind"), dict):
        raise ValueError("it is of another version of manylora")
    own, others = machine_kind(), head["kind"]
    for name, here in own.items():
        if others.get(name) != here:
            raise ConfigError(
                f"the imported kernels are for another kind of machine: {name} is {others.get(name)} there, "
                f"{here} here"
            )


def _put(cached: _Cached) -> bool:
    """Whether it was not there."""
    if cached.target.exists():
        return False
    cached.target.parent.mkdir(parents=True, exist_ok=True)
    scratch = cached.target.with_name(f"tmp.{secrets.token_hex(8)}")
    scratch.write_bytes(cached.data)
    scratch.chmod(cached.mode | 0o600)
    os.utime(scratch, (cached.mtime, cached.mtime))
    scratch.replace(cached.target)
    return True
