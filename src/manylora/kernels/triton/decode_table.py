"""Launch sizes of attention: what was measured on a device, by heads and rows, and what holds elsewhere.

Owns the format of ``kernels/tuned/attention.json``. Nothing is tried out at run time;
``manylora bench kernels --tune attention`` measures and writes the table.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from manylora.kernels.triton.launch import power_of_two

TABLE = Path(__file__).parents[1] / "tuned" / "attention.json"


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Launch sizes for rows of one query, of 16-bit types and heads of at most 128 dimensions.

    ``programs``: into how many the rows' contexts are cut, about; None: as many as keep the device busy.
    """

    block_n: int = 64
    warps: int = 4
    stages: int = 3
    programs: int | None = None


@dataclasses.dataclass(frozen=True)
class AttentionTileConfig:
    """Launch sizes where rows have several queries, for the same types and heads.

    ``rows``: of a program's product, which are queries times the heads that share a key head. ``registers``: of a
    thread, at most: what lets more programs, also those of one query, share a multiprocessor.
    """

    rows: int = 64
    block_n: int = 32
    warps: int = 4
    stages: int = 3
    registers: int | None = 168


@dataclasses.dataclass(frozen=True)
class DecodeTable:
    """A choice for each number of rows. ``choices``: (rows up to which it holds, choice), ascending.

    ``group``: how many heads share a key head.
    """

    choices: tuple[tuple[int, DecodeConfig], ...] = ()
    group: int = 1
    tiles: AttentionTileConfig = AttentionTileConfig()

    @property
    def tile(self) -> int:
        """How many queries of a row are one program's work."""
        return max(2, self.tiles.rows // power_of_two(self.group))

    def choice(self, num_rows: int) -> DecodeConfig:
        """The config for so many rows of one query; past the last entry that one holds too."""
        held = (config for most, config in self.choices if num_rows <= most)
        return next(held, self.choices[-1][1] if self.choices else DecodeConfig())


def stored_table(device_name: str, group: int, head_dim: int, path: Path = TABLE) -> DecodeTable:
    """What was measured on devices of this name for heads of this size, ``group`` to a key head.

    The file: ``{device name: [{"group", "head_dim", "rows", and DecodeConfig's fields}, ...]}``, and one with
    ``"tiles"``, AttentionTileConfig's fields, in place of the rows.
    """
    stored = json.loads(path.read_text()).get(device_name, []) if path.is_file() else []
    rows = [row for row in stored if (row["group"], row["head_dim"]) == (group, head_dim)]
    names = [field.name for field in dataclasses.fields(DecodeConfig)]
    found = [
        (int(row["rows"]), DecodeConfig(**{name: row[name] for name in names}))
        for row in rows
        if "rows" in row
    ]
    tiles = next(
        (AttentionTileConfig(**row["tiles"]) for row in rows if "tiles" in row), AttentionTileConfig()
    )
    return DecodeTable(tuple(sorted(found, key=lambda choice: choice[0])), group, tiles)
