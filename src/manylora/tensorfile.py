"""Reads the header of a safetensors file, and so the place of each tensor, without mapping the file.

Owns the check that every tensor is inside the file. So a truncated, corrupt or hostile file leads to one
error, never to a crash or to an allocation larger than the file. The package ``safetensors`` maps the files
that it opens: if such a file is rewritten while it is mapped, the process dies (SIGBUS). Does not know what a
tensor means, and loads no torch.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

MOST_HEADER_BYTES = {"adapter": 2 * 2**20, "model": 100 * 2**20}
"""The largest header that is read, in bytes. An adapter on all projections of a 126-layer model needs
0.3 MiB; for a model it is the format's own bound."""

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an element, for each dtype that can be loaded."""

_MOST_DIMENSIONS = 8
_LENGTH_BYTES = 8
_MOST_SHOWN = 200
_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_PROTOCOLS = range(2, 6)

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class TensorFileError(ValueError):
    """The error of a file that is unreadable or malformed.

    The message is one line that names the file but not its folder.
    """


class StoredTensor(NamedTuple):
    """One tensor of a file: its bytes are ``[begin, begin + size_bytes)`` of the file, row-major."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=_MOST_DIMENSIONS)]
    data_offsets: tuple[_Count, _Count]


def shown(text: str) -> str:
    """Make text from a file fit for a message: short, one line, no control or unencodable characters."""
    start = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    return start if start.isprintable() else ascii(start)


def status_of(path: Path) -> os.stat_result:
    """Return the status of a regular file. Raises TensorFileError if it is missing, unreadable or not one."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise TensorFileError(f"cannot read {path.name}: {reason(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise TensorFileError(f"{path.name} is not a regular file")
    return status


def reason(error: Exception) -> str:
    """Return the system's reason for a failed read, without the path, which would reveal server folders."""
    return getattr(error, "strerror", None) or str(error)


def read_header(path: Path, of: Literal["adapter", "model"]) -> dict[str, StoredTensor]:
    """Read the tensors of a file, by name. Raises TensorFileError on anything unreadable or malformed.

    ``of``: the kind of file, which bounds the header's size.
    """
    size_bytes, name = status_of(path).st_size, path.name
    try:
        with open(path, "rb") as file:
            start = file.read(_LENGTH_BYTES)
            header_bytes = int.from_bytes(start, "little")
            raw = file.read(header_bytes) if header_bytes <= MOST_HEADER_BYTES[of] else b""
    except OSError as error:
        raise TensorFileError(f"cannot read {name}: {reason(error)}") from error
    end = _LENGTH_BYTES + header_bytes
    try:
        if len(start) < _LENGTH_BYTES or end > size_bytes:
            fault = f"{size_bytes} bytes cannot hold its header"
            raise TensorFileError(f"{name} is truncated or not a safetensors file: {fault}")
        if header_bytes > MOST_HEADER_BYTES[of]:
            raise TensorFileError(f"{name}: a header of {header_bytes} bytes is more than any {of} needs")
        return _parsed(raw, end, size_bytes, name)
    except TensorFileError as error:
        if foreign := _foreign_format(start):
            fault = "not safetensors: pickle files are refused, convert to safetensors"
            raise TensorFileError(f"{name} is {foreign}, {fault}") from error
        raise


def _foreign_format(start: bytes) -> str | None:
    # Called only after the file failed as safetensors, whose header length may look like a pickle's start.
    if start.startswith(_ZIP_MAGIC):
        return "a zip archive (torch.save)"
    if len(start) > 1 and start[0] == 0x80 and start[1] in _PICKLE_PROTOCOLS:
        return "a pickle"
    return None


def _parsed(raw: bytes, begin: int, size_bytes: int, name: str) -> dict[str, StoredTensor]:
    """Return the tensors if they fill the file from ``begin`` to its end without gaps, as the format demands.

    Raises TensorFileError otherwise.
    """
    try:
        # Not msgspec, which rejects a lone surrogate in a name: the error must name the entry.
        entries = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise TensorFileError(f"{name}: the safetensors header is corrupt ({error})") from error
    if not isinstance(entries, dict):
        raise TensorFileError(f"{name}: the safetensors header is corrupt (not a JSON object)")
    entries.pop("__metadata__", None)
    found = {}
    for key, value in entries.items():
        try:
            dtype, shape, (first, end) = msgspec.structs.astuple(msgspec.convert(value, _Entry))
        except (msgspec.ValidationError, OverflowError) as error:
            raise TensorFileError(f"{name}: the header's entry for {shown(key)} is corrupt") from error
        size = math.prod(shape) * DTYPE_BYTES[dtype] if dtype in DTYPE_BYTES else end - first
        if first > end or end - first != size or max(shape, default=0) > size_bytes:
            raise TensorFileError(f"{name}: the header's entry for {shown(key)} is corrupt")
        found[key] = StoredTensor(dtype, shape, begin + first, end - first)
    for tensor in sorted(found.values(), key=lambda each: (each.begin, each.size_bytes)):
        if tensor.begin != begin:
            raise TensorFileError(f"{name}: the header is corrupt (tensors overlap or leave a gap)")
        begin += tensor.size_bytes
    if begin > size_bytes:
        raise TensorFileError(f"{name} is truncated: {size_bytes} bytes of {begin}")
    if begin < size_bytes:
        raise TensorFileError(f"{name} is corrupt: {size_bytes - begin} bytes past its last tensor")
    return found


def fill(file: int, target: memoryview, begin: int) -> bool:
    """Fill contiguous ``target`` from a file's offset ``begin``; return whether it had all bytes.

    Raises OSError.
    """
    target = target.cast("B")
    while target:
        count = os.preadv(file, [target], begin)
        if not count:
            return False
        begin, target = begin + count, target[count:]
    return True
