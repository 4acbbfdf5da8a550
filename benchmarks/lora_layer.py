"""One decoder layer after another with LoRA, in one CUDA graph, by different schemes: for ``h200_lora``.

A layer here is its four linears and a small operation after each, which reads what the linear (and LoRA) gave.
Attention and norms are left out; LoRA's price is the difference to the same graph without it. Schemes differ in
where LoRA's kernels run and in who adds what they give.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from manylora.bench.kernels import Decoder, random_pool, segments_for
from manylora.kernels.ops import LoraSegments
from manylora.kernels.shapes import AdapterGeometry, ProjectionGroup, adapter_geometry
from manylora.kernels.triton.lora_launch import LoraKernels, LoraPlan

Tensors = dict[str, torch.Tensor]


@triton.jit
def consume_kernel(y, delta, out, size, SILU: tl.constexpr, DELTA: tl.constexpr, BLOCK: tl.constexpr):
    """out = y (+ delta), or of its two halves silu(first) * second; grid (T, blocks of out's columns)."""
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = n < size
    at = tl.program_id(0).to(tl.int64) * (size * 2 if SILU else size) + n
    value = tl.load(y + at, mask=ok, other=0.0).to(tl.float32)
    if DELTA:
        value += tl.load(delta + at, mask=ok, other=0.0).to(tl.float32)
    if SILU:
        up = tl.load(y + at + size, mask=ok, other=0.0).to(tl.float32)
        if DELTA:
            up += tl.load(delta + at + size, mask=ok, other=0.0).to(tl.float32)
        value = value / (1.0 + tl.exp(-value)) * up
    tl.store(out + tl.program_id(0).to(tl.int64) * size + n, value.to(out.dtype.element_ty), mask=ok)


@dataclasses.dataclass
class Rig:
    """A model's layers: weights of ``layers`` of them, a pool of all layers' pages, inputs by group."""

    decoder: Decoder
    device: torch.device
    dtype: torch.dtype
    layers: int
    geometry: AdapterGeometry
    pool: torch.Tensor
    weights: list[Tensors]
    shared: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, decoder: Decoder, device: torch.device, dtype: torch.dtype, layers: int, rank_sum: int
    ) -> Rig:
        """``rank_sum``: adapters' ranks that the pool must hold, together."""
        geometry = adapter_geometry(decoder.page(dtype), decoder.groups())
        per_rank = sum(
            geometry.cells(p.in_features) + geometry.cells(p.out_features) for p in geometry.projections
        )
        pages = -(-per_rank * rank_sum // geometry.cells_per_page) + 16
        weights = [
            {
                group.name: torch.randn(group.offsets[-1], group.in_features, dtype=dtype, device=device)
                * group.in_features**-0.5
                for group in geometry.groups
            }
            for _ in range(layers)
        ]
        pool = random_pool(geometry.page, pages, dtype, device)
        return cls(decoder, device, dtype, layers, geometry, pool, weights)

    def segments(self, lengths: list[int], ranks: list[int]) -> LoraSegments:
        return segments_for(self.geometry, lengths, ranks, len(self.pool), self.device)

    def inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        return {
            group.name: torch.randn(tokens, group.in_features, dtype=self.dtype, device=self.device)
            for group in self.geometry.groups
        }

    def buffers(self, tokens: int) -> tuple[Tensors, Tensors, Tensors, Tensors]:
        """Inputs, outputs, LoRA's own outputs and what comes after, by group; shared by whoever asks for them."""
        if self.shared.get("tokens") != tokens:
            y = {
                group.name: torch.empty(tokens, group.offsets[-1], dtype=self.dtype, device=self.device)
                for group in self.geometry.groups
            }
            out = {
                name: t[:, : t.shape[1] // 2].contiguous() if name == "gate_up" else torch.empty_like(t)
                for name, t in y.items()
            }
            delta = {name: torch.empty_like(t) for name, t in y.items()}
            self.shared.update(tokens=tokens, all=(self.inputs(tokens), y, delta, out))
        found: tuple[Tensors, Tensors, Tensors, Tensors] = self.shared["all"]
        return found

    def adapter_bytes(self, ranks: list[int]) -> int:
        """Of one layer."""
        elements = sum(p.in_features + p.out_features for p in self.geometry.projections)
        return elements * sum(ranks) * self.dtype.itemsize


class Layers:
    """Runs a scheme over the rig's layers."""

    def __init__(self, rig: Rig, kernels: LoraKernels | None, plan: LoraPlan | None, tokens: int) -> None:
        self.rig, self.kernels, self.plan, self.tokens = rig, kernels, plan, tokens
        self.x, self.y, self.delta, self.out = rig.buffers(tokens)
        self.given: dict[str, Any] = {}
        self.fused: torch.Tensor | None = None
        # Before other work wherever there is room: what it does is short.
        self.side = None if rig.device.type == "cpu" else torch.cuda.Stream(priority=-1)

    def run(self, scheme: str) -> None:
        for layer in range(self.rig.layers):
            for group in self.rig.geometry.groups:
                getattr(self, f"_{scheme}")(layer, group)

    # ---- schemes: base alone, LoRA alone, and the ways to put them together ------------------------------

    def _base(self, layer: int, group: ProjectionGroup) -> None:
        self._linear(layer, group)
        self._consume(group, False)

    def _alone(self, layer: int, group: ProjectionGroup) -> None:
        self._expand(self._shrink(layer, group), layer, group)

    def _shrinks(self, layer: int, group: ProjectionGroup) -> None:
        self._shrink(layer, group)

    def _expands(self, layer: int, group: ProjectionGroup) -> None:
        self._expand(self.given[group.name], layer, group)

    def prepare_expands(self) -> bool:
        """Partial results for ``expands``, whose values do not matter."""
        self.given = {group.name: self._shrink(0, group) for group in self.rig.geometry.groups}
        return True

    def _after(self, layer: int, group: ProjectionGroup) -> None:
        """One stream: linear, shrink, expand adds."""
        self._linear(layer, group)
        self._expand(self._shrink(layer, group), layer, group)
        self._consume(group, False)

    def _side(self, layer: int, group: ProjectionGroup) -> None:
        """Shrink beside the linear."""
        with self._beside():
            partial = self._shrink(layer, group)
        self._linear(layer, group)
        self._join()
        self._expand(partial, layer, group)
        self._consume(group, False)

    def _first(self, layer: int, group: ProjectionGroup) -> None:
        """One stream: shrink, expand writes, the linear adds to what is there."""
        self._expand(self._shrink(layer, group), layer, group, add=False)
        torch.addmm(
            self.y[group.name],
            self.x[group.name],
            self.rig.weights[layer][group.name].T,
            out=self.y[group.name],
        )
        self._consume(group, False)

    def _delta(self, layer: int, group: ProjectionGroup) -> None:
        """All of LoRA beside the linear, into a tensor of its own; what comes next adds the two."""
        with self._beside():
            partial = self._shrink(layer, group)
            self._expand(partial, layer, group, add=False, into=self.delta)
        self._linear(layer, group)
        self._join()
        self._consume(group, True)

    def _silu(self, layer: int, group: ProjectionGroup) -> None:
        """One stream; gate and up's expand does the activation too."""
        if group.name != "gate_up":
            return self._after(layer, group)
        self._linear(layer, group)
        self._expand_silu(self._shrink(layer, group), layer, group)

    def _side_silu(self, layer: int, group: ProjectionGroup) -> None:
        if group.name != "gate_up":
            return self._side(layer, group)
        with self._beside():
            partial = self._shrink(layer, group)
        self._linear(layer, group)
        self._join()
        self._expand_silu(partial, layer, group)

    def _first_silu(self, layer: int, group: ProjectionGroup) -> None:
        """``first``, and ``silu`` for gate and up."""
        return self._silu(layer, group) if group.name == "gate_up" else self._first(layer, group)

    # ---- parts -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        if self.side is None:
            yield
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            yield

    def _join(self) -> None:
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)

    def _linear(self, layer: int, group: ProjectionGroup) -> None:
        torch.mm(self.x[group.name], self.rig.weights[layer][group.name].T, out=self.y[group.name])

    def _shrink(self, layer: int, group: ProjectionGroup) -> Any:
        assert self.kernels is not None
        assert self.plan is not None
        return self.kernels.shrink(self.x[group.name], self.rig.pool, layer, group, self.plan)

    def _expand(
        self,
        partial: Any,
        layer: int,
        group: ProjectionGroup,
        add: bool = True,
        into: dict[str, torch.Tensor] | None = None,
    ) -> None:
        assert self.kernels is not None
        assert self.plan is not None
        y = (self.y if into is None else into)[group.name]
        self.kernels.expand(y, partial, self.rig.pool, layer, group, self.plan, add=add)

    def _expand_silu(self, partial: Any, layer: int, group: ProjectionGroup) -> None:
        assert self.kernels is not None
        assert self.plan is not None
        y = self.y[group.name]
        self.fused = self.kernels.expand_silu(y, partial, self.rig.pool, layer, group, self.plan)

    def _consume(self, group: ProjectionGroup, delta: bool) -> None:
        y, out = self.y[group.name], self.out[group.name]
        size = out.shape[1]
        consume_kernel[(self.tokens, triton.cdiv(size, 1024))](
            y, self.delta[group.name], out, size, SILU=size != y.shape[1], DELTA=delta, BLOCK=1024
        )
