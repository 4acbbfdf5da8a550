"""The safetensors file format, read defensively: the header alone, then byte ranges of single tensors.

Owns the check that every tensor lies inside the file, so that a truncated, corrupt or hostile file ends in
an AdapterError and never in a crash or in an allocation larger than the file. Does not know what a tensor
means. No torch here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from manylora.protocol import AdapterError

DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""The dtypes that adapters may have; bytes an element."""

LARGEST_HEADER_BYTES = 16 * 2**20
"""A 126-layer model with every projection adapted needs 0.3 MiB."""

_LENGTH_BYTES = 8
_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_PROTOCOLS = range(2, 6)


@dataclasses.dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells one version of a file from the next."""

    size_bytes: int
    mtime_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: ``[begin, begin + size_bytes)`` of the file, row-major."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int


def stamp_of(path: Path) -> FileStamp:
    """The stamp of a regular file. Raises AdapterError when it is missing, unreadable or not a file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise AdapterError(f"cannot read {path.name}: {_reason(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise AdapterError(f"{path.name} is not a regular file")
    return FileStamp(status.st_size, status.st_mtime_ns)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name. Raises AdapterError on anything malformed."""
    size_bytes = stamp_of(path).size_bytes
    try:
        with open(path, "rb") as file:
            return _parse(file, size_bytes, path.name)
    except OSError as error:
        raise AdapterError(f"cannot read {path.name}: {_reason(error)}") from error


def read_into(file: FileIO, begin: int, target: memoryview, name: str) -> None:
    """Fill ``target`` with bytes from ``begin`` on, which belong to the tensor ``name``. From any thread.

    Plain reads rather than a mapping: a file cut short under a mapping kills the process with SIGBUS, a
    short read is an error that names the tensor.
    """
    filled = 0
    try:
        while filled < len(target):
            count = os.preadv(file.fileno(), [target[filled:]], begin + filled)
            if not count:
                raise AdapterError(f"the file ended inside tensor {name}: it was changed while being read")
            filled += count
    except OSError as error:
        raise AdapterError(f"cannot read tensor {name}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _parse(file: BinaryIO, size_bytes: int, name: str) -> dict[str, StoredTensor]:
    start = file.read(_LENGTH_BYTES)
    try:
        header_bytes = int.from_bytes(start, "little")
        if len(start) < _LENGTH_BYTES or _LENGTH_BYTES + header_bytes > size_bytes:
            raise AdapterError(
                f"{name} is truncated or not a safetensors file: {size_bytes} bytes cannot hold its header"
            )
        if header_bytes > LARGEST_HEADER_BYTES:
            raise AdapterError(f"{name}: a header of {header_bytes} bytes is more than any adapter needs")
        raw = file.read(header_bytes)
        if len(raw) < header_bytes:
            raise AdapterError(f"{name} ended inside its header: it was changed while being read")
        return _tensors(_entries(raw, name), _LENGTH_BYTES + header_bytes, size_bytes, name)
    except AdapterError as error:
        foreign = _foreign_format(start)
        if foreign is None:
            raise
        raise AdapterError(
            f"{name} is {foreign}, not safetensors: pickle files are refused, convert to safetensors"
        ) from error


def _foreign_format(start: bytes) -> str | None:
    # Asked only of a file that proved not to be safetensors: a header length may look like a pickle's start.
    if start.startswith(_ZIP_MAGIC):
        return "a zip archive (torch.save)"
    if len(start) > 1 and start[0] == 0x80 and start[1] in _PICKLE_PROTOCOLS:
        return "a pickle"
    return None


def _entries(raw: bytes, name: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key appears twice")
        return found

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{name}: the safetensors header is corrupt ({error})") from error
    if not isinstance(header, dict):
        raise AdapterError(f"{name}: the safetensors header is corrupt (not a JSON object)")
    header.pop("__metadata__", None)
    return header


def _tensors(entries: dict[str, Any], data_start: int, size_bytes: int, name: str) -> dict[str, StoredTensor]:
    tensors = {key: _tensor(key, entry, data_start, name) for key, entry in entries.items()}
    _check_extents(tensors.values(), data_start, size_bytes, name)
    return tensors


def _tensor(key: str, entry: Any, data_start: int, name: str) -> StoredTensor:
    corrupt = AdapterError(f"{name}: the header's entry for {key[:200]!r} is corrupt")
    if not isinstance(entry, dict):
        raise corrupt
    dtype, shape, offsets = (
        entry.get("dtype"),
        _counts(entry.get("shape")),
        _counts(entry.get("data_offsets")),
    )
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise corrupt
    if dtype not in DTYPE_BYTES:
        raise AdapterError(
            f"tensor {key[:200]} has dtype {dtype[:20]}; supported are {', '.join(DTYPE_BYTES)}"
        )
    begin, end = offsets
    if begin > end or end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise corrupt
    return StoredTensor(dtype, shape, data_start + begin, end - begin)


def _counts(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(number) is int and number >= 0 for number in value):
        return tuple(value)
    return None


def _check_extents(tensors: Iterable[StoredTensor], data_start: int, size_bytes: int, name: str) -> None:
    """Tensors lie end to end from ``data_start`` to the end of the file, as the format demands."""
    expected = data_start
    for tensor in sorted(tensors, key=lambda t: (t.begin, t.size_bytes)):
        if tensor.begin != expected:
            raise AdapterError(f"{name}: the header is corrupt (tensors overlap or leave a gap)")
        expected += tensor.size_bytes
    if expected > size_bytes:
        raise AdapterError(f"{name} is truncated: {size_bytes} bytes of {expected}")
    if expected < size_bytes:
        raise AdapterError(f"{name} is corrupt: {size_bytes - expected} bytes past its last tensor")
