"""One implementation of the operations on one device, with the memory that all its cases read; and what a case is.

Owns: which implementation runs, the pool, the weights, and how an output is compared with its truth. A problem
(``AttentionProblem`` and others) is inputs and what comes out exactly; each way to compute it is a case.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from manylora.config.declaring import ConfigError
from manylora.devices.device import open_device
from manylora.kernels.flashinfer_attention import AttentionShape
from manylora.kernels.ops import AttentionRows, Ops, Weight
from manylora.kernels.select import ops_for
from manylora.kernels.shapes import adapter_geometry
from manylora_lab.bench.dummies import DEMO
from manylora_lab.bench.kernels.pool import (
    cells_for,
    groups_of,
    page_of,
    pages_of,
    random_pool,
    scattered_rows,
)
from manylora_lab.bench.kernels.settings import KernelSettings, Queries, check_name
from manylora_lab.bench.kernels.timing import Step
from manylora_lab.bench.rounding import Bounded
from manylora_lab.pricing.shapes import SHAPES, ModelShape

LAYERS = 4
"""One timed call on CUDA goes through so many layers, each with weights, pages and adapters of its own."""
INTERPRETED_MULTIPROCESSORS = 4
COPIES = 8
"""The small operations take less than a clock can tell: so many calls in a row, each with inputs of its own."""
_SHAPES = {DEMO.name: DEMO, **SHAPES}


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True, slots=True)
class Errors:
    """``relative``: ||out - exact|| / ||exact||. ``of_bound``: the largest error of an element over what rounding
    may make of it (``rounding``); a right result's is at most 1."""

    relative: float
    of_bound: float

    @property
    def is_right(self) -> bool:
        return self.of_bound <= 1


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One operation at one setting. ``num_bytes``, ``flop``: the least that a call must move and compute.

    ``step`` makes ``calls`` calls; ``base``: the part of it whose time is not the kernel's. ``is_captured``: may
    run in a CUDA graph.
    """

    kernel: str
    setting: dict[str, Any]
    num_bytes: int
    flop: int
    check: Callable[[], Errors]
    step: Step
    calls: int
    base: Step | None = None
    is_captured: bool = True

    @property
    def title(self) -> str:
        words = [f"{name} {value}" for name, value in self.setting.items()]
        return ", ".join([self.kernel, *words])


class KernelRig:
    """Raises ConfigError for settings that cannot run here."""

    def __init__(self, settings: KernelSettings) -> None:
        self.device = open_device(settings.device).torch_device
        self.is_cuda = self.device.type == "cuda"
        self.is_interpreted = settings.ops == "triton" and not self.is_cuda
        name = settings.shape or ("llama-2-7b" if self.is_cuda else DEMO.name)
        check_name("shape", name, _SHAPES)
        self.shape: ModelShape = _SHAPES[name]
        self.dtype = self._dtype(settings.dtype)
        attends = not settings.only or not {"decode", "prefill", "attention"}.isdisjoint(settings.only)
        self.ops = self._ops(settings.ops, attends)
        self.layers = min(LAYERS if self.is_cuda else 1, self.shape.layers)
        self.decoder = dataclasses.replace(self.shape, layers=self.layers)
        """What one timed call goes through."""
        self.page = page_of(self.decoder, self.dtype)
        self.groups = groups_of(self.decoder)
        self.geometry = adapter_geometry(self.page, (self.groups,) * self.layers)
        self._num_pages = 0

    @property
    def multiprocessors(self) -> int:
        if not self.is_cuda:
            return INTERPRETED_MULTIPROCESSORS
        module = torch.get_device_module(self.device)
        return int(module.get_device_properties(self.device).multi_processor_count)

    def _dtype(self, name: str) -> torch.dtype:
        if name == "auto":
            name = "bfloat16" if self.is_cuda else "float32"
        if name == "bfloat16" and self.is_interpreted:
            raise ConfigError(
                "Triton's interpreter multiplies bfloat16 wrongly: use --dtype float32 or float16"
            )
        return {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}[name]

    def _ops(self, name: str, attends: bool) -> Ops:
        if self.is_cuda:
            if name not in ("auto", "triton"):
                raise ConfigError(f"--ops {name} runs on a CPU: add --device cpu")
            sizes = self.shape
            heads = AttentionShape(sizes.heads, sizes.kv_heads, sizes.head_dim, self.dtype)
            # As an engine chooses; what it compiles first can take a minute.
            return ops_for(self.device, attention=heads if attends else None)
        if name == "triton":
            if os.environ.get("TRITON_INTERPRET") != "1":
                raise ConfigError("--ops triton on a CPU needs the interpreter: set TRITON_INTERPRET=1")
            from manylora.kernels.triton.operations import TritonOps

            return TritonOps()
        return ops_for(self.device)

    # ---- memory that cases share -----------------------------------------------------------------------

    def reserve(self, rows: Iterable[Queries], ranks: int, tokens: int = 1) -> None:
        """Makes the pool, before the first case: it is to hold the largest of these rows, adapters whose ranks add
        up to ``ranks``, and so many tokens."""
        cells = cells_for(self.geometry, [ranks])
        self._num_pages = max(
            pages_of(tokens),
            -(-cells // self.geometry.cells_per_page),
            *(sum(pages_of(context) for _, context in queries) for queries in rows),
        )

    @functools.cached_property
    def pool(self) -> torch.Tensor:
        return random_pool(self.page, self._num_pages, self.dtype, self.device)

    @functools.cached_property
    def weights(self) -> list[dict[str, Weight]]:
        """The weights of each layer, by group: ``[sum(out), in]``."""
        return [
            {group.name: self.weight(group.offsets[-1], group.in_features) for group in self.groups}
            for _ in range(self.layers)
        ]

    def weight(self, outputs: int, inputs: int) -> Weight:
        return Weight(self.normal(outputs, inputs) * 0.02)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def rows(self, queries: Queries) -> AttentionRows:
        return scattered_rows(queries, np.arange(self._num_pages))


def errors(pairs: Iterable[tuple[torch.Tensor, Bounded]]) -> Errors:
    """The worst of all pairs of output and truth; NaN and infinities where one should not be give infinity."""
    relative = of_bound = 0.0
    for out, truth in pairs:
        one = float((out.double() - truth.exact).norm() / truth.exact.norm().clamp(min=1e-30))
        relative = max(relative, one if math.isfinite(one) else math.inf)
        of_bound = max(of_bound, truth.excess(out))
    return Errors(relative, of_bound)
