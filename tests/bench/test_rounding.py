"""Bounds by rounding: a correct kernel stays within them; a wrong row, a wrong element, a lost term does not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_lab.bench import rounding
from manylora_lab.bench.rounding import Bounded

from manylora.kernels.cpu import CpuOps
from manylora.kernels.ops import AdaptedLinear, LoraStep, Rotary, Summands, Weight
from manylora.kernels.shapes import ProjectionGroup
from tests.kernels.cases import LoraCase, adapted_truth, attention_case, attention_truth, lora_case
from tests.kernels.test_lora import geometry_of

CPU = torch.device("cpu")
OPS = CpuOps()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOKENS = 9


@dataclasses.dataclass
class Made:
    """A kernel's result, rows first, and what it may be."""

    out: torch.Tensor
    truth: Bounded


def normal(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(dtype: torch.dtype) -> Made:
    x, weight = normal(dtype, TOKENS, 300), normal(dtype, 70, 300, seed=1)
    return Made(OPS.linear(x, Weight(weight), None), rounding.linear(x, weight, None).rounded(dtype))


def norm(dtype: torch.dtype) -> Made:
    x, weight = normal(dtype, TOKENS, 96), normal(dtype, 96, seed=1)
    return Made(
        OPS.rms_norm(x, weight, 1e-5), rounding.rms_norm(Bounded.given(x), weight, 1e-5, dtype).rounded(dtype)
    )


def residual(dtype: torch.dtype) -> Made:
    x, old = normal(dtype, TOKENS, 96), normal(dtype, TOKENS, 96, seed=1)
    _, total = OPS.add_rms_norm(Summands(x), old.clone(), normal(dtype, 96, seed=2), 1e-5)
    return Made(total, rounding.added(x, old))


def silu(dtype: torch.dtype) -> Made:
    gate_up = normal(dtype, TOKENS, 120)
    return Made(
        OPS.gate_mul(gate_up.clone()), rounding.silu_mul(Bounded.given(gate_up), dtype).rounded(dtype)
    )


def _placed(dtype: torch.dtype) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[Bounded, Bounded]]:
    angles = torch.outer(torch.arange(20.0), 0.5 ** torch.arange(16.0))
    rotary, positions, slots = (
        Rotary(angles.cos(), angles.sin()),
        torch.arange(TOKENS) + 2,
        torch.arange(TOKENS),
    )
    q, k, v = (normal(dtype, TOKENS, 2, 32, seed=seed) for seed in range(3))
    pool = normal(dtype, 4, 2, 2, 4, 2, 32, seed=3)
    of_each = (Bounded.given(q), Bounded.given(k), Bounded.given(v))
    truth = rounding.rotate_and_store(of_each, pool, 1, rotary, positions, slots, None)
    return (OPS.rotate_and_store(q, k, v, pool, 1, rotary, positions, slots, None), pool), truth


def turned(dtype: torch.dtype) -> Made:
    out, truth = _placed(dtype)
    return Made(out[0], truth[0])


def stored(dtype: torch.dtype) -> Made:
    """Pages first."""
    out, truth = _placed(dtype)
    return Made(out[1], truth[1])


