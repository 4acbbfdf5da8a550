"""Chooses attention's launch sizes by heads and rows: those measured on the device, or defaults.

Owns the format of ``kernels/tuned/attention.json``. Nothing is tried out at run time;
``manylora bench kernels --tune attention`` measures and writes the table.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgspec

from manylora.kernels.triton.launch import power_of_two

TABLE = Path(__file__).parents[1] / "tuned" / "attention.json"


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Launch sizes for rows of one query, for 16-bit types and heads of at most 128 dimensions.

    ``programs``: the approximate number of programs into which a step's contexts are cut; None: as many as
    keep the device busy.
    """

    block_n: int = 64
    warps: int = 4
    stages: int = 3
    programs: int | None = None


@dataclasses.dataclass(frozen=True)
class AttentionTileConfig:
    """Launch sizes for rows of several queries, for the same types and heads.

    ``rows``: rows of a program's matrix product, which are queries times the query heads that share a key
    head. ``registers``: the limit for a thread; None: no limit. With fewer registers, more programs share a
    multiprocessor, including programs of one query.
    """

    rows: int = 64
    block_n: int = 32
    warps: int = 4
    stages: int = 3
    registers: int | None = 168


@dataclasses.dataclass(frozen=True)
class DecodeTable:
    """The launch sizes of attention for one model on one device.

    ``choices``: (largest number of rows, config) for rows of one query, ascending. ``group``: how many query
    heads share a key head. ``tiles``: the sizes for rows of several queries.
    """

    choices: tuple[tuple[int, DecodeConfig], ...] = ()
    group: int = 1
    tiles: AttentionTileConfig = AttentionTileConfig()

    @property
    def tile(self) -> int:
        """The largest number of queries that one tile takes from a row."""
        return max(2, self.tiles.rows // power_of_two(self.group))

    def choice(self, num_rows: int) -> DecodeConfig:
        """Return the config for ``num_rows`` rows of one query; the last entry also serves larger numbers."""
        held = (config for most, config in self.choices if num_rows <= most)
        return next(held, self.choices[-1][1] if self.choices else DecodeConfig())


def stored_table(device_name: str, group: int, head_dim: int, path: Path = TABLE) -> DecodeTable:
    """Return the sizes measured on devices of this name, for heads of ``head_dim``, ``group`` to a key head.

    Defaults stand in for what was not measured. The file is ``{device name: [entry, ...]}``. An entry has
    ``"group"``, ``"head_dim"``, and either ``"rows"`` with DecodeConfig's fields, or ``"tiles"`` with
    AttentionTileConfig's fields in it.
    """
    stored = json.loads(path.read_text()).get(device_name, []) if path.is_file() else []
    rows = [row for row in stored if (row["group"], row["head_dim"]) == (group, head_dim)]
    found = {row["rows"]: msgspec.convert(row, DecodeConfig) for row in rows if "rows" in row}
    tiles = AttentionTileConfig(**next((row["tiles"] for row in rows if "tiles" in row), {}))
    return DecodeTable(tuple(sorted(found.items())), group, tiles)
