"""On a CUDA device: operations that count arrivals, captured in graphs, give the same bits in every replay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from manylora_lab.bench import rounding

from manylora.kernels.ops import AttentionRows, Rotary
from manylora.kernels.shapes import PageShape
from manylora.kernels.triton.dependent import can_depend
from manylora.kernels.triton.operations import TritonOps
from manylora.kernels.triton.products import LinearConfig, Products
from manylora.kernels.weight import Weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REPLAYS = 50
DEPENDS = pytest.mark.skipif(
    not (torch.cuda.is_available() and can_depend(torch.device("cuda"))), reason="no dependent launches"
)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


@pytest.mark.parametrize(
    "config",
    [
        LinearConfig(64, 64, 2, 4, 3),
        LinearConfig(64, 64, 2, 4, 3, described=True),
        LinearConfig(64, 64, 2, 4, 3, described=True, rows_described=True),
        pytest.param(LinearConfig(64, 64, 2, 4, 3, ahead=0), marks=DEPENDS),
        pytest.param(
            LinearConfig(64, 64, 2, 4, 3, described=True, rows_described=True, ahead=4), marks=DEPENDS
        ),
        # Not wider: 128 rows of 256 columns three times over are more shared memory than there is.
        pytest.param(LinearConfig(32, 128, 1, 4, 3, weights_first=False, ahead=40), marks=DEPENDS),
    ],
)
@pytest.mark.parametrize("tokens", [1, 17, 64, 128])
def test_products_in_a_graph(tokens: int, config: LinearConfig) -> None:
    """Several products one after the other share their counters; two runs of shared tiles may not differ."""
    products = Products({}, torch.cuda.get_device_properties(0).multi_processor_count)
    x, weights = normal(tokens, 4096), [Weight(normal(n, 4096) * 0.02) for n in (4096, 1000, 6144)]
    expected = [products.run(x, weight, None, config) for weight in weights]
    for out, weight in zip(expected, weights):
        assert rounding.linear(x, weight.data, None).rounded(out.dtype).excess(out) <= 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [products.run(x, weight, None, config) for weight in weights]
    for _ in range(REPLAYS):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outs, expected))


@pytest.mark.parametrize("config", [None, LinearConfig(64, 64, 2, 4, 3, described=True, rows_described=True)])
def test_a_graph_reads_rewritten_weights(config: LinearConfig | None) -> None:
    """The library's product and ours with descriptors, captured before the rewrite."""
    table = {} if config is None else {(32, 4096, 1000): config}
    products = Products(table, torch.cuda.get_device_properties(0).multi_processor_count)
    x, weight = normal(17, 4096), Weight(normal(1000, 4096) * 0.02)
    products(x, weight, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = products(x, weight, None)
    for _ in range(3):
        weight.rewrite(normal(1000, 4096) * 0.02)
        graph.replay()
        assert rounding.linear(x, weight.data, None).rounded(out.dtype).excess(out) <= 1
        assert torch.equal(out, products(x, weight, None))


def test_the_other_library_serves_where_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not asked for anywhere else, nor left on after an error."""
    products = Products({(16, 64, 96): None}, 1)
    used = [torch.backends.cuda.preferred_blas_library()]
    before, linear = used[0], torch.nn.functional.linear

    def watched(*arguments: torch.Tensor) -> torch.Tensor:
        used.append(torch.backends.cuda.preferred_blas_library())
        return linear(*arguments)

    monkeypatch.setattr("torch.nn.functional.linear", watched)
    x, weight = normal(3, 64), Weight(normal(96, 64))
    assert products(x, weight, None).shape == (3, 96)
    products(normal(17, 64), weight, None)
    with pytest.raises(RuntimeError):
        products(x, weight, normal(95))
    assert used[1] == used[3] != before == used[2]
    assert torch.backends.cuda.preferred_blas_library() == before


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 8, 128), (32, 8, 128), (8, 2, 64), (4, 1, 256)])
@pytest.mark.parametrize("dependent", [False, pytest.param(True, marks=DEPENDS)])
def test_decoding_attention_in_a_graph(heads: int, kv_heads: int, dim: int, dependent: bool) -> None:
    """Long and short contexts, so that some are cut into pieces and joined by whoever arrives last."""
    ops, page = TritonOps(dependent=dependent), PageShape(2, 16, kv_heads, dim, 2)
    contexts = np.array([1, 4000, 77, 128, 2500], dtype=np.int32)
    counts = -(-contexts // 16)
    pool = normal(int(counts.sum()), 2, 2, 16, kv_heads, dim)
    table, taken = np.zeros((len(contexts), int(counts.max())), dtype=np.int32), 0
    for row, count in enumerate(counts):
        table[row, :count] = np.arange(taken, taken + count)
        taken += count
    rows = AttentionRows(np.arange(len(contexts) + 1, dtype=np.int32), contexts, table)
    fixed = ops.fixed_attention(8, 4096, page, pool.device)
    q = normal(8, heads, dim)
    fixed.fill(rows)
    expected = ops.attention(q, pool, 1, fixed.plan, dim**-0.5, None)
    truth = rounding.attention(q[: len(contexts)], pool, 1, rows, page, dim**-0.5, None).rounded(q.dtype)
    assert truth.excess(expected[: len(contexts)]) <= 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.attention(q, pool, 1, fixed.plan, dim**-0.5, None)
    for _ in range(REPLAYS):
        out.fill_(float("nan"))
        fixed.fill(rows)
        graph.replay()
        assert torch.equal(out, expected)


def layers(ops: TritonOps, x: torch.Tensor, pool: torch.Tensor, weights: list[list[Weight]]) -> torch.Tensor:
    """A few decoder layers; the tokens stand at the ends of contexts that the pool holds."""
    kv_heads, dim = pool.shape[4:]
    heads, tokens, context = x.shape[1] // dim, len(x), 48
    pages = np.arange(3 * tokens, dtype=np.int32).reshape(tokens, 3)
    rows = AttentionRows(np.arange(tokens + 1, dtype=np.int32), np.full(tokens, context, np.int32), pages)
    plan = ops.plan_attention(rows, PageShape(len(weights), 16, kv_heads, dim, 2), x.device)
    slots = torch.from_numpy(pages[:, 2].astype(np.int64)).cuda() * 16 + 15
    positions = torch.full((tokens,), context - 1, device="cuda")
    angles = torch.outer(torch.arange(64.0), 1e4 ** -torch.arange(0, 1, 2 / dim)).cuda()
    rotary, ones = Rotary(angles.cos(), angles.sin()), torch.ones_like(x[0])
    residual = torch.zeros_like(x)

    def run() -> torch.Tensor:
        y, total = x.clone(), residual.clone()
        for layer, (qkv, o, gate_up, down) in enumerate(weights):
            y, total = ops.add_rms_norm(y, total, ones, 1e-5)
            widths = [heads * dim, kv_heads * dim, kv_heads * dim]
            parts = torch.split(ops.linear(y, qkv, None), widths, -1)
            q, k, v = (torch.unflatten(part, 1, (-1, dim)) for part in parts)
            q = ops.rotate_and_store(q, k, v, pool, layer, rotary, positions, slots, None)
            mixed = ops.attention(q, pool, layer, plan, dim**-0.5, None)
            y, total = ops.add_rms_norm(ops.linear(mixed, o, None), total, ones, 1e-5)
            y = ops.linear(ops.silu_mul(ops.linear(y, gate_up, None)), down, None)
        return y

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    found = []
    for _ in range(REPLAYS):
        out.fill_(float("nan"))
        graph.replay()
        found.append(out.clone())
    assert all(torch.equal(other, found[0]) for other in found)
    return found[0]


@DEPENDS
@pytest.mark.parametrize("tokens", [1, 16, 60])
def test_dependent_launches_change_nothing(tokens: int) -> None:
    """Kernels that begin before others end, in a chain of layers: the same bits, replay after replay."""
    sizes = [(1024 + 2 * 256, 1024), (1024, 1024), (2 * 2048, 1024), (1024, 2048)]
    weights = [[Weight(normal(*size) * size[1] ** -0.5) for size in sizes] for _ in range(4)]
    x, pool = normal(tokens, 1024), normal(3 * tokens, 4, 2, 16, 2, 128)
    outs = []
    for ahead in (None, 0, 4):
        config = LinearConfig(64, 128, 2, 4, 3, ahead=ahead)
        table = {(bucket, inputs, outputs): config for bucket in (16, 64) for outputs, inputs in sizes}
        products = Products(table, torch.cuda.get_device_properties(0).multi_processor_count)
        ops = TritonOps(products=products, dependent=ahead is not None)
        outs.append(layers(ops, x, pool.clone(), weights))
    assert outs[0].isfinite().all()
    assert all(torch.equal(out, outs[0]) for out in outs)
