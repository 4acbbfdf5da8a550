"""Linears with adapters on a CUDA device: in which order the base model's product and the LoRA kernels run.

Owns that order, grids, and which stored configuration a device gets. Only in large steps do short runs of one
adapter (decoding) and long ones (prompts) take launches of their own, two parts of a plan. Nothing here waits for
the device; everything but the plans' own copies can be captured in a CUDA graph. Measured on an H200,
a step's LoRA is launches and chains of loads rather than bytes unless every token has an adapter of its own. So
small captured steps run it beside the product, and what reads the two adds them. Others run product, shrink,
expand on one stream with dependent launch: each kernel reads its tables and weights while the one before it ends.
Large steps' results are large too: there expand writes and the product adds to it. docs/performance.md says what
else was tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from typing import Any

import numpy as np
import torch

from manylora.kernels.ops import LoraSegments, LoraSite, LoraStep, of_adapters
from manylora.kernels.shapes import Activation, AdapterGeometry, ProjectionGroup
from manylora.kernels.triton.launch import power_of_two
from manylora.kernels.triton.lora_plan import (
    DEFAULT,
    ROWS,
    BatchWork,
    Ints,
    LoraConfig,
    LoraPlan,
    LoraTileConfig,
    TilePlan,
    WorkBuffer,
    largest_sizes,
    runs_of,
    sizes_of,
    stored_config,
    work_of,
)
from manylora.kernels.triton.lora_rows import (
    expand_kernel,
    gated_sum_kernel,
    shrink_kernel,
)
from manylora.kernels.triton.small import gate_mul_kernel

INTERPRETED_MULTIPROCESSORS = 4


_log = logging.getLogger(__name__)


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


def planned(step: LoraStep) -> LoraPlan:
    """The plan of a step in which some token has an adapter."""
    assert isinstance(step.plan, LoraPlan)
    return step.plan


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

    def shrink(self, x: torch.Tensor, site: LoraSite, step: LoraStep) -> list[torch.Tensor]:
        """x A of every token's adapter: what ``expand`` takes. x ``[T, in]``."""
        plan = planned(step)
        return [self._shrink(x, step.pool, site, plan, part) for part in plan.parts]

    def expand(
        self,
        y: torch.Tensor,
        partial: list[torch.Tensor],
        site: LoraSite,
        step: LoraStep,
        add: bool = True,
    ) -> None:
        """y ``[T, sum(out)]`` += v B. Not ``add``: y becomes v B, zero where a token has no adapter."""
        plan = planned(step)
        for part, planes in zip(plan.parts, partial):
            self._expand(y, planes, step.pool, site, plan, part, add)

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
        self, x: torch.Tensor, pool: torch.Tensor, site: LoraSite, plan: LoraPlan, part: TilePlan
    ) -> torch.Tensor:
        group, layer = site.group, site.layer
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
        site: LoraSite,
        plan: LoraPlan,
        part: TilePlan,
        add: bool,
    ) -> None:
        group, layer = site.group, site.layer
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


def can_depend(device: torch.device) -> bool:
    """Whether the device has dependent launches: NVIDIA's do from compute capability 9.0 on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return bool(torch.get_device_module(device).get_device_capability(device) >= (9, 0))


def lora_kernels_on(device: torch.device) -> LoraKernels:
    """The LoRA kernels of a CUDA device; on a CPU, for the interpreter."""
    if device.type == "cpu":
        return LoraKernels(DEFAULT, INTERPRETED_MULTIPROCESSORS)
    properties = torch.get_device_module(device).get_device_properties(device)
    config = stored_config(properties.name)
    found = "default sizes" if config is None else "sizes measured on this device"
    config = config or DEFAULT
    if config.pdl and not can_depend(device):
        config = dataclasses.replace(config, pdl=False)
        _log.info(
            "LoRA kernels of %s, one after the other: %s has no dependent launch", found, properties.name
        )
    else:
        _log.info("LoRA kernels of %s, %s dependent launch", found, "with" if config.pdl else "without")
    return LoraKernels(config, properties.multi_processor_count)


class TritonFixedLora:
    """A plan at fixed addresses for captured steps of at most so many tokens and ranks up to ``max_rank``.

    ``num_rows``: of at most so many segments; None: one a token, as decoding steps have them.
    """

    def __init__(
        self,
        kernels: LoraKernels,
        num_tokens: int,
        max_rank: int,
        geometry: AdapterGeometry,
        cells: torch.Tensor,
        num_rows: int | None = None,
    ) -> None:
        self.plan = kernels.reserve(geometry, cells, num_tokens, max_rank, num_rows)
        self._kernels = kernels
        self._filled: tuple[LoraSegments | None, int] | None = None

    def fill(self, segments: LoraSegments | None, num_tokens: int) -> None:
        """Point the plan at a batch, as ``Ops.lora_summands`` wants it; None: no token has an adapter.

        Raises ValueError where it does not fit. Does not wait for the device.
        """
        if self._filled is not None and self._filled[0] is segments and self._filled[1] == num_tokens:
            return  # the tables say so already: batches seldom change between decoding steps
        self._filled = None
        # Padding too is given tiles: what is written for it must not be left to chance.
        self._kernels.refill(self.plan, segments, max(num_tokens, self.plan.covered))
        self._filled = segments, num_tokens


class SideStream:
    """A second stream of a device; ``is_preferred`` to the first one's work. On a CPU: none."""

    def __init__(self, device: torch.device, is_preferred: bool) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = None
        if self._module is not None:
            self._stream = self._module.Stream(device, priority=-1 if is_preferred else 0)

    def fork(self) -> None:
        """What is launched in ``use`` from now on waits for what the current stream has, and for nothing later."""
        if self._module is not None and self._stream is not None:
            self._stream.wait_stream(self._module.current_stream())

    def use(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._module is None else self._module.stream(self._stream)

    def join(self) -> None:
        if self._module is not None:
            self._module.current_stream().wait_stream(self._stream)
