"""LoRA's table: sizes of shrink and expand by kind of step, and how the two run beside the product.

With the best sizes of each it is then chosen, for decoding steps, whether LoRA runs beside the product and which
of the two goes first, and for others, whether expand writes and the product adds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from manylora.kernels.triton.lora import LoraKernels, lora_kernels_on
from manylora.kernels.triton.lora_plan import DEFAULT, MIXED, Beside, LoraConfig, LoraTileConfig
from manylora_lab.bench.kernels.choosing import fastest, ops_with, text_of
from manylora_lab.bench.kernels.lora import LoraLayer, LoraProblem
from manylora_lab.bench.kernels.measuring import Bench
from manylora_lab.bench.kernels.rig import KernelCase, KernelRig

RANK = 16
LARGEST = 2048
"""Tokens beyond which long runs take launches of their own."""
Sizes = dict[str, Any]
"""Fields of ``LoraTileConfig``."""


def _shrink(step: int, programs: int, registers: int = 0, **more: Any) -> Sizes:
    return {"shrink_step": step, "shrink_programs": programs, "shrink_registers": registers, **more}


def _expand(tile_columns: int, warps: int, programs: int, registers: int = 168, **more: Any) -> Sizes:
    sizes = {"tile_columns": tile_columns, "expand_warps": warps, "expand_programs": programs}
    return {**sizes, "expand_step": 128, "expand_registers": registers, **more}


def _all_of(
    sizes: LoraTileConfig, shrinks: Sequence[Sizes], expands: Sequence[Sizes]
) -> list[LoraTileConfig]:
    """These sizes with each pair of the others in their place."""
    pairs = itertools.product(shrinks, expands)
    return [dataclasses.replace(sizes, **shrink, **expand) for shrink, expand in pairs]


TILES: dict[int, list[LoraTileConfig]] = {
    16: _all_of(
        dataclasses.replace(DEFAULT.short, tile_tokens=16),
        [_shrink(512, 16), _shrink(512, 6)],
        [
            _expand(0, 2, 16),
            _expand(128, 2, 6),
            _expand(128, 2, 16),
            _expand(256, 4, 4, 128, expand_step=256),
        ],
    ),
    32: _all_of(
        dataclasses.replace(DEFAULT.short, tile_tokens=32),
        [_shrink(256, 16, 168), _shrink(256, 4, 168)],
        [_expand(128, 4, 4), _expand(128, 4, 16), _expand(64, 2, 8, expand_step=64)],
    ),
    64: _all_of(
        dataclasses.replace(DEFAULT.short, tile_tokens=64, stages=3),
        [_shrink(128, 16, 168), _shrink(128, 4, 168)],
        [_expand(128, 4, 3), _expand(128, 4, 8), _expand(128, 4, 2, 0, expand_tokens=128)],
    ),
}
"""Sizes by tokens of a tile."""
LONG_TILES = _all_of(
    DEFAULT.long,
    [
        {"shrink_step": step, "shrink_warps": warps, "stages": stages}
        for step, warps, stages in ((128, 4, 3), (64, 4, 5), (128, 8, 3))
    ],
    [
        {"expand_tokens": tokens, "expand_columns": columns, "expand_step": step, "expand_registers": registers}
        for tokens, columns, step, registers in (
            (64, 512, 128, 0), (64, 128, 128, 128), (256, 128, 128, 128), (512, 512, 128, 0),
            (512, 128, 64, 96), (256, 64, 64, 96),
        )
    ],
)  # fmt: skip
PRODUCT_FIRST: dict[str, tuple[str, ...]] = {
    "LoRA": (),
    "gate": ("gate_up", "fc1"),
    "MLP": ("gate_up", "down", "fc1", "fc2"),
    "product": ("qkv", "o", "gate_up", "down", "fc1", "fc2"),
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A step: the tokens of each run of one adapter, in a bucket of so many tokens and rows (None: not captured).
    What is best for it holds for steps of up to ``most`` tokens."""

    name: str
    runs: tuple[int, ...]
    tokens: int
    rows: int | None
    most: int


DECODING = tuple(
    Kind(f"decode {rows}", (1,) * rows, rows, rows, most)
    for rows, most in ((1, 16), (32, 48), (64, 64), (128, 128))
)
PROMPTS = (
    Kind("prompt 64", (64,), 64, 63, 128),
    Kind("31+220", (*(1,) * 31, 220), 256, 128, 384),
    Kind("31+600", (*(1,) * 31, 600), 640, 128, 1024),
    Kind("31+1500", (*(1,) * 31, 1500), 1536, 128, LARGEST),
)
LONG = (Kind("1x150", (150,), 150, None, 0), Kind("8x2000", (2000,) * 8, 16000, None, 0))
"""The first is for a quick run, as are the first of the others."""


def tune(bench: Bench, _stored: object) -> dict[str, Any]:
    """This device's entry of the table; what there was no time for is as the device's kernels have it."""
    return as_row(_Tuning(bench).config())


class _Step:
    """One kind of step, and the configurations of the LoRA kernels as cases of it."""

    def __init__(self, rig: KernelRig, kind: Kind) -> None:
        self._rig = rig
        self.kind = kind
        self._batch = LoraProblem(LoraLayer(rig, kind.tokens), kind.runs, RANK)

    def case(self, name: str, config: LoraConfig) -> KernelCase:
        rig, rows = self._rig, self.kind.rows
        ops = ops_with(rig, lora=LoraKernels(config, rig.multiprocessors))
        plan = self._batch.eager(ops) if rows is None else self._batch.fixed(ops, rows, RANK)
        return self._batch.case({"step": self.kind.name, "sizes": name}, ops, plan)


