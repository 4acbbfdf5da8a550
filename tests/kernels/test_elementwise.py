"""Norms and the gated activation of every implementation against the reference."""

from __future__ import annotations

import pytest
import torch
from manylora_lab.bench import rounding
from manylora_lab.bench.rounding import Bounded

from manylora.kernels.ops import ACTIVATIONS, Summands
from manylora.kernels.shapes import Activation
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
    out, new = ops.add_rms_norm(Summands(x.clone()), residual.clone(), weight, 1e-5)
    assert rounding.added(x, residual).excess(new) <= 1
    assert normed(new).excess(out) <= 1, "of the sum as it is stored"
    adapted = normal(subject, *shape, seed=3)
    out, new = ops.add_rms_norm(Summands(x.clone(), adapted), residual.clone(), weight, 1e-5)
    assert rounding.added(x, adapted, residual).excess(new) <= 1
    assert normed(new).excess(out) <= 1


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_weight_in_float32_is_applied_before_rounding(subject: Subject) -> None:
    """Gemma's norms. 16-bit results differ in one value of many where the normal values are rounded first."""
    ops, dtype = subject.ops(), subject.dtype
    x, residual = normal(subject, 40, 96), normal(subject, 40, 96, seed=1)
    weight = normal(subject, 96, seed=2).float() + 1.0
    total = x + residual
    exact = torch.nn.functional.rms_norm(total.double(), (96,), weight.double(), 1e-6).to(dtype)
    out, _ = ops.add_rms_norm(Summands(x.clone()), residual.clone(), weight, 1e-6)
    for found in (out, ops.rms_norm(total, weight, 1e-6)):
        assert found.dtype == dtype
        if dtype == torch.float32:
            torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
        else:
            assert (found != exact).float().mean() < 0.01


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh"])
def test_other_activations_of_a_gate(subject: Subject, activation: Activation) -> None:
    gate_up = 3 * normal(subject, 5, 88)
    gate, up = gate_up.double().chunk(2, -1)
    truth = (ACTIVATIONS[activation](gate) * up).to(subject.dtype)
    out = subject.ops().gate_mul(gate_up, activation)
    eps = torch.finfo(subject.dtype).eps
    torch.testing.assert_close(out, truth, rtol=4 * eps, atol=1e-5)


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("shape", [(1, 2), (5, 44), (3, 3000)])
def test_silu_mul(subject: Subject, shape: tuple[int, int]) -> None:
    gate_up = normal(subject, *shape)
    truth = rounding.silu_mul(Bounded.given(gate_up), subject.dtype).rounded(subject.dtype)
    assert truth.excess(subject.ops().gate_mul(gate_up)) <= 1
