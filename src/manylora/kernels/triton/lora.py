"""Linears with adapters on a CUDA device: in which order the base model's product and the LoRA kernels run.

Owns that order, and which stored configuration a device gets (``kernels/tuned/lora.json``). Measured on an H200,
a step's LoRA is launches and chains of loads rather than bytes unless every token has an adapter of its own. So
small captured steps run it beside the product, and what reads the two adds them. Others run product, shrink,
expand on one stream with dependent launch: each kernel reads its tables and weights while the one before it ends.
Large steps' results are large too: there expand writes and the product adds to it. docs/performance.md says what
else was tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from manylora.kernels.ops import IN_LINE, LoraSegments, Shrunk, Side, Summands
from manylora.kernels.shapes import Activation, AdapterGeometry, ProjectionGroup
from manylora.kernels.triton.lora_launch import (
    DEFAULT,
    MIXED,
    Beside,
    LoraConfig,
    LoraKernels,
    LoraPlan,
    gate_mul,
)
from manylora.kernels.weight import Weight

TABLE = Path(__file__).parents[1] / "tuned" / "lora.json"
INTERPRETED_MULTIPROCESSORS = 4

Linear = Callable[[torch.Tensor, Weight, "torch.Tensor | None"], torch.Tensor]

_log = logging.getLogger(__name__)


def stored_config(device_name: str, path: Path = TABLE) -> LoraConfig | None:
    """What was measured to be best on devices of this name. None for others.

    The file: ``{device name: LoraConfig's fields}``, of which those that are missing have their defaults;
    ``mixed``: ``[[most tokens, fields], ...]``, ascending;
    ``beside``: ``[[most tokens, fields], ...]``,
    its ``sizes`` where they differ from ``short``.
    """
    found = json.loads(path.read_text()).get(device_name) if path.is_file() else None
    if found is None:
        return None
    sizes: dict[str, Any] = {
        kind: dataclasses.replace(getattr(DEFAULT, kind), **found.get(kind, {})) for kind in ("short", "long")
    }
    if "mixed" in found:
        sizes["mixed"] = tuple(
            (most, dataclasses.replace(MIXED, **fields)) for most, fields in found["mixed"]
        )
    if "beside" in found:
        sizes["beside"] = tuple(
            (
                most,
                Beside(
                    sizes=dataclasses.replace(sizes["short"], **how["sizes"]),
                    product_first=tuple(how["product_first"]),
                    pdl=how["pdl"],
                ),
            )
            for most, how in found["beside"]
        )
    return dataclasses.replace(DEFAULT, **{**found, **sizes})


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


class AdaptedLinears:
    """Linears of the base model with each token's own adapter on top, on one device."""

    def __init__(self, kernels: LoraKernels, linear: Linear, device: torch.device) -> None:
        self.kernels = kernels
        self._linear = linear
        self._before, self._behind = SideStream(device, True), SideStream(device, False)
        """Two streams: for what the device prefers to the product, and for the rest."""

    def plan(self, segments: LoraSegments, geometry: AdapterGeometry, device: torch.device) -> LoraPlan:
        """The plan of one batch, to be run eagerly."""
        num_tokens = int(segments.start[-1] + segments.length[-1])
        return self.kernels.plan(segments, geometry, device, num_tokens)

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: LoraPlan,
    ) -> None:
        """Computes ``Ops.lora``."""
        partial = self.kernels.shrink(x, pool, layer, group, plan)
        self.kernels.expand(y, partial, pool, layer, group, plan)

    def side(self, plan: LoraPlan) -> Side:
        """Computes ``Ops.lora_side``: the device prefers what ranks wait for to the product."""
        return IN_LINE if plan.beside is None else self._behind

    def shrink(
        self, x: torch.Tensor, pool: torch.Tensor, layer: int, group: ProjectionGroup, plan: LoraPlan
    ) -> Shrunk:
        """Computes ``Ops.lora_shrink``: what expand would add up as it reads is added up before."""
        planes = self.kernels.shrink(x, pool, layer, group, plan)
        sums = [part[0] if len(part) == 1 else part.sum(0) for part in planes]
        values = sums[0] if len(sums) == 1 else torch.cat(sums)
        return Shrunk(values, [len(part) for part in sums])

    def expand(
        self,
        y: torch.Tensor,
        shrunk: Shrunk,
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: LoraPlan,
    ) -> None:
        """Computes ``Ops.lora_expand``."""
        planes = [part.view(1, -1) for part in torch.split(shrunk.values, shrunk.parts)]
        self.kernels.expand(y, planes, pool, layer, group, plan)

    def _in_turn(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: LoraPlan,
    ) -> torch.Tensor:
        """Product and LoRA on one stream, added up."""
        if bias is None and plan.is_first:
            y = torch.empty((x.shape[0], weight.data.shape[0]), dtype=x.dtype, device=x.device)
            y[plan.covered :].zero_()
            partial = self.kernels.shrink(x, pool, layer, group, plan)
            self.kernels.expand(y, partial, pool, layer, group, plan, add=False)
            return y.addmm_(x, weight.data.T)
        y = self._linear(x, weight, bias)
        self.add(y, x, pool, layer, group, plan)
        return y

    def summands(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: LoraPlan,
    ) -> Summands:
        """Computes ``Ops.lora_summands``."""
        if plan.beside is None:
            return Summands(self._in_turn(x, weight, bias, pool, layer, group, plan))
        adapted = torch.empty((x.shape[0], weight.data.shape[0]), dtype=x.dtype, device=x.device)
        product_first = group.name in plan.beside.product_first
        side = self._behind if product_first else self._before
        side.fork()
        # A captured graph starts first what was launched first.
        y = self._linear(x, weight, bias) if product_first else None
        with side.use():
            partial = self.kernels.shrink(x, pool, layer, group, plan)
            self.kernels.expand(adapted, partial, pool, layer, group, plan, add=False)
        if y is None:
            y = self._linear(x, weight, bias)
        side.join()
        return Summands(y, adapted)

    def gated(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: LoraPlan,
        activation: Activation = "silu",
    ) -> torch.Tensor:
        """Computes ``Ops.lora_gated``."""
        y, adapted = self.summands(x, weight, bias, pool, layer, group, plan)
        if adapted is None:
            return gate_mul(y, activation)
        return self.kernels.gated_sum(y, adapted, activation)
