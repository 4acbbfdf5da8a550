"""Norms and the gated activation of every implementation against the reference."""

from __future__ import annotations

import pytest
import torch
from manylora_lab.bench import rounding
from manylora_lab.bench.rounding import Bounded

from tests.kernels.implementations import SUBJECTS, Subject


def normal(subject: Subject, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(subject.dtype).to(subject.device)


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("shape", [(1, 7), (5, 96), (3, 4, 32), (2, 3000)])
def test_rms_norm(subject: Subject, shape: tuple[int, ...]) -> None:
    ops, dtype = subject.ops(), subject.dtype
    x, residual, weight = (
        normal(subject, *shape),
        normal(subject, *shape, seed=1),
        normal(subject, shape[-1], seed=2),
    )

    def normed(x: torch.Tensor) -> Bounded:
        return rounding.rms_norm(Bounded.given(x), weight, 1e-5, dtype).rounded(dtype)

    truth = normed(x)
    assert truth.excess(ops.rms_norm(x.clone(), weight, 1e-5)) <= 1
    # The middle heads of a fused projection: not contiguous.
    wide = torch.cat((residual, x, residual), -1)
    view = wide[..., shape[-1] : 2 * shape[-1]]
    assert truth.excess(ops.rms_norm(view, weight, 1e-5)) <= 1
    out, new = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert rounding.added(x, residual).excess(new) <= 1
    assert normed(new).excess(out) <= 1, "of the sum as it is stored"
    adapted = normal(subject, *shape, seed=3)
    out, new = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5, adapted)
    assert rounding.added(x, adapted, residual).excess(new) <= 1
    assert normed(new).excess(out) <= 1


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("shape", [(1, 2), (5, 44), (3, 3000)])
def test_silu_mul(subject: Subject, shape: tuple[int, int]) -> None:
    gate_up = normal(subject, *shape)
    truth = rounding.silu_mul(Bounded.given(gate_up), subject.dtype).rounded(subject.dtype)
    assert truth.excess(subject.ops().silu_mul(gate_up)) <= 1
