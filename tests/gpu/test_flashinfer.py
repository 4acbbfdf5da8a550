"""On a CUDA device with FlashInfer: prompts are as exact by it as by our kernel, and nothing else is disturbed."""

from __future__ import annotations

import functools
import importlib.util
import logging

import pytest
import torch

from manylora.kernels.flashinfer_attention import AttentionShape, PromptAttention
from manylora.kernels.triton.operations import TritonOps
from tests.kernels.cases import AttentionCase, attention_case, attention_truth

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed"),
]
HEADS = [(2, 1), (2, 4), (1, 7)]
"""Key heads, and query heads to each."""


@functools.cache
def prompts(kv_heads: int, group: int, dim: int) -> PromptAttention:
    found = PromptAttention(
        AttentionShape(kv_heads * group, kv_heads, dim, torch.bfloat16), torch.device("cuda"), "fa3"
    )
    found.try_out()
    return found


def case_of(
    kv_heads: int, group: int, dim: int, lengths: list[tuple[int, int]], seed: int = 0, page_tokens: int = 16
) -> AttentionCase:
    """All that may not be read is NaN."""
    case = attention_case(
        seed,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        kv_heads=kv_heads,
        heads_per_kv=group,
        dim=dim,
        page_tokens=page_tokens,
        lengths=lengths,
    )
    case.scale = dim**-0.5
    return case


def run(ops: TritonOps, case: AttentionCase, window: int | None = None) -> torch.Tensor:
    plan = ops.plan_attention(case.rows, case.page, case.q.device)
    return ops.attention(case.q, case.pool, case.layer, plan, case.scores)


MIXED = [(1, 40), (300, 300), (1, 900), (1, 3), (257, 1000), (5, 700), (1, 64), (128, 128), (1, 1)]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("kv_heads", "group"), HEADS)
@pytest.mark.parametrize("page_tokens", [16, 1])
def test_error(kv_heads: int, group: int, dim: int, page_tokens: int) -> None:
    """Every element within rounding, as our kernel's; decoding rows between are not disturbed."""
    case = case_of(kv_heads, group, dim, MIXED, page_tokens=page_tokens)
    ops = TritonOps(prompts=prompts(kv_heads, group, dim))
    assert ops.plan_attention(case.rows, case.page, case.q.device).prompts is not None
    theirs, ours = run(ops, case), run(TritonOps(), case)
    truth = attention_truth(case)
    assert truth.excess(theirs) <= 1
    assert truth.excess(ours) <= 1
    for row, (queries, _) in enumerate(MIXED):
        if queries == 1:
            first, last = (int(n) for n in case.rows.query_start[row : row + 2])
            assert torch.equal(theirs[first:last], ours[first:last])


def test_strided_queries() -> None:
    """q as models give it, a part of one wide tensor."""
    case = case_of(2, 4, 128, MIXED)
    ops = TritonOps(prompts=prompts(2, 4, 128))
    expected = run(ops, case)
    wide = torch.full((len(case.q), 12, 128), float("nan"), dtype=case.q.dtype, device="cuda")
    wide[:, :8] = case.q
    case.q = wide[:, :8]
    assert torch.equal(run(ops, case), expected)


def test_steps_in_flight_keep_their_plans() -> None:
    """Many steps are issued before the device has done the first; twice the same step gives the same bits."""
    ops = TritonOps(prompts=prompts(2, 4, 128))
    cases = [
        case_of(2, 4, 128, [(200 + 60 * n, 900 - 40 * n), (1, 50), (300, 300)], seed=n) for n in range(7)
    ]
    expected = []
    for case in cases:
        expected.append(run(ops, case))
        torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
    found = [run(ops, case) for case in cases]
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_what_stays_ours() -> None:
    """Short prompts, and layers with a window, are computed exactly as without FlashInfer."""
    ops = TritonOps(prompts=prompts(2, 4, 128))
    short = case_of(2, 4, 128, [(30, 30), (2, 800), (90, 95)])
    assert ops.plan_attention(short.rows, short.page, short.q.device).prompts is None
    assert torch.equal(run(ops, short), run(TritonOps(), short))
    windowed = case_of(2, 4, 128, MIXED)
    assert torch.equal(run(ops, windowed, 100), run(TritonOps(), windowed, 100))


def test_a_large_pool() -> None:
    """Offsets past 2^32 elements."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of memory")
    case = case_of(2, 4, 128, [(200, 700), (300, 400)])
    pages, *sizes = case.pool.shape
    wide = torch.empty(
        (1 + 9 * 2**30 // (2 * case.pool[0].numel()), *sizes), dtype=case.q.dtype, device="cuda"
    )
    shift = len(wide) - pages
    wide[shift:] = case.pool
    truth = attention_truth(case)
    case.pool = wide
    case.rows.page_table[:] += shift
    out = run(TritonOps(prompts=prompts(2, 4, 128)), case)
    assert truth.excess(out) <= 1


def test_a_failing_plan_is_ours(caplog: pytest.LogCaptureFixture) -> None:
    """A step that FlashInfer refuses, here for heads that do not divide, runs all the same; one line says so."""
    shape = AttentionShape(7, 2, 128, torch.bfloat16)
    backend = "fa3" if torch.cuda.get_device_capability()[0] == 9 else "fa2"
    broken = PromptAttention(shape, torch.device("cuda"), backend)
    case = case_of(2, 4, 128, MIXED)
    with caplog.at_level(logging.WARNING):
        outs = [run(TritonOps(prompts=broken), case) for _ in range(2)]
    assert len(caplog.records) == 1
    assert torch.equal(outs[0], run(TritonOps(), case))
