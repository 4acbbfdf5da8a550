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


def planned(step: LoraStep) -> TritonLoraPlan:
    """The plan of a step in which some token has an adapter."""
    assert isinstance(step.plan, TritonLoraPlan)
    return step.plan


class LoraKernels:
    """LoRA on one CUDA device. ``multiprocessors``: how many it has."""

    def __init__(self, config: LoraConfig, multiprocessors: int) -> None:
        self.config = config
        self._sms = multiprocessors

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
        # Expand reads every split of its tokens anew for every block of columns: no more than the device needs
        # to be busy, and one of three, so that there are few variants of the kernels to compile.
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
    """Columns to load at once: within one cell where cells are long enough: then a row needs one pointer."""
    most = max(16, min(most, power_of_two(elements)))
    divisor = cell & -cell
    return min(most, divisor) if divisor >= 32 else min(64, most)


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
