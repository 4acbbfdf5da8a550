"""Launches the LoRA kernels on a CUDA device.

Owns the kernels' grids, the side streams, and the choice of a device's stored configuration. Only in large
steps do short runs of one adapter (decoding) and long runs (prompts) have separate launches, one for each
part of the plan. Nothing here waits for the device; all but the plans' copies can be captured in a CUDA
graph.

The order of the base model's product and the LoRA kernels (``TritonOps.lora_summands``) follows measurements
on an H200. There the time of a step's LoRA goes into launches and chains of loads rather than bytes, unless
every token has its own adapter. So small captured steps run LoRA beside the product, and the operation that
reads both adds them. Other steps run product, shrink and expand on one stream with dependent launch: each
kernel reads its tables and weights while its predecessor ends. The results of large steps are large, so there
expand writes the result and the product adds to it. docs/performance.md lists what else was tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging

import torch

from manylora.kernels.ops import LoraSite, LoraStep, of_adapters
from manylora.kernels.shapes import Activation, ProjectionGroup
from manylora.kernels.triton.launch import ceil_div, power_of_two, precision
from manylora.kernels.triton.lora_plan import (
    DEFAULT,
    ROWS,
    LoraConfig,
    LoraTileConfig,
    TilePlan,
    TritonLoraPlan,
    stored_config,
)
from manylora.kernels.triton.lora_rows import expand_kernel, gated_sum_kernel, shrink_kernel
from manylora.kernels.triton.small import gate_mul_kernel

INTERPRETED_MULTIPROCESSORS = 4


_log = logging.getLogger(__name__)


MOST_SPLITS = 16
"""Largest number of splits of a shrink, limited because every program of expand adds all splits up again."""


def gate_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Compute ``Ops.gate_mul``."""
    size = gate_up.shape[-1] // 2
    out = torch.empty((gate_up.shape[0], size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, power_of_two(size))
    if gate_up.shape[0]:
        gate_mul_kernel[(gate_up.shape[0], ceil_div(size, block))](
            gate_up, out, gate_up.stride(0), size, BLOCK=block, ACTIVATION=activation
        )
    return out


def planned(step: LoraStep) -> TritonLoraPlan:
    """Return the plan of a step in which some token has an adapter."""
    assert isinstance(step.plan, TritonLoraPlan)
    return step.plan


class LoraKernels:
    """The LoRA kernels on one CUDA device, which has ``multiprocessors`` multiprocessors."""

    def __init__(self, config: LoraConfig, multiprocessors: int) -> None:
        self.config = config
        self._sms = multiprocessors

    def shrink(self, x: torch.Tensor, site: LoraSite, step: LoraStep) -> list[torch.Tensor]:
        """Compute v = x A with every token's adapter, x ``[T, in]``; one tensor for each of the plan's parts.

        A tensor is float32 ``[splits, units * ROWS]``: the splits' partial results, which ``expand`` adds up.
        """
        plan = planned(step)
        return [self._shrink(x, step.pool, site, plan, part) for part in plan.parts]

    def expand(
        self, y: torch.Tensor, partial: list[torch.Tensor], site: LoraSite, step: LoraStep, add: bool = True
    ) -> None:
        """Add scale * v B to y ``[T, sum(out)]`` in place, where ``partial`` is what ``shrink`` returned.

        Without ``add``, overwrite y instead, with zeros for tokens that have a tile but no adapter.
        """
        plan = planned(step)
        for part, planes in zip(plan.parts, partial):
            self._expand(y, planes, step.pool, site, plan, part, add)

    @staticmethod
    def gated_sum(y: torch.Tensor, delta: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return activation(gate) * up ``[T, I]``; gate and up are the halves of y + delta ``[T, 2 * I]``."""
        tokens, size = y.shape[0], y.shape[1] // 2
        out = torch.empty((tokens, size), dtype=y.dtype, device=y.device)
        block = min(1024, power_of_two(size))
        gated_sum_kernel[(tokens, ceil_div(size, block))](
            y, delta, out, y.stride(0), delta.stride(0), size, BLOCK=block, ACTIVATION=activation
        )
        return out

    def _shrink(
        self, x: torch.Tensor, pool: torch.Tensor, site: LoraSite, plan: TritonLoraPlan, part: TilePlan
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
            PRECISION=precision(x.dtype),
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
        plan: TritonLoraPlan,
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
            PRECISION=precision(y.dtype),
            num_warps=config.expand_warps,
            **_launch_options(plan.pdl, config.expand_registers),
        )  # fmt: skip

    def _splits(self, group: ProjectionGroup, config: LoraTileConfig, entries: int) -> int:
        if config.chunk:
            return min(MOST_SPLITS, ceil_div(group.in_features, config.chunk))
        # Expand reads all splits of its tokens again for every block of columns, so there are only as many as
        # keep the device busy. The number is 1, 2 or 4, so that few variants of the kernels are compiled.
        return next((splits for splits in (1, 2) if entries * splits >= 1.5 * self._sms), 4)

    def _programs(self, items: int, programs: int) -> int:
        return min(items, self._sms * programs) if programs else items

    @staticmethod
    def _layer(plan: TritonLoraPlan, layer: int) -> int:
        return layer * plan.geometry.slab_elements


def _launch_options(pdl: bool, registers: int) -> dict[str, int]:
    options: dict[str, int] = {"launch_pdl": True} if pdl else {}
    return options | ({"maxnreg": registers} if registers else {})


def block_of(cell: int, most: int, elements: int) -> int:
    """Return how many columns to load at once, inside one cell where cells are long enough.

    A row then needs one pointer for each load.
    """
    most = max(16, min(most, power_of_two(elements)))
    divisor = cell & -cell
    return min(most, divisor) if divisor >= 32 else min(64, most)


def can_depend(device: torch.device) -> bool:
    """Return whether the device has dependent launch: NVIDIA GPUs have it from compute capability 9.0 on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return bool(torch.get_device_module(device).get_device_capability(device) >= (9, 0))


def lora_kernels_on(device: torch.device) -> LoraKernels:
    """Return the LoRA kernels of a CUDA device, or of the CPU for Triton's interpreter."""
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


class SideStream:
    """A second stream of a device, of high priority if ``is_preferred``. On a CPU the methods do nothing."""

    def __init__(self, device: torch.device, is_preferred: bool) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = None
        if self._module is not None:
            self._stream = self._module.Stream(device, priority=-1 if is_preferred else 0)

    def fork(self) -> None:
        """Make later launches in ``use`` wait for the current stream's work so far, and for no later work."""
        if self._module is not None and self._stream is not None:
            self._stream.wait_stream(self._module.current_stream())

    def use(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._module is None else self._module.stream(self._stream)

    def join(self) -> None:
        if self._module is not None:
            self._module.current_stream().wait_stream(self._stream)
