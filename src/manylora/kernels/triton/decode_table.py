"""Launch sizes of the decoding kernel: what was measured on a device, by heads and rows, and what holds elsewhere.

Owns the format of ``kernels/tuned/attention.json``. Nothing is tried out at run time; ``benchmarks/h200_ops.py``
measures.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

TABLE = Path(__file__).parents[1] / "tuned" / "attention.json"


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Launch sizes of ``decode_kernel`` for 16-bit types and heads of at most 128 dimensions.

    ``programs``: into how many the rows' contexts are cut, about; None: as many as keep the device busy.
    """

    block_n: int = 64
    warps: int = 4
    stages: int = 3
    programs: int | None = None


class DecodeTable:
    """A choice for each number of rows. ``choices``: (rows up to which it holds, choice), ascending."""

    def __init__(self, choices: tuple[tuple[int, DecodeConfig], ...] = ()) -> None:
        self._choices = choices

    def choice(self, num_rows: int) -> DecodeConfig:
        """For so many rows of one query; past the last entry that one holds too."""
        held = (config for most, config in self._choices if num_rows <= most)
        return next(held, self._choices[-1][1] if self._choices else DecodeConfig())


def stored_table(device_name: str, group: int, head_dim: int, path: Path = TABLE) -> DecodeTable:
    """What was measured on devices of this name for heads of this size, ``group`` to a key head.

    The file: ``{device name: [{"group", "head_dim", "rows", and DecodeConfig's fields}, ...]}``.
    """
    rows = json.loads(path.read_text()).get(device_name, []) if path.is_file() else []
    names = [field.name for field in dataclasses.fields(DecodeConfig)]
    found = [
        (int(row["rows"]), DecodeConfig(**{name: row[name] for name in names}))
        for row in rows
        if (row["group"], row["head_dim"]) == (group, head_dim)
    ]
    return DecodeTable(tuple(sorted(found, key=lambda choice: choice[0])))
