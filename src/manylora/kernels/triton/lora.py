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
from collections.abc import Sequence
from typing import Any

import torch

from manylora.kernels.ops import LoraSite, LoraStep, of_adapters
from manylora.kernels.shapes import Activation
from manylora.kernels.triton.launch import ceil_div, power_of_two, precision
from manylora.kernels.triton.lora_plan import (
    DEFAULT,
    MOST_PROJECTIONS,
    ROWS,
    LoraConfig,
    TritonLoraPlan,
    WorkBuffer,
    stored_config,
)
from manylora.kernels.triton.lora_rows import expand_kernel, gated_sum_kernel, shrink_kernel
from manylora.kernels.triton.small import gate_mul_kernel

INTERPRETED_MULTIPROCESSORS = 4


_log = logging.getLogger(__name__)


MOST_SPLITS = 16
"""Largest number of splits of a shrink, limited because every program of expand adds all splits up again."""


def gate_mul(gate_up: torch.Tensor, adapted: torch.Tensor | None, activation: Activation) -> torch.Tensor:
    """Compute ``Ops.gate_mul`` of gate_up + adapted; ``adapted`` None: of gate_up."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    sizes: dict[str, Any] = {"BLOCK": min(1024, power_of_two(size)), "ACTIVATION": activation}
    grid = (tokens, ceil_div(size, sizes["BLOCK"]))
    if adapted is not None:
        gated_sum_kernel[grid](gate_up, adapted, out, gate_up.stride(0), adapted.stride(0), size, **sizes)
    elif tokens:
        gate_mul_kernel[grid](gate_up, out, gate_up.stride(0), size, **sizes)
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
        return [self._shrink(x, site, step, part) for part in planned(step).parts]

    def expand(
        self, y: torch.Tensor, partial: list[torch.Tensor], site: LoraSite, step: LoraStep, add: bool = True
    ) -> None:
        """Add scale * v B to y ``[T, sum(out)]`` in place, where ``partial`` is what ``shrink`` returned.

        Without ``add``, overwrite y instead, with zeros for tokens that have a tile but no adapter.
        """
        for part, planes in zip(planned(step).parts, partial):
            self._expand(y, planes, site, step, part, add)

    def _shrink(self, x: torch.Tensor, site: LoraSite, step: LoraStep, part: WorkBuffer) -> torch.Tensor:
        plan, group, config = planned(step), site.group, part.config
        work = part.groups[group.name]
        cell = plan.geometry.cell_elements
        most = min(64, config.shrink_step) if x.dtype == torch.float32 else config.shrink_step
        matrix = block_of(cell, most, group.in_features)
        columns = block_of(cell, config.shrink_columns, group.in_features) if config.vector else matrix
        unit = max(matrix, columns)
        if config.chunk:
            splits = min(MOST_SPLITS, ceil_div(group.in_features, config.chunk))
        else:
            # Expand reads all splits of its tokens again for every block of columns, so there are only as many
            # as keep the device busy. The number is 1, 2 or 4, so that few variants are compiled.
            splits = next((n for n in (1, 2) if work.size.entries * n >= 1.5 * self._sms), 4)
        chunk = ceil_div(ceil_div(group.in_features, splits), unit) * unit
        splits = ceil_div(group.in_features, chunk)
        planes = torch.empty((splits, work.size.units * ROWS), dtype=torch.float32, device=x.device)
        items = work.size.entries * splits
        shrink_kernel[(self._programs(items, config.shrink_programs),)](
            x,
            of_adapters(step.pool, x.dtype),
            plan.cells,
            work.counts,
            work.entries,
            planes,
            x.stride(0),
            planes.stride(0),
            site.layer * plan.geometry.slab_elements,
            group.in_features,
            plan.geometry.cells(group.in_features),
            CELL=cell,
            ALIGN=plan.align,
            CHUNK=chunk,
            SPLITS=splits,
            BLOCK_T=config.tile_tokens,
            BLOCKS=config.blocks,
            BLOCK_K=columns,
            MATRIX_K=matrix,
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
        site: LoraSite,
        step: LoraStep,
        part: WorkBuffer,
        add: bool,
    ) -> None:
        plan, config, work = planned(step), part.config, part.groups[site.group.name]
        outputs = [p.out_features for p in site.group.projections]
        cell = plan.geometry.cell_elements
        wide = block_of(cell, config.expand_columns, max(outputs))
        columns = min(wide, config.tile_columns or wide)
        matrix = min(columns, 64 if y.dtype == torch.float32 else config.expand_step)
        splits = planes.shape[0]
        items = work.size.tiles * sum(ceil_div(n, columns) for n in outputs)
        cells = [plan.geometry.cells(n) for n in outputs]
        expand_kernel[(self._programs(items, config.expand_programs),)](
            y, of_adapters(step.pool, y.dtype), plan.cells, work.counts, work.tiles, part.scales, planes,
            y.stride(0), planes.stride(0), site.layer * plan.geometry.slab_elements, site.layer,
            plan.geometry.page.layers,
            *padded(outputs), *padded(cells),
            PROJECTIONS=len(outputs),
            CELL=cell,
            ALIGN=plan.align,
            BLOCK_T=config.tile_tokens,
            TOKENS=config.item_tokens,
            BLOCK_N=wide if config.vector else columns,
            TILE_N=columns,
            SUB_N=matrix,
            SPLITS=splits,
            SPLITS_PADDED=power_of_two(splits),
            VECTOR=config.vector,
            ADD=add,
            PDL=plan.pdl,
            PRECISION=precision(y.dtype),
            num_warps=config.expand_warps,
            **_launch_options(plan.pdl, config.expand_registers),
        )  # fmt: skip

    def _programs(self, items: int, programs: int) -> int:
        return min(items, self._sms * programs) if programs else items


def _launch_options(pdl: bool, registers: int) -> dict[str, int]:
    options: dict[str, int] = {"launch_pdl": True} if pdl else {}
    return options | ({"maxnreg": registers} if registers else {})


def padded(values: Sequence[Any]) -> list[Any]:
    """Return the values of a group's projections, with the last one repeated for projections that it lacks."""
    return [*values, *[values[-1]] * (MOST_PROJECTIONS - len(values))]


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
