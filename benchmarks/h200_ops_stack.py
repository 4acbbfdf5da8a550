"""Decoding layers to be measured by ``h200_ops_layers``: weights, a pool, a batch, and variants' graphs."""

# mypy: disallow-untyped-calls=False
# torch's streams and events have no annotations.

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch

from manylora.bench.kernels import cells_for, random_pool, segments_for
from manylora.kernels.ops import AttentionRows, Rotary, StepBatch
from manylora.kernels.shapes import PageShape, Projection, ProjectionGroup, adapter_geometry
from manylora.kernels.triton.ahead import Early, Key
from manylora.kernels.triton.decode_table import DecodeConfig, DecodeTable, stored_table
from manylora.kernels.triton.operations import TritonOps
from manylora.kernels.triton.products import Choice, Products, Shape, bucket_of
from manylora.models.layers import Attention, GatedMlp, LoraLinear, PreNormLayer, RmsNorm, Step

DTYPE, LAYERS, PAGE_TOKENS, MAX_CONTEXT = torch.bfloat16, 8, 16, 2048
HIDDEN, HEADS, DIM = 4096, 32, 128
MODELS = {"7b": (32, 11008), "8b": (8, 14336)}
"""Key heads, and features inside the MLP, of Llama-2-7B and Llama-3-8B."""

PRODUCTS = ("qkv", "o", "gate_up", "down")


@dataclasses.dataclass(frozen=True)
class Case:
    """A decoding batch: ``rank`` of each row's own adapter, 0: none."""

    model: str
    batch: int
    context: int
    rank: int = 0

    @property
    def name(self) -> str:
        return f"{self.model}.{self.batch}.{self.context}" + (f".r{self.rank}" if self.rank else "")

    @property
    def wants_pieces(self) -> bool:
        """Whether rows alone may not keep the device busy with attention."""
        return self.batch * MODELS[self.model][0] < 1024


CASES = [
    Case("7b", 32, 300),
    Case("8b", 64, 300),
    Case("7b", 32, 300, 16),
    Case("7b", 128, 300),
    Case("8b", 64, 300, 16),
    Case("7b", 8, 300),
    Case("7b", 1, 300),
    Case("8b", 32, 300),
    Case("7b", 64, 300),
    Case("8b", 128, 300),
    Case("8b", 8, 300),
    Case("8b", 1, 300),
    Case("7b", 128, 300, 16),
    Case("7b", 8, 300, 16),
    Case("7b", 32, 600),
    Case("8b", 64, 600),
    Case("7b", 128, 600),
]
"""The most telling first, for when time is short."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a case is run. ``decoding`` None: what is stored for the device."""

    choices: Mapping[Shape, Choice]
    ahead: Mapping[Key, Early] = dataclasses.field(default_factory=dict)
    decoding: DecodeConfig | None = None
    dependent: bool = False


def groups_of(model: str) -> tuple[ProjectionGroup, ...]:
    kv_heads, inner = MODELS[model]

    def group(inputs: int, **outputs: int) -> ProjectionGroup:
        projections = tuple(Projection(name, inputs, size) for name, size in outputs.items())
        return ProjectionGroup("_".join(outputs), projections)

    kv = kv_heads * DIM
    return (
        group(HIDDEN, q=HEADS * DIM, k=kv, v=kv),
        group(HEADS * DIM, o=HIDDEN),
        group(HIDDEN, gate=inner, up=inner),
        group(inner, down=HIDDEN),
    )


def shapes_of(case: Case) -> list[Shape]:
    """Of the layer's products, as tables know them."""
    bucket = bucket_of(case.batch)
    assert bucket is not None
    return [(bucket, group.in_features, group.offsets[-1]) for group in groups_of(case.model)]


