"""Attention's table: launch sizes of decoding by rows, and of tiles in steps with prompts.

Decoding's sizes are chosen by the kernel alone and kept only where a whole layer takes less by them. Long prompts
of steps that are not captured are timed as they are served (by FlashInfer, where it is there) and by our kernel.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from manylora.kernels.triton.decode_table import AttentionTileConfig, DecodeConfig, DecodeTable
from manylora.kernels.triton.operations import TritonOps
from manylora_lab.bench.kernels.cases import MAX_CONTEXT, AttentionProblem
from manylora_lab.bench.kernels.choosing import WholeLayers, fastest, ops_with, text_of
from manylora_lab.bench.kernels.measuring import Bench
from manylora_lab.bench.kernels.settings import Queries

MOST_ROWS = 4096
"""Up to which the last row of the table is said to hold."""
DECODING = ((64, 4, 3), (64, 4, 5), (64, 8, 5), (32, 4, 4), (32, 4, 5), (32, 2, 4))
"""``DecodeConfig``s, without ``programs``."""
PROGRAMS = (264, None, 1056)
TILES = tuple(
    AttentionTileConfig(*sizes)
    for sizes in (
        (64, 64, 4, 3, None), (64, 64, 4, 3, 168), (64, 64, 4, 2, 168), (64, 32, 4, 3, 168),
        (64, 32, 4, 5, 168), (64, 64, 4, 3, 128), (64, 64, 8, 3, 128), (64, 64, 8, 3, None),
        (128, 64, 8, 3, None), (128, 64, 8, 3, 128), (32, 64, 4, 3, 168), (16, 64, 4, 3, None),
    )
)  # fmt: skip


BATCHES, CONTEXTS = (8, 16, 32, 64, 128), (512, 2048)
"""Of decoding. Where a run is to be quick, it takes the first of everything."""
_ROWS = ((1, 300),) * 32
STEPS: dict[str, tuple[int, int, Queries]] = {
    "64": (64, 63, ((64, 64),)),
    "220": (256, 128, ((220, 220),)),
    "64 + 32": (96, 95, ((64, 64), *_ROWS)),
    "220 + 32": (256, 128, ((220, 220), *_ROWS)),
    "600": (640, 128, ((600, 600),)),
    "600 + 32": (640, 128, ((600, 600), *_ROWS)),
    "64 after 1984": (64, 63, ((64, 2048),)),
}
"""Captured steps with prompts: the bucket's tokens and rows, and what the rows are."""
PROMPTS: dict[str, Queries] = {
    "one of 128": ((128, 128),),
    "128": ((128, 128),) * 16,
    "256": ((256, 256),) * 16,
    "256 after 1792": ((256, 2048),) * 4,
    "512": ((512, 512),) * 8,
    "2000": ((2000, 2000),) * 8,
    "one of 2048": ((2048, 2048),),
}
"""Of steps that are not captured."""


def tune(bench: Bench, stored: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """This device's rows of the table: those of such heads anew, the others as stored."""
    return _Tuning(bench).rows(stored or [])


class _Tuning:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._rig = bench.rig
        self._group = bench.rig.decoder.heads // bench.rig.decoder.kv_heads
        few, two = (1, 2) if bench.is_small else (None, None)
        self._batches, self._contexts = BATCHES[:few], CONTEXTS[:few]
        self._steps, self._prompts = list(STEPS.items())[:few], list(PROMPTS.items())[:few]
        programs = itertools.product(DECODING[:few], PROGRAMS[:two])
        self._configs = [DecodeConfig(*shape, number) for shape, number in programs]
        self._tile_configs = TILES[:two]
        rows = [((1, self._contexts[-1]),) * self._batches[-1]]
        rows += [queries for _, (_, _, queries) in self._steps]
        bench.rig.reserve([*rows, *(queries for _, queries in self._prompts)], 0)

    def rows(self, stored: list[dict[str, Any]]) -> list[dict[str, Any]]:
        heads = {"group": self._group, "head_dim": self._rig.decoder.head_dim}
        kept = list(stored)
        found: list[dict[str, Any]] = []
        tiles, decoding = self._tiles(), self._decoding()
        if tiles is not None:
            kept = [row for row in kept if not (heads.items() <= row.items() and "tiles" in row)]
            found.append({**heads, "tiles": dataclasses.asdict(tiles)})
        if decoding is not None:
            kept = [row for row in kept if not (heads.items() <= row.items() and "rows" in row)]
            found += [
                {**heads, "rows": most, **dataclasses.asdict(config)} for most, config in merged(decoding)
            ]
        self._compare_prompts(tiles or AttentionTileConfig())
        return sorted([*kept, *found], key=lambda row: (row["group"], row["head_dim"], row.get("rows", 0)))

    def _ops(self, config: DecodeConfig | None = None, tiles: AttentionTileConfig | None = None) -> TritonOps:
        table = DecodeTable(((1, config or DecodeConfig()),), self._group, tiles or AttentionTileConfig())
        return ops_with(self._rig, decoding=table)

    def _decoding(self) -> list[tuple[int, DecodeConfig]] | None:
        """(rows up to which it holds, sizes), ascending; None where time was short."""
        layers = WholeLayers(self._bench, self._batches)
        found = []
        for batch in self._batches:
            best = fastest([self._decode(batch, context) for context in self._contexts])
            if best is None:
                return None
            ways = {"alone": self._ops(best), "default": self._ops()}
            is_pinned = fastest([layers.seconds(batch, ways)]) == "alone"
            found.append((batch, best if is_pinned else DecodeConfig()))
        return found

    def _decode(self, batch: int, context: int) -> dict[DecodeConfig, float]:
        attention = AttentionProblem(self._rig, ((1, context),) * batch)
        cases = {}
        for config in self._configs:
            ops = self._ops(config)
            setting = {"batch": batch, "rows": f"context {context}", "sizes": text_of(config)}
            cases[config] = attention.case("decode", setting, ops, attention.fixed(ops, batch, MAX_CONTEXT))
        return self._bench.candidates(cases)

    def _tiles(self) -> AttentionTileConfig | None:
        found = []
        for name, (tokens, num_rows, queries) in self._steps:
            attention = AttentionProblem(self._rig, queries, tokens)
            cases = {}
            for tiles in self._tile_configs:
                ops = self._ops(tiles=tiles)
                setting = {"tokens": tokens, "rows": name, "sizes": text_of(tiles)}
                cases[tiles] = attention.case(
                    "mixed", setting, ops, attention.fixed(ops, num_rows, MAX_CONTEXT)
                )
            found.append(self._bench.candidates(cases))
        return fastest(found)

    def _compare_prompts(self, tiles: AttentionTileConfig) -> None:
        """Time prompts for the report alone: which of them FlashInfer serves is no table's choice."""
        for name, queries in self._prompts:
            attention = AttentionProblem(self._rig, queries)
            cases = {}
            for way, ops in {"as served": self._rig.ops, "our kernel": self._ops(tiles=tiles)}.items():
                setting = {"batch": len(queries), "rows": name, "sizes": way}
                cases[way] = attention.case("prefill", setting, ops, attention.eager(ops))
            self._bench.candidates(cases)


def merged(found: list[tuple[int, DecodeConfig]]) -> list[tuple[int, DecodeConfig]]:
    """Equal neighbours as one, the last for all rows beyond."""
    last = [
        (rows, config)
        for (rows, config), (_, following) in zip(found, [*found[1:], (0, None)])
        if config != following
    ]
    return [*last[:-1], (MOST_ROWS, last[-1][1])]
