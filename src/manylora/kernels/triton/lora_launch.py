"""Launches of the LoRA kernels: plans of a step, and shrink and expand of one group of one layer.

Owns block sizes and grids, which a ``LoraConfig`` chooses. Long runs of one adapter (prompts) and short ones
(decoding) take different tiles, hence two parts of a plan; most steps have one of them. Nothing here waits for
the device; everything but the plans' own copies can be captured in a CUDA graph.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch

from manylora.kernels.ops import LoraSegments
from manylora.kernels.shapes import AdapterGeometry, ProjectionGroup
from manylora.kernels.triton.lora_rows import (
    expand_kernel,
    expand_silu_kernel,
    gated_sum_kernel,
    shrink_kernel,
)
from manylora.kernels.triton.lora_work import (
    ROWS,
    WorkBuffer,
    largest_sizes,
    runs_of,
    sizes_of,
    work_arrays,
)
from manylora.kernels.triton.plans import power_of_two

MOST_SPLITS = 16
"""Every program of expand adds the splits up again."""

FEW_PROMPTS_SPLITS = 8
"""Of long tiles that are too few for the device."""


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Sizes for tiles of one kind.

    ``chunk``: columns of one split of a shrink; 0: splits only where there are few tiles.
    ``shrink_columns``, ``expand_columns``: loaded at once by a one-token program; ``*_step`` by one with tensor
    cores. ``*_programs``: a multiprocessor, which take items in turn; 0: a program an item.
    ``blocks``: of 16 rank rows side by side in a shrink. ``*_registers``: a thread's
    at most; 0: any.
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


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """How LoRA runs on a device; runs longer than ``long_run`` take ``long``. ``pdl``: dependent launch.

    ``beside``: in captured steps, LoRA of gate and up runs on a second stream beside their product, and the
    activation adds the two. For batches with long runs: ``writes_first``: expand writes and the product adds,
    instead of the other way round; ``gates``: the expand of gate and up applies the activation.
    """

    short: TileConfig
    long: TileConfig
    long_run: int = 128
    pdl: bool = False
    beside: bool = False
    writes_first: bool = False
    gates: bool = False


SHORT = TileConfig(
    tile_tokens=16, chunk=512, shrink_columns=512, shrink_step=256, shrink_warps=4, shrink_programs=16,
    expand_columns=512, expand_step=256, expand_warps=4, expand_programs=16,
)  # fmt: skip
LONG = TileConfig(
    tile_tokens=64, chunk=0, shrink_columns=128, shrink_step=128, shrink_warps=4, shrink_programs=0,
    expand_columns=512, expand_step=64, expand_warps=4, expand_programs=0,
    blocks=4, stages=3, vector=False, expand_registers=128,
)  # fmt: skip
DEFAULT = LoraConfig(SHORT, LONG)


@dataclasses.dataclass(frozen=True, eq=False)
class TilePlan:
    """Tables of the tiles of one kind."""

    buffer: WorkBuffer
    config: TileConfig


@dataclasses.dataclass(frozen=True, eq=False)
class LoraPlan:
    """``cells`` must stay where it is while a graph that was captured with the plan is replayed.

    ``is_fixed``: it is filled anew for every step. ``covered``: so many of the batch's first tokens have tiles,
    with an adapter or without; 0: only those with an adapter are known to.
    """

    geometry: AdapterGeometry
    cells: torch.Tensor
    num_layers: int
    align: int
    parts: tuple[TilePlan, ...]
    covered: int = 0
    is_fixed: bool = False


class LoraKernels:
    """LoRA on one CUDA device. ``multiprocessors``: how many it has."""

    def __init__(self, config: LoraConfig, multiprocessors: int) -> None:
        self.config = config
        self._sms = multiprocessors

    # ---- plans -----------------------------------------------------------------------------------------

    def plan(
        self,
        segments: LoraSegments,
        geometry: AdapterGeometry,
        device: torch.device,
        num_tokens: int,
        cover: bool = False,
    ) -> LoraPlan:
        """For one batch. ``cover``: tokens in no segment get tiles too, for results that are not added."""
        runs = runs_of(segments, num_tokens)
        wanted = (runs[2] >= 0) | cover
        parts = []
        for config, chosen in (
            (self.config.short, runs[1] <= self.config.long_run),
            (self.config.long, runs[1] > self.config.long_run),
        ):
            chosen &= wanted
            if not chosen.any():
                continue
            config = _for_dtype(config, geometry)
            members = (runs[0][chosen], runs[1][chosen], runs[2][chosen])
            arrays = work_arrays(segments, geometry, members, config.tile_tokens, config.blocks)
            buffer = WorkBuffer(geometry, sizes_of(arrays, segments), device)
            buffer.fill(segments, arrays)
            parts.append(TilePlan(buffer, config))
        return self._plan(segments.cells, geometry, tuple(parts), num_tokens if cover else 0)

    def reserve(self, geometry: AdapterGeometry, cells: torch.Tensor, tokens: int, max_rank: int) -> LoraPlan:
        """A plan for decoding batches of up to so many tokens, to be captured and then filled step by step."""
        config = _for_dtype(self.config.short, geometry)
        sizes = largest_sizes(geometry, tokens, tokens, max_rank, config.tile_tokens)
        part = TilePlan(WorkBuffer(geometry, sizes, cells.device), config)
        return dataclasses.replace(self._plan(cells, geometry, (part,)), is_fixed=True, covered=tokens)

    def refill(self, plan: LoraPlan, segments: LoraSegments | None, num_tokens: int) -> None:
        """Point a reserved plan at a batch. None: no token has an adapter. ValueError where it has no room.

        ``num_tokens``: of the results that are written and not added to.
        """
        (part,) = plan.parts
        if segments is None:
            segments = _none(plan.geometry, plan.cells)
        runs = runs_of(segments, num_tokens)
        arrays = work_arrays(segments, plan.geometry, runs, part.config.tile_tokens, part.config.blocks)
        part.buffer.fill(segments, arrays)

    @staticmethod
    def _plan(
        cells: torch.Tensor, geometry: AdapterGeometry, parts: tuple[TilePlan, ...], covered: int = 0
    ) -> LoraPlan:
        align = math.gcd(geometry.page.slab_elements, geometry.cell_elements, 16)
        return LoraPlan(geometry, cells, geometry.page.layers, align, parts, covered)

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

    def expand_silu(
        self,
        y: torch.Tensor,
        partial: list[torch.Tensor],
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: LoraPlan,
    ) -> torch.Tensor:
        """silu(gate) * up of y + v B, ``[T, I]``; y ``[T, 2 * I]`` is what the base model's linear gave."""
        outputs = group.projections[0].out_features
        out = torch.empty((y.shape[0], outputs), dtype=y.dtype, device=y.device)
        for part, planes in zip(plan.parts, partial):
            config, work = part.config, part.buffer.groups[group.name]
            # Two projections' results: twice the threads hold them.
            config = dataclasses.replace(config, expand_warps=min(8, 2 * config.expand_warps))
            columns, step = self._expand_columns(plan, config, outputs, y.dtype)
            items = work.size.tiles * -(-outputs // columns)
            expand_silu_kernel[(self._programs(items, config.expand_programs),)](
                y, out, pool, plan.cells, work.counts, work.tiles, part.buffer.scales, planes,
                y.stride(0), out.stride(0), planes.stride(0), self._layer(plan, layer), layer,
                plan.num_layers, outputs, plan.geometry.cells(outputs),
                **self._expand_options(plan, config, columns, step, planes, y.dtype),
            )  # fmt: skip
        return out

    @staticmethod
    def gated_sum(y: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of y + delta, both ``[T, 2 * I]``: ``[T, I]``."""
        tokens, size = y.shape[0], y.shape[1] // 2
        out = torch.empty((tokens, size), dtype=y.dtype, device=y.device)
        block = min(1024, power_of_two(size))
        gated_sum_kernel[(tokens, ceil_div(size, block))](
            y, delta, out, y.stride(0), delta.stride(0), size, BLOCK=block
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
            pool,
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
            PDL=self.config.pdl,
            PRECISION=_precision(x.dtype),
            num_warps=config.shrink_warps,
            **self._launch(config.shrink_registers),
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
        columns, step = self._expand_columns(plan, config, max(outputs), y.dtype)
        items = work.size.tiles * sum(-(-n // columns) for n in outputs)
        cells = [plan.geometry.cells(n) for n in outputs]
        padding = [outputs[-1]] * (3 - len(outputs)), [cells[-1]] * (3 - len(cells))
        expand_kernel[(self._programs(items, config.expand_programs),)](
            y, pool, plan.cells, work.counts, work.tiles, part.buffer.scales, planes,
            y.stride(0), planes.stride(0), self._layer(plan, layer), layer, plan.num_layers,
            *outputs, *padding[0], *cells, *padding[1],
            PROJECTIONS=len(outputs),
            VECTOR=config.vector,
            ADD=add,
            **self._expand_options(plan, config, columns, step, planes, y.dtype),
        )  # fmt: skip

    def _expand_columns(
        self, plan: LoraPlan, config: TileConfig, outputs: int, dtype: torch.dtype
    ) -> tuple[int, int]:
        """Columns of an item, and of one step of a tensor-core program."""
        cell = plan.geometry.cell_elements
        columns = block_of(cell, config.expand_columns, outputs)
        return columns, min(columns, 64 if dtype == torch.float32 else config.expand_step)

    def _expand_options(
        self,
        plan: LoraPlan,
        config: TileConfig,
        columns: int,
        step: int,
        planes: torch.Tensor,
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        return {
            "CELL": plan.geometry.cell_elements,
            "ALIGN": plan.align,
            "BLOCK_T": config.tile_tokens,
            "BLOCK_N": columns,
            "SUB_N": step,
            "SPLITS": planes.shape[0],
            "SPLITS_PADDED": power_of_two(planes.shape[0]),
            "PDL": self.config.pdl,
            "PRECISION": _precision(dtype),
            "num_warps": config.expand_warps,
            **self._launch(config.expand_registers),
        }

    def _splits(self, group: ProjectionGroup, config: TileConfig, entries: int) -> int:
        if config.chunk:
            return min(MOST_SPLITS, ceil_div(group.in_features, config.chunk))
        # One of two, so that there are few variants of the kernels to compile.
        return 1 if entries >= 2 * self._sms else FEW_PROMPTS_SPLITS

    def _programs(self, items: int, programs: int) -> int:
        return min(items, self._sms * programs) if programs else items

    def _launch(self, registers: int) -> dict[str, int]:
        options: dict[str, int] = {"launch_pdl": True} if self.config.pdl else {}
        return options | ({"maxnreg": registers} if registers else {})

    @staticmethod
    def _layer(plan: LoraPlan, layer: int) -> int:
        return layer * plan.geometry.page.slab_elements


def _precision(dtype: torch.dtype) -> str:
    """float32 products are exact (no TF32): tests ask for token-for-token equality."""
    return "ieee" if dtype == torch.float32 else "tf32"


def _for_dtype(config: TileConfig, geometry: AdapterGeometry) -> TileConfig:
    """float32 products run without tensor cores: small tiles, or they do not fit the registers."""
    return dataclasses.replace(config, tile_tokens=16) if geometry.page.itemsize > 2 else config


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
