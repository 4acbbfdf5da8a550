"""Head norms, rope and the storing of K and V in one operation, against the three in a row."""

from __future__ import annotations

import pytest
import torch
from manylora_lab.bench import rounding
from manylora_lab.bench.rounding import Bounded

from manylora.kernels.ops import HeadNorm, Rotary
from tests.kernels.implementations import SUBJECTS, Subject

TOKENS, PAGES, LAYERS, PAGE_TOKENS = 5, 4, 3, 4


def make(
    subject: Subject, heads: int, kv_heads: int, dim: int, normed: bool
) -> tuple[torch.Tensor, torch.Tensor, Rotary, torch.Tensor, torch.Tensor, HeadNorm | None]:
    generator = torch.Generator().manual_seed(heads)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(subject.dtype).to(subject.device)

    qkv = normal(TOKENS, (heads + 2 * kv_heads) * dim)
    pool = normal(PAGES, LAYERS, 2, PAGE_TOKENS, kv_heads, dim)
    angles = torch.outer(torch.arange(12.0), 0.5 ** torch.arange(dim / 2.0)).to(subject.device)
    positions = torch.tensor([3, 0, 11, 7, 7], device=subject.device)
    slots = torch.randperm(PAGES * PAGE_TOKENS, generator=generator)[:TOKENS].to(subject.device)
    norm = HeadNorm(normal(dim), normal(dim), 1e-5) if normed else None
    return qkv, pool, Rotary(angles.cos(), angles.sin()), positions, slots, norm


def parts(
    qkv: torch.Tensor, heads: int, kv_heads: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the fused product, as the model has them: rows are not contiguous."""
    q, k, v = torch.split(qkv, [heads * dim, kv_heads * dim, kv_heads * dim], -1)
    return q.view(-1, heads, dim), k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim)


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (5, 1, 12), (2, 2, 64), (12, 3, 8)])
@pytest.mark.parametrize("normed", [False, True])
def test_equals_norm_then_rope_then_write(
    subject: Subject, heads: int, kv_heads: int, dim: int, normed: bool
) -> None:
    qkv, pool, rotary, positions, slots, norm = make(subject, heads, kv_heads, dim, normed)
    q, k, v = (Bounded.given(part) for part in parts(qkv, heads, kv_heads, dim))
    turned, after = rounding.rotate_and_store((q, k, v), pool, 1, rotary, positions, slots, norm)
    stored = pool.clone()
    out = subject.ops().rotate_and_store(
        *parts(qkv, heads, kv_heads, dim), stored, 1, rotary, positions, slots, norm
    )
    assert turned.excess(out) <= 1
    assert after.excess(stored) <= 1
    untouched = torch.ones(PAGES * PAGE_TOKENS, dtype=torch.bool, device=subject.device)
    untouched[slots] = False
    for layer in range(LAYERS):
        chosen = untouched if layer == 1 else torch.ones_like(untouched)
        before, now = (
            p[:, layer].movedim(1, 0).flatten(1, 2)[:, chosen]  # [2, slots, kv_heads, dim]
            for p in (pool, stored)
        )
        assert torch.equal(before, now), "only the tokens' slots of the layer are written"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_head_norms_in_float32_are_applied_before_rounding(subject: Subject) -> None:
    """Gemma's: as the norm of the heads, then the rest."""
    qkv, pool, rotary, positions, slots, norm = make(subject, 4, 2, 32, True)
    assert norm is not None
    norm = HeadNorm(norm.query.float() + 1.0, norm.key.float() + 1.0, norm.eps)
    ops, (q, k, v) = subject.ops(), parts(qkv, 4, 2, 32)
    expected, stored = pool.clone(), pool.clone()
    normal = (ops.rms_norm(q, norm.query, norm.eps), ops.rms_norm(k, norm.key, norm.eps))
    turned = ops.rotate_and_store(*normal, v, expected, 1, rotary, positions, slots, None)
    out = ops.rotate_and_store(q.clone(), k.clone(), v, stored, 1, rotary, positions, slots, norm)
    tolerance = 1e-2 if out.itemsize == 2 else 1e-5
    torch.testing.assert_close(out, turned, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(stored, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("normed", [False, True])
def test_what_adapters_give_is_added_first(subject: Subject, normed: bool) -> None:
    """Rounded as if it had been in the product; q, k and v each get their own columns."""
    heads, kv_heads, dim = 5, 2, 12
    qkv, pool, rotary, positions, slots, norm = make(subject, heads, kv_heads, dim, normed)
    ops, adapted = subject.ops(), qkv.flip(0, 1)
    q, k, v = (Bounded.given(part) for part in parts(qkv + adapted, heads, kv_heads, dim))
    turned, after = rounding.rotate_and_store((q, k, v), pool, 1, rotary, positions, slots, norm)
    stored, given = pool.clone(), adapted.clone()
    out = ops.rotate_and_store(
        *parts(qkv.clone(), heads, kv_heads, dim), stored, 1, rotary, positions, slots, norm, adapted
    )
    assert turned.excess(out) <= 1
    assert after.excess(stored) <= 1
    assert torch.equal(adapted, given)


@pytest.mark.parametrize("subject", [s for s in SUBJECTS if str(s.id).startswith(("interpreted", "gpu"))])
def test_padding_is_not_stored(subject: Subject) -> None:
    qkv, pool, rotary, positions, slots, _ = make(subject, 4, 2, 32, False)
    slots = torch.tensor([2, -1, 7, -1, -1], device=subject.device)
    q, k, v = parts(qkv, 4, 2, 32)
    for fused in (True, False):
        stored, ops = pool.clone(), subject.ops()
        if fused:
            ops.rotate_and_store(q, k, v, stored, 0, rotary, positions, slots, None)
        else:
            ops.write_kv(stored, 0, k, v, slots)
        changed = (stored != pool).flatten(4).any(-1)  # [pages, layers, 2, page_tokens]
        where = {(p * PAGE_TOKENS + t, layer) for p, layer, _, t in changed.nonzero().tolist()}
        assert where == {(2, 0), (7, 0)}
