"""On a CUDA device: operations that count arrivals, captured in graphs, give the same bits in every replay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from manylora_lab.bench import rounding

from manylora.kernels.ops import AttentionLimits, AttentionRows, Scores, Weight
from manylora.kernels.shapes import PageShape
from manylora.kernels.triton.operations import TritonOps
from manylora.kernels.triton.products import LinearConfig, Products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REPLAYS = 50


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


@pytest.mark.parametrize(
    "config",
    [
        LinearConfig(64, 64, 2, 4, 3),
        LinearConfig(64, 64, 2, 4, 3, described=True),
        LinearConfig(64, 64, 2, 4, 3, described=True, rows_described=True),
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
def test_decoding_attention_in_a_graph(heads: int, kv_heads: int, dim: int) -> None:
    """Long and short contexts, so that some are cut into pieces and joined by whoever arrives last."""
    ops, page = TritonOps(), PageShape(2, 16, kv_heads, dim, 2)
    contexts = np.array([1, 4000, 77, 128, 2500], dtype=np.int32)
    counts = -(-contexts // 16)
    pool = normal(int(counts.sum()), 2, 2, 16, kv_heads, dim)
    table, taken = np.zeros((len(contexts), int(counts.max())), dtype=np.int32), 0
    for row, count in enumerate(counts):
        table[row, :count] = np.arange(taken, taken + count)
        taken += count
    rows = AttentionRows(np.arange(len(contexts) + 1, dtype=np.int32), contexts, table)
    fixed = ops.attention_plan(page, pool.device, AttentionLimits(8, 8, 4096))
    q = normal(8, heads, dim)
    fixed.fill(rows)
    expected = ops.attention(q, pool, 1, fixed, Scores(dim**-0.5))
    truth = rounding.attention(q[: len(contexts)], pool, 1, rows, page, Scores(dim**-0.5)).rounded(q.dtype)
    assert truth.excess(expected[: len(contexts)]) <= 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.attention(q, pool, 1, fixed, Scores(dim**-0.5))
    for _ in range(REPLAYS):
        out.fill_(float("nan"))
        fixed.fill(rows)
        graph.replay()
        assert torch.equal(out, expected)