class _Tuning:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._rig = bench.rig
        few = 1 if bench.is_small else None
        self._decoding_kinds, self._prompt_kinds = DECODING[:few], PROMPTS[:few]
        self._long_kind = LONG[0 if bench.is_small else -1]
        kinds = (*self._decoding_kinds, *self._prompt_kinds, self._long_kind)
        self._rig.reserve([], RANK * max(len(kind.runs) for kind in kinds))
        self._stored = lora_kernels_on(self._rig.device).config

    def config(self) -> LoraConfig:
        short, beside = self._decoding()
        mixed, writes_from = self._prompts()
        return dataclasses.replace(
            self._stored, short=short, beside=beside, mixed=mixed, long=self._long(), writes_from=writes_from
        )

    def _best(self, steps: Sequence[_Step], configs: Mapping[str, LoraConfig]) -> LoraConfig | None:
        """What takes least in all of these steps together; None where time was short."""
        return fastest(
            [
                self._bench.candidates({config: step.case(name, config) for name, config in configs.items()})
                for step in steps
            ]
        )

    def _best_of(
        self,
        steps: Sequence[_Step],
        stored: LoraTileConfig,
        tried: Sequence[LoraTileConfig],
        is_long: bool = False,
    ) -> LoraConfig | None:
        """Choose the best sizes, the stored ones among them: of long runs in large steps, or of all other
        steps."""
        plain = dataclasses.replace(self._stored, beside=(), writes_from=int(is_long))
        configs = {}
        for sizes in (stored, *(tried[:2] if self._bench.is_small else tried)):
            if is_long:
                configs[text_of(sizes)] = dataclasses.replace(plain, long=sizes, mixed=())
            else:
                configs[text_of(sizes)] = dataclasses.replace(plain, short=sizes, mixed=((LARGEST, sizes),))
        return self._best(steps, configs)

    # ---- the parts of the table ------------------------------------------------------------------------

    def _decoding(self) -> tuple[LoraTileConfig, tuple[tuple[int, Beside], ...]]:
        """Sizes of decoding steps, and how LoRA runs beside the product."""
        steps = [_Step(self._rig, kind) for kind in self._decoding_kinds]
        best = self._best_of(steps, self._stored.short, TILES[16])
        if best is None:
            return self._stored.short, self._stored.beside
        beside: list[tuple[int, Beside]] = []
        for step in steps:
            chosen = self._best([step], self._orders(best))
            if chosen is None:
                return best.short, self._stored.beside
            if not chosen.beside:
                break  # what a table can say of more tokens would hold for these too
            beside.append((step.kind.most, chosen.beside[0][1]))
        return best.short, tuple(beside)

    def _orders(self, plain: LoraConfig) -> dict[str, LoraConfig]:
        """LoRA after the product, and beside it: either preferred."""
        configs = {"in turn": plain}
        chunks = {"": plain.short, ", chunk 1024": dataclasses.replace(plain.short, chunk=1024)}
        firsts = list(PRODUCT_FIRST.items())[:: 3 if self._bench.is_small else 1]
        pdls = (False, True) if plain.pdl else (False,)
        for (first, groups), pdl, (chunk, sizes) in itertools.product(firsts, pdls, chunks.items()):
            how = Beside(sizes, groups, pdl)
            name = f"beside, {first} first{', pdl' * pdl}{chunk}"
            configs[name] = dataclasses.replace(plain, beside=((LARGEST, how),))
        return configs

    def _prompts(self) -> tuple[tuple[tuple[int, LoraTileConfig], ...], int]:
        """Sizes of steps with prompts, by tokens; and from how many tokens on expand writes."""
        mixed: list[tuple[int, LoraTileConfig]] = []
        writes_from = least = 0
        for kind in self._prompt_kinds:
            steps = [_Step(self._rig, kind)]
            stored = self._stored.of_mixed(kind.tokens) or self._stored.short
            best = self._best_of(steps, stored, [sizes for tiles in TILES.values() for sizes in tiles])
            if best is not None:
                writes = dataclasses.replace(best, writes_from=1)
                best = self._best(steps, {"adds": best, "writes": writes})
            if best is None:
                return self._stored.mixed, self._stored.writes_from
            mixed.append((kind.most, best.short))
            writes_from = (writes_from or least + 1) if best.writes_from else 0
            least = kind.most
        return tuple(mixed), writes_from or least + 1

    def _long(self) -> LoraTileConfig:
        """Sizes of long runs in large steps, where expand writes."""
        steps = [_Step(self._rig, self._long_kind)]
        best = self._best_of(steps, self._stored.long, LONG_TILES, is_long=True)
        return self._stored.long if best is None else best.long


def as_row(config: LoraConfig) -> dict[str, Any]:
    """The configuration as ``stored_config`` reads it: what differs from the defaults."""
    row = {k: v for k, v in dataclasses.asdict(config).items() if v != getattr(DEFAULT, k)}
    for kind in ("short", "long"):
        row[kind] = _differences(getattr(config, kind), getattr(DEFAULT, kind))
    row["mixed"] = [[most, _differences(sizes, MIXED)] for most, sizes in config.mixed]
    row["beside"] = [
        [most, dataclasses.asdict(how) | {"sizes": _differences(how.sizes, config.short)}]
        for most, how in config.beside
    ]
    return row


def _differences(sizes: LoraTileConfig, default: LoraTileConfig) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(sizes).items() if v != getattr(default, k)}