class Stack:
    """Layers of one model."""

    def __init__(self, model: str, num_layers: int) -> None:
        self._device = torch.device("cuda")
        self._kv_heads = MODELS[model][0]
        self._groups = groups_of(model)
        self._page = PageShape(num_layers, PAGE_TOKENS, self._kv_heads, DIM, 2)
        angles = torch.outer(torch.arange(float(MAX_CONTEXT)), 1e4 ** -torch.arange(0, 1, 2 / DIM)).cuda()
        self._rotary = Rotary(angles.cos(), angles.sin())
        self._layers = [self._layer(layer) for layer in range(num_layers)]
        self._memory = torch.cuda.graph_pool_handle()

    def _layer(self, layer: int) -> PreNormLayer:
        def linear(group: ProjectionGroup) -> LoraLinear:
            shape = group.offsets[-1], group.in_features
            weight = torch.empty(shape, dtype=DTYPE, device="cuda").normal_(std=group.in_features**-0.5)
            return LoraLinear(group, layer, weight, None)

        qkv, out, gate_up, down = (linear(group) for group in self._groups)
        norms = [RmsNorm(torch.ones(HIDDEN, dtype=DTYPE, device="cuda"), 1e-5) for _ in range(2)]
        attention = Attention(qkv, out, None, self._rotary, DIM, DIM**-0.5, None)
        return PreNormLayer(norms[0], attention, norms[1], GatedMlp(gate_up, down))

    def measure(
        self, case: Case, variants: Mapping[str, Variant], rounds: int, same: Collection[str] | None = None
    ) -> tuple[dict[str, float], list[str]]:
        """Microseconds of a layer by variant (those that fail are left out), and which of ``same`` (None: of all)
        give other bits than the first."""
        batch = _Batch(case, self._page, self._groups, self._device)
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        different: list[str] = []
        expected: torch.Tensor | None = None
        kept: list[object] = []
        with torch.inference_mode():
            for name, variant in variants.items():
                ops = self._ops(variant)
                try:
                    graph, out = self._capture(batch, ops, variant, kept)
                except Exception as error:
                    torch.cuda.synchronize()
                    different.append(f"{name} failed: {str(error)[:120]}")
                    continue
                for _ in range(2):
                    graph.replay()
                    result = out.clone()
                    expected = result if expected is None else expected
                    if (same is None or name in same) and not torch.equal(result, expected):
                        different.append(name)
                graphs[name] = graph
        times = _medians(graphs, rounds)
        return {name: round(value / len(self._layers), 2) for name, value in times.items()}, different

    def _ops(self, variant: Variant) -> TritonOps:
        properties = torch.cuda.get_device_properties(0)
        if variant.decoding is None:
            table = stored_table(properties.name, HEADS // self._kv_heads, DIM)
        else:
            table = DecodeTable(((4096, variant.decoding),))
        products = Products(variant.choices, properties.multi_processor_count)
        return TritonOps(products=products, decoding=table, dependent=variant.dependent, ahead=variant.ahead)

    def _capture(
        self, batch: _Batch, ops: TritonOps, variant: Variant, kept: list[object]
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        step = batch.step(ops, kept)

        def run() -> torch.Tensor:
            x, residual = batch.x.clone(), None
            for layer in self._layers:
                x, residual = layer(x, residual, step)
            assert residual is not None
            return torch.cat((x, residual))

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            out = run()
        kept += [ops, step]
        return graph, out


class _Batch:
    """A case's rows over scattered pages, contexts from half to one and a half of the mean."""

    def __init__(
        self, case: Case, page: PageShape, groups: tuple[ProjectionGroup, ...], device: torch.device
    ) -> None:
        random = np.random.default_rng(0)
        self._case, self._page, self._device = case, page, device
        self._contexts = random.integers(case.context // 2, case.context * 3 // 2, case.batch).astype(
            np.int32
        )
        counts = -(-self._contexts // PAGE_TOKENS)
        self._geometry = adapter_geometry(page, groups)
        cells = cells_for(self._geometry, [case.rank] * case.batch)
        adapter_pages = -(-cells // self._geometry.cells_per_page)
        num_pages = adapter_pages + int(counts.sum())
        self.pool = random_pool(page, num_pages, DTYPE, device)
        free = adapter_pages + random.permutation(int(counts.sum())).astype(np.int32)
        self._table = np.zeros((case.batch, int(counts.max())), dtype=np.int32)
        self._table[np.arange(counts.max()) < counts[:, None]] = free
        last = self._contexts.astype(np.int64) - 1
        pages = self._table[np.arange(case.batch), last // PAGE_TOKENS].astype(np.int64)
        self._slots = torch.from_numpy(pages * PAGE_TOKENS + last % PAGE_TOKENS).to(device)
        self._positions = torch.from_numpy(last).to(device)
        self._segments = None
        if case.rank:
            ranks = [case.rank] * case.batch
            self._segments = segments_for(self._geometry, [1] * case.batch, ranks, adapter_pages, device)
        self.x = torch.randn(case.batch, HIDDEN, device=device).to(DTYPE)

    def step(self, ops: TritonOps, kept: list[object]) -> Step:
        case = self._case
        attention = ops.fixed_attention(case.batch, MAX_CONTEXT, self._page, self._device)
        starts = np.arange(case.batch + 1, dtype=np.int32)
        attention.fill(AttentionRows(starts, self._contexts, self._table))
        plan: Any = None
        if self._segments is not None:
            cells = self._segments.cells
            lora = ops.fixed_lora(case.batch, case.rank, self._geometry, cells, self._device)
            lora.fill(self._segments, case.batch)
            plan = lora.plan
            kept.append(lora)
        kept.append(attention)
        drawn = torch.arange(case.batch, device=self._device)
        token_ids = torch.zeros_like(drawn)
        return Step(
            ops, StepBatch(token_ids, self._positions, self._slots, drawn, attention.plan, plan), self.pool
        )


def _medians(graphs: Mapping[str, torch.cuda.CUDAGraph], rounds: int) -> dict[str, float]:
    """Microseconds of a replay. The graphs take turns."""
    times: dict[str, list[tuple[Any, Any]]] = {name: [] for name in graphs}
    event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)  # noqa: E731
    for _ in range(rounds):
        for name, graph in graphs.items():
            begun, ended = event(), event()
            begun.record()
            graph.replay()
            ended.record()
            times[name].append((begun, ended))
    torch.cuda.synchronize()
    return {
        name: 1e3 * statistics.median(begun.elapsed_time(ended) for begun, ended in pairs)
        for name, pairs in times.items()
    }