def attention(dtype: torch.dtype, queries: int) -> Made:
    lengths = [(queries, 40 + 30 * i) for i in range(TOKENS // queries)]
    case = attention_case(3, device=CPU, dtype=dtype, dim=64, lengths=lengths)
    plan = OPS.plan_attention(case.rows, case.page, CPU)
    out = OPS.attention(case.q, case.pool, case.layer, plan, case.scores)
    return Made(out, attention_truth(case))


def decode(dtype: torch.dtype) -> Made:
    return attention(dtype, 1)


def prefill(dtype: torch.dtype) -> Made:
    return attention(dtype, 3)


def _adapted(dtype: torch.dtype, group: int) -> tuple[LoraCase, torch.Tensor, torch.Tensor]:
    case = lora_case(
        1, device=CPU, dtype=dtype, lengths=[(0, 1)] * TOKENS, ranks=[8, 16], geometry=geometry_of(dtype),
        missing=0.0,
    )  # fmt: skip
    inputs, outputs = case.geometry.groups[group].in_features, case.geometry.groups[group].offsets[-1]
    return case, normal(dtype, TOKENS, inputs), normal(dtype, outputs, inputs, seed=1) * inputs**-0.5


def _given(
    case: LoraCase, group: ProjectionGroup, weight: torch.Tensor, plan: Any
) -> tuple[AdaptedLinear, LoraStep]:
    return AdaptedLinear(group, case.layer, Weight(weight), None), LoraStep(case.pool, plan)


def lora(dtype: torch.dtype) -> Made:
    case, x, weight = _adapted(dtype, 0)
    group, plan = case.geometry.groups[0], OPS.plan_lora(case.segments, case.geometry, CPU)
    out = OPS.lora_summands(x, *_given(case, group, weight, plan)).whole
    return Made(out, adapted_truth(case, x, weight, None, group))


def lora_gated(dtype: torch.dtype) -> Made:
    case, x, weight = _adapted(dtype, 2)
    group, plan = case.geometry.groups[2], OPS.plan_lora(case.segments, case.geometry, CPU)
    out = OPS.lora_gated(x, *_given(case, group, weight, plan))
    truth = adapted_truth(case, x, weight, None, group)
    return Made(out, rounding.silu_mul(truth, dtype).rounded(dtype))


KINDS = [linear, norm, residual, silu, turned, stored, decode, prefill, lora, lora_gated]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_row_or_element_is_beyond_the_bound(
    kind: Callable[[torch.dtype], Made], dtype: torch.dtype
) -> None:
    made = kind(dtype)
    assert made.truth.excess(made.out) <= 1
    for row in range(len(made.out)):
        wrong = made.out.clone()
        wrong[row] = made.out[row - 1]
        assert made.truth.excess(wrong) > 4, f"row {row} is another's"
    for of_magnitude in (0.25, -0.25):  # of the mean element's: far less than a wrong row's
        wrong = made.out.clone()
        wrong.view(-1)[wrong.numel() // 2] += of_magnitude * made.out.double().abs().mean()
        assert made.truth.excess(wrong) > 1
    nan = made.out.clone()
    nan.view(-1)[-1] = float("nan")
    assert made.truth.excess(nan) == math.inf


def test_another_tokens_adapter_is_beyond_the_bound() -> None:
    """The base product is right; what is added to one token is what its neighbour's adapter gives."""
    case, x, weight = _adapted(torch.bfloat16, 0)
    group = case.geometry.groups[0]
    truth = adapted_truth(case, x, weight, None, group)
    records = case.segments.records.copy()
    records[4] = records[5]
    swapped = dataclasses.replace(case, segments=dataclasses.replace(case.segments, records=records))
    plan = OPS.plan_lora(swapped.segments, case.geometry, CPU)
    out = OPS.lora_summands(x, *_given(case, group, weight, plan)).whole
    assert truth.excess(out) > 4
    right = [token for token in range(TOKENS) if token != 4]
    assert Bounded(truth.exact[right], truth.error[right]).excess(out[right]) <= 1


def test_where_nothing_is_written_nothing_may_differ() -> None:
    made = stored(torch.bfloat16)
    wrong = made.out.clone()
    wrong[3, 0, 0, 0, 0, 0] *= 1 + 2**-7
    assert made.truth.excess(wrong) == math.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_at_a_models_width(dtype: torch.dtype) -> None:
    """4,096 inputs as tensor cores sum them, in blocks of 16 whose sums are cut off, stay well within the bound; a
    block that is left out does not."""
    x, weight = normal(dtype, 4, 4096), normal(dtype, 64, 4096, seed=1)
    truth = rounding.linear(x, weight, None).rounded(dtype)
    blocks = torch.einsum("tbk,obk->bto", x.view(4, 256, 16).double(), weight.view(64, 256, 16).double())

    def summed(parts: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(4, 64)
        for part in parts:
            exact = total.double() + part
            nearest = exact.float()
            above = nearest.double().abs() > exact.abs()
            total = torch.where(above, torch.nextafter(nearest, torch.zeros(())), nearest)
        return total.to(dtype)

    assert truth.excess(summed(blocks)) <= 1
    assert truth.excess(summed(blocks[1:])) > 2


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(*[st.integers(1, 40)] * 4),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_a_chain_rounded_at_every_step_stays_within(
    dtype: torch.dtype, sizes: tuple[int, int, int, int], scale: float, seed: int
) -> None:
    """x A times a scale, then B: each sum rounded in turn, each result stored."""
    tokens, inputs, rank, outputs = sizes
    x = normal(dtype, tokens, inputs, seed=seed) * scale
    a, b = normal(dtype, inputs, rank, seed=seed + 1), normal(dtype, rank, outputs, seed=seed + 2)

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(left), right.shape[1])
        for k in range(right.shape[0]):
            total = total + left[:, k : k + 1].float() * right[k].float()
        return total.to(dtype)

    out = product((product(x, a).float() * 1.7).to(dtype), b)
    assert rounding.lora(x, a.T, b, 1.7).excess(out) <= 1


def test_gated_lora_at_a_models_width() -> None:
    """In bfloat16 with rank 64 and adapters as large as the base product: the worst case of all roundings together
    stays below a fifth of an element and the mean one, and more than half of a wrong row is beyond it."""
    dtype, tokens, inputs, outputs, rank = torch.bfloat16, 8, 4096, 256, 64
    x, weight = normal(dtype, tokens, inputs), normal(dtype, outputs, inputs, seed=1) * 0.02
    a, b = normal(dtype, rank, inputs, seed=2) * 0.05, normal(dtype, rank, outputs, seed=3) * 0.05
    shrunk = (x.float() @ a.float().T).to(dtype)
    added = (2.0 * (shrunk.float() @ b.float())).to(dtype)
    gate_up = ((x.float() @ weight.float().T).to(dtype).float() + added.float()).to(dtype)
    gate, up = gate_up.float().chunk(2, -1)
    out = (torch.nn.functional.silu(gate) * up).to(dtype)
    base = rounding.linear(x, weight, None).rounded(dtype)
    truth = rounding.silu_mul(base.plus(rounding.lora(x, a, b, 2.0)).rounded(dtype), dtype).rounded(dtype)
    assert truth.excess(out) <= 1
    size = truth.exact.abs() + truth.exact.square().mean().sqrt()
    assert (truth.error / size).median() < 0.2
    off = (out.roll(1, 0).double() - truth.exact).abs()
    assert (off > truth.error).double().mean() > 0.5
    assert truth.excess(out.roll(1, 0)) > 20


def test_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\) where \(2,\) is due"):
        Bounded.given(torch.zeros(2)).excess(torch.zeros(3))


def test_an_excess_is_of_the_worst_element() -> None:
    one = Bounded(torch.ones(2, dtype=torch.float64), torch.full((2,), 0.5, dtype=torch.float64))
    assert one.excess(torch.tensor([0.0, 1.25])) == 2.0
    assert one.excess(torch.tensor([math.inf, 1.0])) == math.inf
    assert Bounded.given(torch.zeros(0)).excess(torch.zeros(0)) == 0.0
