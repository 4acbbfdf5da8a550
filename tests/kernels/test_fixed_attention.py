"""A captured step's attention: one plan, filled again and again, against the reference."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from manylora.kernels.ops import AttentionLimits, AttentionRows, Scores
from manylora.kernels.shapes import PageShape
from manylora.kernels.triton.attention_plan import TritonAttentionPlan
from manylora.kernels.triton.decode_table import DecodeTable
from tests.kernels.cases import AttentionCase, attention_case, attention_truth
from tests.kernels.implementations import SLOW, SUBJECTS, Subject

if TYPE_CHECKING:
    from manylora.kernels.triton.operations import TritonOps

CPU = torch.device("cpu")
TRITON = [subject for subject in SUBJECTS if str(subject.id).startswith(("interpreted", "gpu"))]


def ops_of(subject: Subject) -> TritonOps:
    """Operations with plans that are filled again."""
    from manylora.kernels.triton.operations import TritonOps

    ops = subject.ops()
    assert isinstance(ops, TritonOps)
    return ops


def decoding(subject: Subject, seed: int, contexts: list[int], window: int | None = None) -> AttentionCase:
    lengths = [(1, context) for context in contexts]
    return attention_case(
        seed, device=subject.device, dtype=subject.dtype, lengths=lengths, window=window, page_tokens=16
    )


def check(case: AttentionCase, out: torch.Tensor) -> None:
    assert attention_truth(case).excess(out[: len(case.q)]) <= 1


def padded(q: torch.Tensor, count: int) -> torch.Tensor:
    """With tokens of NaN up to ``count``."""
    return torch.cat([q, q.new_full((count - len(q), *q.shape[1:]), float("nan"))])


@pytest.mark.parametrize("subject", TRITON)
@pytest.mark.parametrize("window", [None, 70])
def test_one_plan_serves_any_rows_within_its_bucket(subject: Subject, window: int | None) -> None:
    """More rows and longer contexts than at first, then fewer: nothing of an earlier step is left."""
    if subject.small and subject.dtype != torch.float32 and window:
        pytest.skip(SLOW)
    ops = ops_of(subject)
    fixed = None
    for seed, contexts in enumerate(([7, 64], [1, 300, 65, 128, 500], [250], [600, 3, 3, 3, 3])):
        case = decoding(subject, seed, contexts, window)
        if fixed is None:
            fixed = ops.attention_plan(case.page, subject.device, AttentionLimits(5, 5, 600))
        fixed.fill(case.rows)
        subject.poison()
        q = padded(case.q, 5)
        out, again = (
            ops.attention(q.clone(), case.pool, case.layer, fixed, case.scores) for _ in range(2)
        )
        assert torch.equal(out, again)
        check(case, out)
        assert not out[len(contexts) :].any(), "padding gets zeros"


@pytest.mark.parametrize("subject", TRITON)
def test_one_plan_serves_prompts_beside_decoding_rows(subject: Subject) -> None:
    ops = ops_of(subject)
    fixed = None
    for seed, lengths in enumerate(([(1, 30), (20, 20)], [(17, 80), (1, 200), (9, 9)], [(1, 1)])):
        case = attention_case(
            seed, device=subject.device, dtype=subject.dtype, lengths=lengths, page_tokens=16
        )
        if fixed is None:
            fixed = ops.attention_plan(case.page, subject.device, AttentionLimits(32, 3, 200))
        fixed.fill(case.rows)
        subject.poison()
        out = ops.attention(padded(case.q, 32), case.pool, case.layer, fixed, case.scores)
        check(case, out)
        assert not out[len(case.q) :].any()


@pytest.mark.parametrize("subject", TRITON)
@pytest.mark.parametrize("window", [None, 820])
def test_prompts_after_long_histories_are_cut_and_joined(subject: Subject, window: int | None) -> None:
    """Beside short ones that are not, and again with the same bits: whichever piece arrives last."""
    if subject.small and subject.dtype != torch.float32 and window:
        pytest.skip(SLOW)
    ops, fixed = ops_of(subject), None
    for seed, lengths in enumerate(([(3, 1000), (1, 30), (2, 2)], [(2, 2), (1, 900)], [(5, 840), (4, 1000)])):
        case = attention_case(
            seed,
            device=subject.device,
            dtype=subject.dtype,
            lengths=lengths,
            window=window,
            page_tokens=16,
            kv_heads=1,
            heads_per_kv=2,
            dim=16,
        )
        if fixed is None:
            fixed = ops.attention_plan(case.page, subject.device, AttentionLimits(12, 3, 1000))
        fixed.fill(case.rows)
        subject.poison()
        q = padded(case.q, 12)
        out, again = (
            ops.attention(q.clone(), case.pool, case.layer, fixed, case.scores) for _ in range(2)
        )
        assert torch.equal(out, again)
        check(case, out)
        assert not out[len(case.q) :].any()


def test_a_captured_step_holds_as_many_prompts_as_tokens_allow() -> None:
    """Also where every prompt's last tile is nearly empty."""
    page = PageShape(1, 16, 1, 16, 4)
    for lengths in ([2] * 128, [65] * 3, [256], [1] * 100 + [2, 153], [67, 189]):
        starts = np.cumsum([0, *lengths]).astype(np.int32)
        contexts = np.array(lengths, dtype=np.int32) + 800
        rows = AttentionRows(starts, contexts, np.zeros((len(lengths), 70), np.int32))
        for group in (1, 4):
            fixed = TritonAttentionPlan(
                page, CPU, 528, DecodeTable(group=group), limits=AttentionLimits(256, 128, 1100)
            )
            fixed.fill(rows)
            tokens = fixed.records[:, 2][fixed.records[:, 4] == 0]
            assert tokens.sum() == 256, "each token in the first piece of one tile"
            used = fixed.records[fixed.records[:, 5] > 1].long()
            assert not len(used) or (used[:, 6] + used[:, 2] * used[:, 5]).max() <= fixed.places
            assert not len(used) or used[:, 7].max() < fixed.counters


