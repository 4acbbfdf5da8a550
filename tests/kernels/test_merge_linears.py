"""Every implementation's ``merge_linears`` against exact sums: one rounding, from the pristine weights, in
place."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from manylora_lab.bench.reference import ReferenceOps
from manylora_lab.bench.rounding import Bounded, accumulator, gamma

from manylora.kernels.ops import MergedLayer, MergePlan, Ops
from manylora.kernels.shapes import AdapterGeometry, ProjectionGroup
from tests.kernels.cases import LoraCase, lora_case
from tests.kernels.implementations import SLOW, SUBJECTS, Subject
from tests.kernels.test_lora import geometry_of

TRITON = [subject for subject in SUBJECTS if str(subject.id).startswith(("interpreted", "gpu"))]
SEGMENT = 1
"""The case has two adapters, so that places in the cell table are not those in a single one."""


def case_of(subject: Subject, geometry: AdapterGeometry, ranks: list[int], missing: float = 0.3) -> LoraCase:
    return lora_case(
        5, device=subject.device, dtype=subject.dtype, lengths=[(0, 1), (0, 1)], ranks=ranks,
        geometry=geometry, missing=missing,
    )  # fmt: skip


def plan_of(case: LoraCase, wanted: list[bool] | None = None, is_merged: bool = True) -> MergePlan:
    """The second adapter's; not ``is_merged``: the plan restores."""
    records = case.segments.records[SEGMENT]
    if wanted is None:
        wanted = [True] * len(records)
    if not is_merged:
        records = np.zeros_like(records)
    scales = case.segments.scales[SEGMENT]
    return MergePlan(np.array(wanted), records, scales, case.segments.cells, case.geometry)


def pristine_of(subject: Subject, group: ProjectionGroup) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(group.offsets[-1], group.in_features, generator=generator) * 0.3
    values[::3, ::2] = -0.0  # whose sign a sum with zero loses
    return values.to(subject.dtype).to(subject.device)


def truth_of(case: LoraCase, pristine: torch.Tensor, group: ProjectionGroup) -> Bounded:
    """``pristine + scale * B^T A``, as stored."""
    exact, error = pristine.double(), torch.zeros_like(pristine, dtype=torch.float64)
    for place, projection in enumerate(group.projections):
        index = case.geometry.projections.index(projection)
        pair = case.adapters[SEGMENT][index]
        if pair is None:
            continue
        a, b = (matrix.double() for matrix in pair)
        scale = float(case.segments.scales[SEGMENT, index, case.layer])
        rows = slice(group.offsets[place], group.offsets[place + 1])
        exact[rows] += scale * (b.T @ a)
        largest = pristine[rows].double().abs() + abs(scale) * (b.abs().T @ a.abs())
        error[rows] = gamma(len(a) + 3, accumulator(pristine.dtype)) * largest
    return Bounded(exact, error).rounded(pristine.dtype)


def merge(
    ops: Ops,
    case: LoraCase,
    merged: torch.Tensor,
    pristine: torch.Tensor,
    group: ProjectionGroup,
    plan: MergePlan,
) -> None:
    ops.merge_linears([MergedLayer(case.layer, merged, pristine)], case.pool, group, plan)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def check(subject: Subject, geometry: AdapterGeometry, ranks: list[int], ops: Ops | None = None) -> None:
    """Merged beside the pristine weights and over them; then restored."""
    case, ops = case_of(subject, geometry, ranks), ops or subject.ops()
    for group in geometry.groups[:2] if subject.small else geometry.groups:
        pristine = pristine_of(subject, group)
        truth = truth_of(case, pristine, group)
        merged = torch.full_like(pristine, float("nan"))
        merge(ops, case, merged, pristine, group, plan_of(case))
        assert truth.excess(merged) <= 1
        over = pristine.clone()
        merge(ops, case, over, over, group, plan_of(case))
        assert torch.equal(merged, over)
        merge(ops, case, merged, pristine, group, plan_of(case, is_merged=False))
        assert torch.equal(bits(merged), bits(pristine))


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("ranks", [[1, 2, 5], [16], [33, 70], [130]])
def test_merged_is_rounded_once_and_restored_to_the_bit(subject: Subject, ranks: list[int]) -> None:
    if subject.small and ((subject.dtype != torch.float32) != (ranks == [16]) or ranks == [130]):
        pytest.skip(SLOW)
    check(subject, geometry_of(subject.dtype), ranks)


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("cell", [8, 32, 64])
def test_cells_shorter_and_longer_than_rows(subject: Subject, cell: int) -> None:
    """A slab of 160 elements, which a cell of 64 does not divide; rows of 80 to 530 take several cells."""
    if subject.small and (cell != 64 or subject.dtype != torch.float32):
        pytest.skip(SLOW)
    check(subject, geometry_of(subject.dtype, cell, dim=10, wide=not subject.small), [3, 17])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_reference(dtype: torch.dtype) -> None:
    check(Subject("cpu", dtype), geometry_of(dtype), [1, 9], ReferenceOps())


