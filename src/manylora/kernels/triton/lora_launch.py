"""Launches of the LoRA kernels: plans of a step, and shrink and expand of one group of one layer.

Owns block sizes and grids, which a ``LoraConfig`` chooses by what a step holds. Only in large steps do short runs
of one adapter (decoding) and long ones (prompts) take launches of their own, two parts of a plan. Nothing here
waits for the device; everything but the plans' own copies can be captured in a CUDA graph.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch

from manylora.kernels.ops import LoraSegments, of_adapters
from manylora.kernels.shapes import Activation, AdapterGeometry, ProjectionGroup
from manylora.kernels.triton.elementwise import gate_mul_kernel
from manylora.kernels.triton.lora_rows import (
    expand_kernel,
    gated_sum_kernel,
    shrink_kernel,
)
from manylora.kernels.triton.lora_tables import ROWS
from manylora.kernels.triton.lora_work import (
    BatchWork,
    Ints,
    WorkBuffer,
    largest_sizes,
    runs_of,
    sizes_of,
    work_of,
)
from manylora.kernels.triton.plans import power_of_two

MOST_SPLITS = 16
"""Every program of expand adds the splits up again."""


def gate_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Computes ``Ops.gate_mul``."""
    size = gate_up.shape[-1] // 2
    out = torch.empty((gate_up.shape[0], size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, power_of_two(size))
    if gate_up.shape[0]:
        gate_mul_kernel[(gate_up.shape[0], ceil_div(size, block))](
            gate_up, out, gate_up.stride(0), size, BLOCK=block, ACTIVATION=activation
        )
    return out


@dataclasses.dataclass(frozen=True)
class LoraTileConfig:
    """Sizes for tiles of one kind.

    ``tile_tokens``: of the matrices in both kernels. ``expand_tokens``: that one item of expand takes, in turns
    with the same B; 0: ``tile_tokens``.
    ``chunk``: columns of one split of a shrink; 0: splits only where there are few tiles.
    ``shrink_columns``, ``expand_columns``: loaded at once by a one-token program; ``*_step`` by one with tensor
    cores. ``tile_columns``: that an item of expand of several tokens takes; 0: ``expand_columns``.
    ``*_programs``: a multiprocessor, which take items in turn; 0: a program an item. ``blocks``: of 16 rank
    rows side by side in a shrink. ``*_registers``: a thread's at most; 0: any.
    """

    tile_tokens: int
    chunk: int
    shrink_columns: int
    shrink_step: int
    shrink_warps: int
    shrink_programs: int
    expand_columns: int
    expand_step: int
    expand_warps: int
    expand_programs: int
    blocks: int = 1
    stages: int = 1
    vector: bool = True
    shrink_registers: int = 0
    expand_registers: int = 0
    expand_tokens: int = 0
    tile_columns: int = 0

    @property
    def item_tokens(self) -> int:
        """The tokens of one item of expand."""
        return self.expand_tokens or self.tile_tokens


@dataclasses.dataclass(frozen=True)
class Beside:
    """LoRA on a second stream beside the product, where the operation that reads the two adds them.

    ``product_first``: groups whose product the device is to prefer to LoRA; of the others it prefers LoRA.
    ``pdl``: dependent launch of the LoRA kernels.
    """

    sizes: LoraTileConfig
    product_first: tuple[str, ...] = ()
    pdl: bool = False


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """How LoRA runs on a device, by what a step holds.

    ``short``: for steps without a run of more than ``long_run`` tokens, such as decoding. ``mixed``: (most
    tokens, sizes) of steps with longer runs, ascending. In steps larger than those, longer runs take ``long``
    and the others ``short``, each in launches of its own. ``pdl``: dependent launch. ``beside``: (most tokens,
    how) of captured steps in which LoRA runs beside the products, ascending. ``writes_from``: in steps with
    long runs and at least so many tokens expand writes and the product adds, instead of the other way round; 0:
    in none.
    """

    short: LoraTileConfig
    long: LoraTileConfig
    mixed: tuple[tuple[int, LoraTileConfig], ...] = ()
    long_run: int = 128
    pdl: bool = False
    beside: tuple[tuple[int, Beside], ...] = ()
    writes_from: int = 0

    def of_mixed(self, tokens: int) -> LoraTileConfig | None:
        """The sizes for steps of so many tokens with long runs among them; None: they are too large."""
        return next((sizes for most, sizes in self.mixed if tokens <= most), None)

    def of_beside(self, tokens: int) -> Beside | None:
        """How LoRA runs beside the products of captured steps of so many tokens; None: it does not."""
        return next((how for most, how in self.beside if tokens <= most), None)


SHORT = LoraTileConfig(
    tile_tokens=16, chunk=512, shrink_columns=512, shrink_step=256, shrink_warps=4, shrink_programs=16,
    expand_columns=512, expand_step=256, expand_warps=4, expand_programs=16,
)  # fmt: skip
MIXED = dataclasses.replace(SHORT, shrink_programs=8, expand_programs=8, expand_step=128, tile_columns=256)
LONG = LoraTileConfig(
    tile_tokens=64, chunk=0, shrink_columns=128, shrink_step=128, shrink_warps=4, shrink_programs=0,
    expand_columns=128, expand_step=128, expand_warps=4, expand_programs=0,
    blocks=4, stages=3, vector=False, expand_tokens=256,
)  # fmt: skip
DEFAULT = LoraConfig(SHORT, LONG, ((2048, MIXED),))


@dataclasses.dataclass(frozen=True, eq=False)
class TilePlan:
    """Tables of the tiles of one kind."""

    buffer: WorkBuffer
    config: LoraTileConfig


@dataclasses.dataclass(frozen=True, eq=False)
class LoraPlan:
    """``cells`` must stay where it is while a graph that was captured with the plan is replayed.

    ``is_fixed``: it is filled anew for every step. ``covered``: so many of the batch's first tokens have tiles,
    with an adapter or without; 0: only those with an adapter are known to. ``beside``, ``is_first``: what
    ``LoraConfig`` says of it. ``pdl``: dependent launch.
    """

    geometry: AdapterGeometry
    cells: torch.Tensor
    num_layers: int
    align: int
    parts: tuple[TilePlan, ...]
    covered: int = 0
    is_fixed: bool = False
    beside: Beside | None = None
    is_first: bool = False
    pdl: bool = False


class LoraKernels:
    """LoRA on one CUDA device. ``multiprocessors``: how many it has."""

    def __init__(self, config: LoraConfig, multiprocessors: int) -> None:
        self.config = config
        self._sms = multiprocessors

    # ---- plans -----------------------------------------------------------------------------------------

    def plan(
        self, segments: LoraSegments, geometry: AdapterGeometry, device: torch.device, num_tokens: int
    ) -> LoraPlan:
        """The plan of one batch."""
        config = self.config
        has_long = int(segments.length.max()) > config.long_run
        is_first = self._writes_first(num_tokens, has_long)
        runs = runs_of(segments, num_tokens)
        # Tokens in no segment get tiles too where results are not added.
        wanted = (runs[2] >= 0) | is_first
        chosen: list[tuple[LoraTileConfig, Any]] = [(config.short, wanted)]
        if has_long:
            mixed, is_long = config.of_mixed(num_tokens), runs[1] > config.long_run
            chosen = [(config.short, wanted & ~is_long), (config.long, wanted & is_long)]
            if mixed is not None:
                chosen = [(mixed, wanted)]
        parts = []
        for sizes, members in chosen:
            if not members.any():
                continue
            sizes = _for_dtype(sizes, geometry)
            work = _work(segments, geometry, np.ascontiguousarray(runs[:, members]), sizes)
            buffer = WorkBuffer(geometry, sizes_of(work, geometry), device)
            buffer.fill(work)
            parts.append(TilePlan(buffer, sizes))
        plan = self._plan(segments.cells, geometry, tuple(parts))
        return dataclasses.replace(plan, covered=num_tokens if is_first else 0, is_first=is_first)

    def reserve(
        self,
        geometry: AdapterGeometry,
        cells: torch.Tensor,
        tokens: int,
        max_rank: int,
        rows: int | None = None,
    ) -> LoraPlan:
        """A plan for batches of up to so many tokens and segments (``rows``; None: one a token), to be captured
        and then filled step by step. With fewer rows than tokens: for steps with prompts."""
        config, has_long = self.config, rows is not None and rows < tokens
        sizes = config.short
        if has_long:
            sizes = config.of_mixed(tokens) or (config.mixed[-1][1] if config.mixed else sizes)
        is_first = self._writes_first(tokens, has_long)
        beside = None if is_first else config.of_beside(tokens)
        sizes = _for_dtype(sizes if beside is None else beside.sizes, geometry)
        segments = tokens if rows is None else rows
        room = largest_sizes(geometry, tokens, segments, max_rank, sizes.item_tokens, sizes.tile_tokens)
        part = TilePlan(WorkBuffer(geometry, room, cells.device), sizes)
        return dataclasses.replace(
            self._plan(cells, geometry, (part,)),
            is_fixed=True,
            covered=tokens,
            beside=beside,
            is_first=is_first,
            pdl=config.pdl and (beside is None or beside.pdl),
        )

    def refill(self, plan: LoraPlan, segments: LoraSegments | None, num_tokens: int) -> None:
        """Point a reserved plan at a batch. None: no token has an adapter. ValueError where it has no room.

        ``num_tokens``: of the results that are written and not added to.
        """
        (part,) = plan.parts
        if segments is None:
            segments = _none(plan.geometry, plan.cells)
        part.buffer.fill(_work(segments, plan.geometry, runs_of(segments, num_tokens), part.config))

    def _writes_first(self, num_tokens: int, has_long: bool) -> bool:
        return has_long and 0 < self.config.writes_from <= num_tokens

    def _plan(self, cells: torch.Tensor, geometry: AdapterGeometry, parts: tuple[TilePlan, ...]) -> LoraPlan:
        align = math.gcd(geometry.alignment, 16)
        return LoraPlan(geometry, cells, geometry.page.layers, align, parts, pdl=self.config.pdl)

    # ---- launches --------------------------------------------------------------------------------------

    def shrink(
        self, x: torch.Tensor, pool: torch.Tensor, layer: int, group: ProjectionGroup, plan: LoraPlan
    ) -> list[torch.Tensor]:
        """x A of every token's adapter: what ``expand`` takes. x ``[T, in]``."""
        return [self._shrink(x, pool, layer, group, plan, part) for part in plan.parts]

    def expand(
        self,
        y: torch.Tensor,
        partial: list[torch.Tensor],
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: LoraPlan,
        add: bool = True,
    ) -> None:
        """y ``[T, sum(out)]`` += v B. Not ``add``: y becomes v B, zero where a token has no adapter."""
        for part, planes in zip(plan.parts, partial):
            self._expand(y, planes, pool, layer, group, plan, part, add)

    @staticmethod
    def gated_sum(y: torch.Tensor, delta: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(gate) * up of y + delta, both ``[T, 2 * I]``: ``[T, I]``."""
        tokens, size = y.shape[0], y.shape[1] // 2
        out = torch.empty((tokens, size), dtype=y.dtype, device=y.device)
        block = min(1024, power_of_two(size))
        gated_sum_kernel[(tokens, ceil_div(size, block))](
            y, delta, out, y.stride(0), delta.stride(0), size, BLOCK=block, ACTIVATION=activation
        )
        return out

    def _shrink(
        self,
        x: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: LoraPlan,
        part: TilePlan,
    ) -> torch.Tensor:
        config, work = part.config, part.buffer.groups[group.name]
        cell, exact = plan.geometry.cell_elements, x.dtype == torch.float32
        step = block_of(cell, min(64, config.shrink_step) if exact else config.shrink_step, group.in_features)
        columns = block_of(cell, config.shrink_columns, group.in_features) if config.vector else step
        unit = max(step, columns)
        splits = self._splits(group, config, work.size.entries)
        chunk = ceil_div(ceil_div(group.in_features, splits), unit) * unit
        splits = ceil_div(group.in_features, chunk)
        planes = torch.empty((splits, work.size.units * ROWS), dtype=torch.float32, device=x.device)
        items = work.size.entries * splits
        shrink_kernel[(self._programs(items, config.shrink_programs),)](
            x,
            of_adapters(pool, x.dtype),
            plan.cells,
            work.counts,
            work.entries,
            planes,
            x.stride(0),
            planes.stride(0),
            self._layer(plan, layer),
            group.in_features,
            plan.geometry.cells(group.in_features),
            CELL=cell,
            ALIGN=plan.align,
            CHUNK=chunk,
            SPLITS=splits,
            BLOCK_T=config.tile_tokens,
            BLOCKS=config.blocks,
            BLOCK_K=columns,
            MATRIX_K=step,
            STAGES=config.stages,
            VECTOR=config.vector,
            PDL=plan.pdl,
            PRECISION=_precision(x.dtype),
            num_warps=config.shrink_warps,
            **_launch_options(plan.pdl, config.shrink_registers),
        )
        return planes

    def _expand(
        self,
        y: torch.Tensor,
        planes: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: LoraPlan,
        part: TilePlan,
        add: bool,
    ) -> None:
        config, work = part.config, part.buffer.groups[group.name]
        outputs = [p.out_features for p in group.projections]
        cell = plan.geometry.cell_elements
        wide = block_of(cell, config.expand_columns, max(outputs))
        columns = min(wide, config.tile_columns or wide)
        step = min(columns, 64 if y.dtype == torch.float32 else config.expand_step)
        splits = planes.shape[0]
        items = work.size.tiles * sum(ceil_div(n, min(columns, wide)) for n in outputs)
        cells = [plan.geometry.cells(n) for n in outputs]
        padding = [outputs[-1]] * (3 - len(outputs)), [cells[-1]] * (3 - len(cells))
        expand_kernel[(self._programs(items, config.expand_programs),)](
            y, of_adapters(pool, y.dtype), plan.cells, work.counts, work.tiles, part.buffer.scales, planes,
            y.stride(0), planes.stride(0), self._layer(plan, layer), layer, plan.num_layers,
            *outputs, *padding[0], *cells, *padding[1],
            PROJECTIONS=len(outputs),
            CELL=cell,
            ALIGN=plan.align,
            BLOCK_T=config.tile_tokens,
            TOKENS=config.item_tokens,
            BLOCK_N=wide if config.vector else columns,
            TILE_N=columns,
            SUB_N=step,
            SPLITS=splits,
            SPLITS_PADDED=power_of_two(splits),
            VECTOR=config.vector,
            ADD=add,
            PDL=plan.pdl,
            PRECISION=_precision(y.dtype),
            num_warps=config.expand_warps,
            **_launch_options(plan.pdl, config.expand_registers),
        )  # fmt: skip

    def _splits(self, group: ProjectionGroup, config: LoraTileConfig, entries: int) -> int:
        if config.chunk:
            return min(MOST_SPLITS, ceil_div(group.in_features, config.chunk))
        # Expand reads every split of its tokens anew for every block of columns: no more than the device needs
        # to be busy, and one of three, so that there are few variants of the kernels to compile.
        return next((splits for splits in (1, 2) if entries * splits >= 1.5 * self._sms), 4)

    def _programs(self, items: int, programs: int) -> int:
        return min(items, self._sms * programs) if programs else items

    @staticmethod
    def _layer(plan: LoraPlan, layer: int) -> int:
        return layer * plan.geometry.slab_elements


def _launch_options(pdl: bool, registers: int) -> dict[str, int]:
    options: dict[str, int] = {"launch_pdl": True} if pdl else {}
    return options | ({"maxnreg": registers} if registers else {})


def _precision(dtype: torch.dtype) -> str:
    """float32 products are exact (no TF32): tests ask for token-for-token equality."""
    return "ieee" if dtype == torch.float32 else "tf32"


def _for_dtype(config: LoraTileConfig, geometry: AdapterGeometry) -> LoraTileConfig:
    """float32 products run without tensor cores: small tiles, or they do not fit the registers."""
    return dataclasses.replace(config, tile_tokens=16) if geometry.itemsize > 2 else config


def _work(segments: LoraSegments, geometry: AdapterGeometry, runs: Ints, sizes: LoraTileConfig) -> BatchWork:
    return work_of(segments, geometry, runs, sizes.item_tokens, sizes.tile_tokens, sizes.blocks)


def ceil_div(n: int, d: int) -> int:
    return -(-n // d)


def block_of(cell: int, most: int, elements: int) -> int:
    """Columns to load at once: within one cell where cells are long enough: then a row needs one pointer."""
    most = max(16, min(most, power_of_two(elements)))
    divisor = cell & -cell
    return min(most, divisor) if divisor >= 32 else min(64, most)


def _none(geometry: AdapterGeometry, cells: torch.Tensor) -> LoraSegments:
    projections, layers = len(geometry.projections), geometry.page.layers
    empty = np.zeros(0, dtype=np.int32)
    return LoraSegments(
        empty,
        empty,
        np.zeros((0, projections, 3), dtype=np.int64),
        np.zeros((0, projections, layers), dtype=np.float32),
        cells,
    )
