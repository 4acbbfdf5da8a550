"""A part of one tensor of a safetensors file, read without mapping the file.

Owns where a tensor's rows lie in its file. A mapping would count whatever the system reads around the part as this
process's memory, which is to hold its part of the model alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch

BLOCK_BYTES = 2**23
"""Read at a time."""

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class StoredRows:
    """One tensor of a file that has been opened as safetensors before, so its header is sound."""

    def __init__(self, path: Path, name: str) -> None:
        """Raises OSError, KeyError where the file has no such tensor, ValueError where it is of an odd dtype."""
        self._path = path
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(length))[name]
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"stored as {entry['dtype']}")
        self.dtype = _DTYPES[entry["dtype"]]
        self._shape: list[int] = entry["shape"]
        self._begin = 8 + length + entry["data_offsets"][0]

    def blocks(self, rows: range | None, columns: range | None) -> Iterator[tuple[int, torch.Tensor]]:
        """These rows and columns (None: all), as ``Checkpoint.blocks`` gives them. Raises ValueError where
        the file is cut short."""
        rows = range(self._shape[0]) if rows is None else rows
        row_elements = 1
        for size in self._shape[1:]:
            row_elements *= size
        row_bytes = row_elements * self.dtype.itemsize
        most = max(1, BLOCK_BYTES // max(row_bytes, 1))
        buffer = bytearray(min(most, len(rows)) * row_bytes)
        if not buffer:
            return
        with open(self._path, "rb", buffering=0) as file:
            for first in range(rows.start, rows.stop, most):
                count = min(most, rows.stop - first)
                target = memoryview(buffer)[: count * row_bytes]
                _read(file.fileno(), target, self._begin + first * row_bytes)
                block = torch.frombuffer(target, dtype=self.dtype).view(count, *self._shape[1:])
                if columns is not None:
                    block = block[:, columns.start : columns.stop]
                yield first - rows.start, block


def _read(file: int, target: memoryview, begin: int) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(file, [target[done:]], begin + done)
        if not count:
            raise ValueError("the file is cut short")
        done += count
