"""A weight rewritten in place: its version, what is refused, and that no implementation keeps a copy of it."""

from __future__ import annotations

import pytest
import torch
from manylora_lab.bench import rounding

from manylora.kernels.ops import AdaptedLinear, LoraStep, Weight
from manylora.kernels.triton.products import LinearConfig, Products
from tests.kernels.cases import adapted_truth
from tests.kernels.implementations import SUBJECTS, Subject
from tests.kernels.test_lora_kernels import case_of

TRITON = [subject for subject in SUBJECTS if str(subject.id).startswith(("interpreted", "gpu"))]


def normal(subject: Subject, *shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values: torch.Tensor = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
    return values.to(subject.dtype).to(subject.device)


def test_a_rewrite_changes_the_numbers_and_the_version_and_nothing_else() -> None:
    weight = Weight(torch.zeros(3, 2))
    data = weight.data
    weight.rewrite(torch.ones(3, 2))
    assert weight.data is data
    assert data.tolist() == [[1, 1]] * 3
    assert weight.version == 1
    assert weight.plain() is data
    weight.rewrite(torch.ones(3, 2))
    assert weight.version == 2


@pytest.mark.parametrize(
    "other", [torch.ones(2, 3), torch.ones(2), torch.ones(1, 2), torch.ones(3, 2, dtype=torch.float16)]
)
def test_what_does_not_fit_is_refused(other: torch.Tensor) -> None:
    weight = Weight(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"a weight of shape \[3, 2\] and torch.float32 cannot hold"):
        weight.rewrite(other)
    assert weight.version == 0
    assert not weight.data.any()


@pytest.mark.parametrize("subject", SUBJECTS)
def test_operations_read_what_was_rewritten(subject: Subject) -> None:
    """One plan and one weight, before and after: whatever an implementation remembers of a weight would show."""
    if subject.small and subject.dtype != torch.float32:
        pytest.skip("the interpreter is slow")
    ops, case = subject.ops(), case_of(subject, [(1, 1), (0, 3)], [4])
    plan = ops.plan_lora(case.segments, case.geometry, subject.device)
    for group in case.geometry.groups[2:]:
        x = normal(subject, case.num_tokens, group.in_features, seed=1)
        matrices = [normal(subject, group.offsets[-1], group.in_features, seed=seed) for seed in (2, 3)]
        weight = Weight(matrices[0].clone())
        given = (x, AdaptedLinear(group, case.layer, weight, None), LoraStep(case.pool, plan))
        for matrix in matrices:
            weight.rewrite(matrix)
            plain = rounding.linear(x, matrix, None).rounded(subject.dtype)
            assert plain.excess(ops.linear(x, weight, None)) <= 1
            truth = adapted_truth(case, x, matrix, None, group)
            assert truth.excess(ops.lora_summands(*given).whole) <= 1
            if group.name == "gate_up":
                gated = rounding.silu_mul(truth, subject.dtype).rounded(subject.dtype)
                assert gated.excess(ops.lora_gated(*given)) <= 1


@pytest.mark.parametrize("subject", TRITON)
@pytest.mark.parametrize("described", [False, True])
def test_our_products_read_what_was_rewritten(subject: Subject, described: bool) -> None:
    products, config = Products({}, 3), LinearConfig(32, 32, 1, 4, 2, described=described)
    x = normal(subject, 5, 64, seed=1)
    matrices = [normal(subject, 96, 64, seed=seed) for seed in (2, 3)]
    weight = Weight(matrices[0].clone())
    for matrix in matrices:
        weight.rewrite(matrix)
        truth = rounding.linear(x, matrix, None).rounded(subject.dtype)
        assert truth.excess(products.run(x, weight, None, config)) <= 1