@pytest.mark.parametrize("subject", SUBJECTS)
def test_several_layers_at_once_are_as_one_after_the_other(subject: Subject) -> None:
    """Each layer has its own rows in the pool, its own scale and its own weights."""
    if subject.small and subject.dtype != torch.float32:
        pytest.skip(SLOW)
    geometry = geometry_of(subject.dtype)
    case, group, numbers = case_of(subject, geometry, [4], missing=0.0), geometry.groups[0], [2, 0, 1]
    case.pool.copy_(torch.randn(case.pool.shape, generator=torch.Generator().manual_seed(1)))
    plan = plan_of(case)
    plan.scales[:] = np.arange(plan.scales.size).reshape(plan.scales.shape)
    pristine = [pristine_of(subject, group) * (1 + number) for number in numbers]

    def layers() -> list[MergedLayer]:
        given = zip(numbers, pristine, strict=True)
        return [MergedLayer(number, torch.zeros_like(each), each) for number, each in given]

    together, single = layers(), layers()
    subject.ops().merge_linears(together, case.pool, group, plan)
    for layer in single:
        subject.ops().merge_linears([layer], case.pool, group, plan)
    for one, other in zip(together, single, strict=True):
        assert torch.equal(one.merged, other.merged)
        assert not torch.equal(one.merged, one.pristine) or one.layer == 0


@pytest.mark.parametrize("subject", SUBJECTS)
def test_only_what_is_wanted_is_written(subject: Subject) -> None:
    """One of q, k and v: the others keep what they hold, which is neither merged nor pristine."""
    if subject.small and subject.dtype != torch.float32:
        pytest.skip(SLOW)
    geometry, ops = geometry_of(subject.dtype), subject.ops()
    group = geometry.groups[0]
    case = case_of(subject, geometry, [4], missing=0.0)
    pristine = pristine_of(subject, group)
    truth = truth_of(case, pristine, group)
    for chosen in ([0], [1], [0, 2], []):
        wanted = [index in chosen for index in range(len(geometry.projections))]
        before = torch.full_like(pristine, 7.0)
        merged = before.clone()
        merge(ops, case, merged, pristine, group, plan_of(case, wanted))
        for place in range(3):
            rows = slice(group.offsets[place], group.offsets[place + 1])
            if place in chosen:
                assert dataclasses.replace(truth).part(rows).excess(merged[rows]) <= 1
            else:
                assert torch.equal(merged[rows], before[rows])


@pytest.mark.parametrize("subject", SUBJECTS)
def test_keys_and_values_of_another_type(subject: Subject) -> None:
    """The pool's elements are not the adapter's."""
    if subject.small and subject.dtype != torch.float32:
        pytest.skip(SLOW)
    geometry, ops = geometry_of(subject.dtype), subject.ops()
    case = case_of(subject, geometry, [4], missing=0.0)
    group = geometry.groups[1]
    pristine = pristine_of(subject, group)
    expected, found = torch.empty_like(pristine), torch.empty_like(pristine)
    merge(ops, case, expected, pristine, group, plan_of(case))
    pool = case.pool.view(torch.uint8).view(*case.pool.shape[:-1], -1).view(torch.float8_e4m3fn)
    ops.merge_linears([MergedLayer(case.layer, found, pristine)], pool, group, plan_of(case))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("subject", TRITON)
def test_small_blocks(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    if subject.small and subject.dtype != torch.float32:
        pytest.skip(SLOW)
    subject.ops()
    from manylora.kernels.triton import merging

    monkeypatch.setattr(merging, "BLOCK_ROWS", 16)
    monkeypatch.setattr(merging, "BLOCK_COLUMNS", 32)
    check(subject, geometry_of(subject.dtype), [1, 2, 5])
