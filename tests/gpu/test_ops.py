"""On a CUDA device: operations that count arrivals, captured in graphs, give the same bits in every replay."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from manylora.kernels.ops import AttentionRows
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


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("tokens", [1, 17, 64, 128])
def test_products_in_a_graph(tokens: int, described: bool) -> None:
    """Several products one after the other share their counters; two runs of shared tiles may not differ."""
    config = LinearConfig(64, 64, 2, 4, 3, described=described)
    products = Products({}, torch.cuda.get_device_properties(0).multi_processor_count)
    x, weights = normal(tokens, 4096), [normal(n, 4096) * 0.02 for n in (4096, 1000, 6144)]
    expected = [products.run(x, weight, None, config) for weight in weights]
    for out, weight in zip(expected, weights):
        truth = torch.nn.functional.linear(x.float(), weight.float())
        library = torch.nn.functional.linear(x, weight)
        error, least = (float((y.float() - truth).norm() / truth.norm()) for y in (out, library))
        assert error <= 1.1 * least + 1e-6
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [products.run(x, weight, None, config) for weight in weights]
    for _ in range(REPLAYS):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outs, expected))


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
    fixed = ops.fixed_attention(8, 4096, page, pool.device)
    q = normal(8, heads, dim)
    fixed.fill(rows)
    expected = ops.attention(q, pool, 1, fixed.plan, dim**-0.5, None)
    for row, (context, count) in enumerate(zip(contexts, counts)):
        pages = torch.from_numpy(table[row, :count]).cuda().long()
        kv = pool[pages, 1].float().movedim(1, 0).flatten(1, 2)[:, :context]
        k, v = kv.repeat_interleave(heads // kv_heads, dim=2)
        weights = (torch.einsum("hd,khd->hk", q[row].float(), k) * dim**-0.5).softmax(-1)
        truth = torch.einsum("hk,khd->hd", weights, v).flatten()
        assert float((expected[row].float() - truth).norm() / truth.norm()) < 1e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.attention(q, pool, 1, fixed.plan, dim**-0.5, None)
    for _ in range(REPLAYS):
        out.fill_(float("nan"))
        fixed.fill(rows)
        graph.replay()
        assert torch.equal(out, expected)
