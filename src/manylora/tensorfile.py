"""The safetensors format, read without mapping a file: its header, and where each tensor lies.

Owns the check that every tensor lies inside the file, so that a truncated, corrupt or hostile file ends in one
error and never in a crash or in an allocation larger than the file. The package ``safetensors`` maps what it
opens: a file that is written anew meanwhile ends the process (SIGBUS). Does not know what a tensor means. No torch
here.
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
"""An adapter of a 126-layer model with every projection adapted needs 0.3 MiB; a model has the format's bound."""

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an element, of the types that are read."""

_MOST_DIMENSIONS = 8
_LENGTH_BYTES = 8
_MOST_SHOWN = 200
_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_PROTOCOLS = range(2, 6)

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class TensorFileError(ValueError):
    """A fault of a file, in one line that names the file but not its folder."""


class StoredTensor(NamedTuple):
    """The place of a tensor: ``[begin, begin + size_bytes)`` of the file, row-major."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=_MOST_DIMENSIONS)]
    data_offsets: tuple[_Count, _Count]


def shown(text: str) -> str:
    """A file's own words for a message: short, on one line, without what a terminal obeys or cannot encode."""
    start = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    return start if start.isprintable() else ascii(start)


def status_of(path: Path) -> os.stat_result:
    """Of a regular file. Raises TensorFileError when it is missing, unreadable or not a file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise TensorFileError(f"cannot read {path.name}: {reason(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise TensorFileError(f"{path.name} is not a regular file")
    return status


def reason(error: Exception) -> str:
    """Why the system could not read; without the path, which says where on the server it lies."""
    return getattr(error, "strerror", None) or str(error)


def read_header(path: Path, of: Literal["adapter", "model"]) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises TensorFileError on anything malformed."""
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
        return _checked(_parsed(raw, end, size_bytes, name), end, size_bytes, name)
    except TensorFileError as error:
        if foreign := _foreign_format(start):
            fault = "not safetensors: pickle files are refused, convert to safetensors"
            raise TensorFileError(f"{name} is {foreign}, {fault}") from error
        raise


def _foreign_format(start: bytes) -> str | None:
    # Asked only of a file that proved not to be safetensors: a header length may look like a pickle's start.
    if start.startswith(_ZIP_MAGIC):
        return "a zip archive (torch.save)"
    if len(start) > 1 and start[0] == 0x80 and start[1] in _PICKLE_PROTOCOLS:
        return "a pickle"
    return None


def _parsed(raw: bytes, begin: int, size_bytes: int, name: str) -> dict[str, StoredTensor]:
    try:
        # Not decoded by msgspec: a name may hold half a character, and is to be shown.
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
    return found


def _checked(
    tensors: dict[str, StoredTensor], begin: int, size_bytes: int, name: str
) -> dict[str, StoredTensor]:
    """Tensors lie end to end from ``begin`` to the end of the file, as the format demands."""
    for tensor in sorted(tensors.values(), key=lambda each: (each.begin, each.size_bytes)):
        if tensor.begin != begin:
            raise TensorFileError(f"{name}: the header is corrupt (tensors overlap or leave a gap)")
        begin += tensor.size_bytes
    if begin > size_bytes:
        raise TensorFileError(f"{name} is truncated: {size_bytes} bytes of {begin}")
    if begin < size_bytes:
        raise TensorFileError(f"{name} is corrupt: {size_bytes - begin} bytes past its last tensor")
    return tensors


def fill(file: int, target: memoryview, begin: int) -> bool:
    """Read bytes from ``begin`` on into contiguous memory: whether the file had them all. Raises OSError."""
    target = target.cast("B")
    while target:
        count = os.preadv(file, [target], begin)
        if not count:
            return False
        begin, target = begin + count, target[count:]
    return True
