"""The safetensors file format, read defensively: the header alone, then byte ranges of single tensors.

Owns the check that every tensor lies inside the file, so that a truncated, corrupt or hostile file ends in
an AdapterError and never in a crash or in an allocation larger than the file. Does not know what a tensor
means. No torch here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

from manylora.adapters.faults import FilesChanged
from manylora.protocol import AdapterError

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""The dtypes that adapters may have; bytes an element."""

LARGEST_HEADER_BYTES = 2 * 2**20
"""A 126-layer model with every projection adapted needs 0.3 MiB."""

MOST_TENSORS = 16384
"""A 126-layer model with every projection adapted has 1,764."""

_MOST_DIMENSIONS = 8

_LENGTH_BYTES = 8
_INT_ONLY = frozenset({int})  # leaves bool out
_MOST_TARGETS = 512  # of one call; Linux takes 1024
_MOST_SHOWN = 200
_SAMPLE_BYTES = 256
_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_PROTOCOLS = range(2, 6)


@dataclasses.dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells one version of a file from the next."""

    size_bytes: int
    mtime_ns: int


class StoredTensor(NamedTuple):
    """Where one tensor lies: ``[begin, begin + size_bytes)`` of the file, row-major."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int


def shown(text: str) -> str:
    """A file's own words for a message: short, on one line, without what a terminal obeys or cannot encode."""
    start = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    return start if start.isprintable() else ascii(start)


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


def sampled_digest(config: Path, weights: Path, tensors: dict[str, StoredTensor]) -> str:
    """Of all of a configuration, and of the header and some bytes of each tensor of the weights.

    It tells files of one size and time apart on every file system, and takes a short read a tensor. Raises
    AdapterError.
    """
    state = hashlib.blake2b(digest_size=16)
    try:
        state.update(config.read_bytes())
        with open(weights, "rb", buffering=0) as file:
            state.update(os.pread(file.fileno(), min((each.begin for each in tensors.values()), default=0), 0))
            for each in tensors.values():
                count = min(_SAMPLE_BYTES, each.size_bytes)
                state.update(os.pread(file.fileno(), count, each.begin + (each.size_bytes - count) // 2))
    except OSError as error:
        raise AdapterError(f"cannot read the adapter's files: {_reason(error)}") from error
    return state.hexdigest()


def read_into(file: FileIO, begin: int, targets: Sequence[memoryview], name: str) -> None:
    """Fill contiguous ``targets`` in turn with bytes from ``begin`` on. From any thread.

    The bytes belong to the tensor ``name``. Plain reads rather than a mapping: a file cut short under a mapping
    kills the process with SIGBUS, a short read is an error that names the tensor.
    """
    try:
        for first in range(0, len(targets), _MOST_TARGETS):
            some = targets[first : first + _MOST_TARGETS]
            left = sum(target.nbytes for target in some)
            while left:
                count = os.preadv(file.fileno(), some, begin)
                if not count:
                    raise FilesChanged(
                        f"the file ended inside tensor {name}: it was changed while being read"
                    )
                begin, left = begin + count, left - count
                if left:
                    some = _after(some, count)
    except OSError as error:
        raise AdapterError(f"cannot read tensor {name}: {_reason(error)}") from error


def _after(targets: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of them when ``count`` bytes are filled."""
    left = []
    for target in targets:
        left.append(target.cast("B")[count:])
        count = max(0, count - target.nbytes)
    return left


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
            raise FilesChanged(f"{name} ended inside its header: it was changed while being read")
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
    if len(header) > MOST_TENSORS:
        raise AdapterError(f"{name}: {len(header)} tensors are more than any adapter needs")
    return header


def _tensors(entries: dict[str, Any], data_start: int, size_bytes: int, name: str) -> dict[str, StoredTensor]:
    tensors = {key: _tensor(key, entry, data_start, size_bytes, name) for key, entry in entries.items()}
    _check_extents(tensors.values(), data_start, size_bytes, name)
    return tensors


def _tensor(key: str, entry: Any, data_start: int, size_bytes: int, name: str) -> StoredTensor:
    if isinstance(entry, dict):
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if (
            isinstance(dtype, str)
            and _is_shape(shape, size_bytes)
            and _are_counts(offsets)
            and len(offsets) == 2
        ):
            if dtype not in DTYPE_BYTES:
                known = ", ".join(DTYPE_BYTES)
                raise AdapterError(f"tensor {shown(key)} has dtype {shown(dtype)}; supported are {known}")
            begin, end = offsets
            if begin <= end and end - begin == math.prod(shape) * DTYPE_BYTES[dtype]:
                return StoredTensor(dtype, tuple(shape), data_start + begin, end - begin)
    raise AdapterError(f"{name}: the header's entry for {shown(key)} is corrupt")


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    # A header has hundreds of these lists, and all of it is read while other threads wait for the GIL.
    return isinstance(value, list) and _INT_ONLY.issuperset(map(type, value)) and min(value, default=0) >= 0


def _is_shape(value: Any, size_bytes: int) -> TypeGuard[list[int]]:
    """Small enough that the product of the dimensions takes no time."""
    return _are_counts(value) and len(value) <= _MOST_DIMENSIONS and max(value, default=0) <= size_bytes


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