@pytest.mark.parametrize("contexts", [[1, 1, 1], [65]], ids=["too many rows", "too long a context"])
def test_what_does_not_fit_is_refused(contexts: list[int]) -> None:
    subject = TRITON[0].values[0]
    assert isinstance(subject, Subject)
    case = decoding(subject, 0, contexts)
    fixed = ops_of(subject).attention_plan(case.page, subject.device, AttentionLimits(2, 2, 64))
    with pytest.raises(ValueError, match="larger than what was captured"):
        fixed.fill(case.rows)


def test_prompts_do_not_fit_a_decoding_plan() -> None:
    subject = TRITON[0].values[0]
    assert isinstance(subject, Subject)
    case = attention_case(0, device=subject.device, dtype=subject.dtype, lengths=[(2, 2)])
    fixed = ops_of(subject).attention_plan(case.page, subject.device, AttentionLimits(2, 2, 64))
    with pytest.raises(ValueError, match="larger than what was captured"):
        fixed.fill(case.rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_graph_replays_with_other_rows() -> None:
    subject = Subject("gpu", torch.bfloat16)
    ops, module = ops_of(subject), torch.get_device_module("cuda")
    first = decoding(subject, 0, [40, 3])
    fixed = ops.attention_plan(first.page, subject.device, AttentionLimits(6, 6, 700))
    shape = (64, *first.pool.shape[1:])
    pool = torch.zeros(shape, dtype=subject.dtype, device=subject.device)
    q = torch.zeros((6, *first.q.shape[1:]), dtype=subject.dtype, device=subject.device)

    def step() -> torch.Tensor:
        return ops.attention(q, pool, 1, fixed, first.scores)

    step()
    graph = module.CUDAGraph()
    with module.graph(graph):
        out = step()
    for seed, contexts in enumerate(([40, 3], [1, 2, 3, 4, 5, 6], [690, 1], [128] * 6)):
        case = decoding(subject, seed, contexts)
        pool.zero_()
        pool[: len(case.pool), 1] = case.pool[:, case.layer].nan_to_num()
        q.zero_()
        q[: len(contexts)] = case.q
        fixed.fill(case.rows)
        graph.replay()
        truth = attention_truth(dataclasses.replace(case, pool=pool, layer=1))
        assert truth.excess(out[: len(contexts)]) <= 1
        eager = ops.plan_attention(case.rows, case.page, q.device)
        again = ops.attention(case.q, pool, 1, eager, case.scores)
        assert truth.excess(again) <= 1
        assert not np.isnan(out.float().cpu().numpy()).any()


def test_rows_of_an_empty_batch() -> None:
    subject = TRITON[0].values[0]
    assert isinstance(subject, Subject)
    page = decoding(subject, 0, [4]).page
    rows = AttentionRows(np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros((0, 1), np.int32))
    plan = subject.ops().plan_attention(rows, page, subject.device)
    pool = torch.zeros(1, page.layers, 2, page.page_tokens, page.kv_heads, page.head_dim)
    q = torch.zeros(0, page.kv_heads, page.head_dim)
    assert subject.ops().attention(q, pool, 0, plan, Scores(1.0)).shape == (0, page.kv_heads * page.head_dim)
