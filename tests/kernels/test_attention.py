"""Every implementation's attention against the reference, on paged memory full of NaN."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from manylora_lab.bench.reference import ReferenceOps

from manylora.kernels import cpu
from tests.kernels.cases import AttentionCase, attention_case, attention_truth
from tests.kernels.implementations import FLOAT64, SUBJECTS, Subject

REFERENCE = ReferenceOps()


def check(subject: Subject, case: AttentionCase) -> None:
    ops = subject.ops()
    plan = ops.plan_attention(case.rows, case.page, subject.device)
    truth = attention_truth(case)
    before = case.pool.clone()
    subject.poison()
    # Plans and scratch are used again by the next layer; the same input must give the same bits.
    first, out = (
        ops.attention(case.q.clone(), case.pool, case.layer, plan, case.scores)
        for _ in range(2)
    )
    assert torch.equal(first, out)
    assert out.dtype == subject.dtype
    assert truth.excess(out) <= 1
    assert torch.equal(before.nan_to_num(), case.pool.nan_to_num())


@pytest.mark.parametrize("subject", [*SUBJECTS, FLOAT64])
@pytest.mark.parametrize(
    ("kv_heads", "heads_per_kv", "dim", "page_tokens", "window"),
    [
        (2, 4, 32, 4, None),
        (1, 1, 12, 1, None),
        (3, 3, 64, 16, None),
        (1, 8, 12, 16, 5),
        (2, 2, 32, 1, 9),
        (2, 5, 16, 3, None),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_random_batches(
    subject: Subject,
    kv_heads: int,
    heads_per_kv: int,
    dim: int,
    page_tokens: int,
    window: int | None,
    seed: int,
) -> None:
    if subject.small and seed:
        pytest.skip("one seed is enough for the interpreter")
    case = attention_case(
        seed * 101 + kv_heads,
        device=subject.device,
        dtype=subject.dtype,
        kv_heads=kv_heads,
        heads_per_kv=heads_per_kv,
        dim=dim,
        page_tokens=page_tokens,
        window=window,
    )
    check(subject, case)


@pytest.mark.parametrize("subject", [*SUBJECTS, FLOAT64])
@pytest.mark.parametrize("window", [None, 50])
def test_long_prompts_beside_long_contexts(subject: Subject, window: int | None) -> None:
    """Lengths past every tile and split: several query tiles, several context splits, very short rows."""
    lengths = [(1, 1), (150, 150), (1, 700), (140, 333), (1, 40), (1, 64), (2, 65), (3, 3)]
    if subject.small:
        lengths = [(1, 1), (35, 35), (1, 300), (20, 170), (2, 65)]
    case = attention_case(
        5,
        device=subject.device,
        dtype=subject.dtype,
        kv_heads=1,
        heads_per_kv=2,
        lengths=lengths,
        window=window,
        page_tokens=16,
    )
    check(subject, case)


@pytest.mark.parametrize("subject", [*SUBJECTS, FLOAT64])
@pytest.mark.parametrize("window", [None, 30])
def test_capped_scores(subject: Subject, window: int | None) -> None:
    """One query, several, and a context that is cut into pieces; the cap bends most scores."""
    lengths = [(1, 1), (1, 300), (35, 35), (20, 170)]
    case = attention_case(
        8, device=subject.device, dtype=subject.dtype, lengths=lengths, window=window, page_tokens=16
    )
    check(subject, dataclasses.replace(case, scale=3 * case.scale, soft_cap=1.5))


@pytest.mark.parametrize("subject", [*SUBJECTS, FLOAT64])
@pytest.mark.parametrize("limit", [2**13, 2**20])
def test_a_full_decode_batch(subject: Subject, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the long contexts by torch, and all in a loop."""
    if subject.kind != "cpu" and limit != 2**20:
        pytest.skip("this limit is the CPU's")
    monkeypatch.setattr(cpu, "SHORT_CONTEXT", limit)
    lengths = [(1, 1 + (37 * i) % (60 if subject.small else 400)) for i in range(9 if subject.small else 64)]
    check(subject, attention_case(6, device=subject.device, dtype=subject.dtype, lengths=lengths))


@pytest.mark.parametrize("subject", [*SUBJECTS, FLOAT64])
@pytest.mark.parametrize("page_tokens", [1, 4])
def test_write_kv(subject: Subject, page_tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (7, 3, 2, page_tokens, 3, 12)
    pool = torch.randn(shape, generator=generator).to(subject.dtype).to(subject.device)
    fused = torch.randn(5, 3 * 36, generator=generator).to(subject.dtype).to(subject.device)
    k, v = (fused[:, i * 36 : i * 36 + 36].view(5, 3, 12) for i in (1, 2))  # rows are not contiguous
    slots = torch.randperm(7 * page_tokens, generator=generator)[:5].to(subject.device)
    expected = pool.clone()
    REFERENCE.write_kv(expected, 1, k, v, slots)
    subject.ops().write_kv(pool, 1, k, v, slots)
    assert torch.equal(pool, expected)
