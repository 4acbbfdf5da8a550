"""Every implementation's LoRA against the reference: mixed ranks, gaps, any cell size, any strategy."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from manylora_lab.bench.rounding import Bounded

from manylora.kernels import cpu
from manylora.kernels.ops import LoraSite, LoraStep
from manylora.kernels.shapes import AdapterGeometry, PageShape, Projection, ProjectionGroup, adapter_geometry
from tests.kernels.cases import llama_groups, lora_case, lora_truth
from tests.kernels.implementations import FLOAT64, SLOW, SUBJECTS, Subject

NARROW = llama_groups(40, 48, 24, 72)
WIDE = llama_groups(300, 160, 80, 530)


def skip_repetition(subject: Subject) -> None:
    if subject.small and subject.dtype != torch.float32:
        pytest.skip(SLOW)


def geometry_of(
    dtype: torch.dtype, cell: int | None = None, dim: int = 12, wide: bool = False
) -> AdapterGeometry:
    page = PageShape(layers=3, page_tokens=4, kv_heads=2, head_dim=dim, itemsize=torch.finfo(dtype).bits // 8)
    geometry = adapter_geometry(page, [WIDE if wide else NARROW] * page.layers)
    return geometry if cell is None else dataclasses.replace(geometry, cell_elements=cell)


def check(
    subject: Subject,
    geometry: AdapterGeometry,
    lengths: list[tuple[int, int]],
    ranks: list[int],
    seed: int = 0,
    missing: float = 0.2,
    same_scale: bool = False,
    pool_dtype: torch.dtype | None = None,
    across: bool = False,
) -> None:
    case = lora_case(
        seed,
        device=subject.device,
        dtype=subject.dtype,
        lengths=lengths,
        ranks=ranks,
        geometry=geometry,
        missing=missing,
        same_scale=same_scale,
        pool_dtype=pool_dtype,
        across=across,
    )
    ops = subject.ops()
    plan = ops.plan_lora(case.segments, geometry, subject.device)
    assert plan is not None
    generator = torch.Generator().manual_seed(seed)
    for group in geometry.groups:
        x = torch.randn(case.num_tokens, group.in_features + 3, generator=generator)[:, : group.in_features]
        y = torch.randn(case.num_tokens, group.offsets[-1] + 5, generator=generator)[:, : group.offsets[-1]]
        x, y = x.to(subject.dtype).to(subject.device), y.to(subject.dtype).to(subject.device)
        added = lora_truth(case, x, group)
        out, again = y.clone(), y.clone()
        subject.poison()
        ops.lora(out, x, LoraSite(group, case.layer), LoraStep(case.pool, plan))
        if not subject.small or group is geometry.groups[0]:
            ops.lora(
                again, x, LoraSite(group, case.layer), LoraStep(case.pool, plan)
            )  # a plan serves many steps
            assert torch.equal(out, again)
        assert Bounded.given(y).plus(added).rounded(subject.dtype).excess(out) <= 1
        untouched = added.exact == 0
        assert torch.equal(out[untouched], y[untouched])


@pytest.mark.parametrize("subject", [*SUBJECTS, FLOAT64])
@pytest.mark.parametrize("seed", range(4))
def test_random_batches(subject: Subject, seed: int) -> None:
    if subject.small and subject.dtype != torch.float32 and seed:
        pytest.skip(SLOW)
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    lengths = [(draw(0, 3), 1 if draw(0, 2) else draw(1, 30)) for _ in range(draw(1, 7))]
    check(subject, geometry_of(subject.dtype), lengths, [1, 2, 5, 8, 16, 33, 70], seed)


@pytest.mark.parametrize("subject", [*SUBJECTS, FLOAT64])
@pytest.mark.parametrize("cell", [8, 16, 32, 64, 192])
def test_cells_shorter_and_longer_than_rows(subject: Subject, cell: int) -> None:
    """The slab has 192 elements, the rows 24 to 72; a cell of 64 divides it, one of 192 is the whole slab."""
    check(subject, geometry_of(subject.dtype, cell), [(1, 1), (0, 6), (2, 1)], [1, 4, 9])


@pytest.mark.parametrize("subject", [*SUBJECTS, FLOAT64])
def test_slab_that_is_no_multiple_of_the_cell(subject: Subject) -> None:
    geometry = geometry_of(subject.dtype, 64, dim=10)
    assert geometry.page.slab_elements % geometry.cell_elements
    check(subject, geometry, [(0, 3), (1, 1)], [2, 7])


@pytest.mark.parametrize("subject", [*SUBJECTS, FLOAT64])
@pytest.mark.parametrize("pool_dtype", [torch.float8_e4m3fn, torch.float64])
def test_keys_and_values_of_another_type(subject: Subject, pool_dtype: torch.dtype) -> None:
    skip_repetition(subject)
    page = PageShape(layers=3, page_tokens=4, kv_heads=2, head_dim=16, itemsize=pool_dtype.itemsize)
    geometry = adapter_geometry(page, [NARROW] * page.layers, subject.dtype.itemsize)
    check(subject, geometry, [(1, 1), (0, 6), (2, 20)], [1, 4, 20], pool_dtype=pool_dtype)


@pytest.mark.parametrize("subject", [*SUBJECTS, FLOAT64])
@pytest.mark.parametrize("cell", [8, 32, 64])
def test_rows_long_enough_to_be_split(subject: Subject, cell: int) -> None:
    """300 and 530 columns: several steps and several splits in a shrink, a last one that is cut short."""
    if subject.small and cell != 32:
        pytest.skip(SLOW)
    skip_repetition(subject)
    lengths = [(0, 1), (1, 3)] if subject.small else [(0, 1), (1, 3), (0, 1), (0, 20)]
    check(subject, geometry_of(subject.dtype, cell, dim=16, wide=True), lengths, [3, 17])


@pytest.mark.parametrize("subject", [*SUBJECTS, FLOAT64])
def test_rows_of_the_model_across_the_layers(subject: Subject) -> None:
    """A head wider than all layers: each cell of its rows is in another layer's slab."""
    skip_repetition(subject)
    head = ProjectionGroup("head", (Projection("lm_head", 40, 530 if subject.small else 2000),))
    geometry = dataclasses.replace(geometry_of(subject.dtype, 32), model=(head,)).of_model
    assert geometry.groups == (head,)
    check(subject, geometry, [(1, 1), (0, 6), (2, 20)], [1, 4, 20], across=True)


@pytest.mark.parametrize("subject", [*SUBJECTS, FLOAT64])
@pytest.mark.parametrize("length", [1, 2, 17, 40])
def test_one_long_segment(subject: Subject, length: int) -> None:
    skip_repetition(subject)
    if subject.small and length in (2, 17):
        pytest.skip("the interpreter is slow, and 1 and 40 are the extremes")
    check(subject, geometry_of(subject.dtype), [(3, length)], [70], missing=0.0, same_scale=True)


@pytest.mark.parametrize("subject", [*SUBJECTS, FLOAT64])
@pytest.mark.parametrize("limit", [0, 3000, 2**22])
def test_many_adapters(subject: Subject, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU all segments by torch, some, and all in loops."""
    skip_repetition(subject)
    if subject.kind != "cpu" and limit:
        pytest.skip("this limit is the CPU's")
    monkeypatch.setattr(cpu, "SHORT_SEGMENT", limit)
    lengths = [(int(i % 3 == 0), 1 + (i * 7) % 4) for i in range(6 if subject.small else 24)]
    check(subject, geometry_of(subject.dtype), lengths, [1, 2, 4, 8, 16])
    check(subject, geometry_of(subject.dtype), lengths, [8], missing=0.0, same_scale=True)


@pytest.mark.parametrize("subject", [*SUBJECTS, FLOAT64])
def test_adapters_without_any_projection_of_a_group(subject: Subject) -> None:
    check(subject, geometry_of(subject.dtype), [(0, 2), (1, 1)], [3], missing=1.0)


@pytest.mark.parametrize("subject", [*SUBJECTS, FLOAT64])
def test_the_two_halves_with_a_sum_between(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parts of the inputs, as ranks have them, the shrunk ones are added up; y is some columns of a matrix."""
    skip_repetition(subject)
    monkeypatch.setattr(cpu, "SHORT_SEGMENT", 20_000)  # torch takes the longest segment
    geometry = geometry_of(subject.dtype)
    lengths = [(1, 1), (0, 6), (2, 20 if subject.small else 40), (0, 1)]
    case = lora_case(
        3, device=subject.device, dtype=subject.dtype, lengths=lengths, ranks=[1, 4, 20], geometry=geometry,
    )  # fmt: skip
    ops = subject.ops()
    plan = ops.plan_lora(case.segments, geometry, subject.device)
    assert plan is not None
    generator = torch.Generator().manual_seed(3)
    for group in geometry.groups:
        x = torch.randn(case.num_tokens, group.in_features, generator=generator)
        wide = torch.randn(case.num_tokens, group.offsets[-1] + 24, generator=generator)
        x, wide = x.to(subject.dtype).to(subject.device), wide.to(subject.dtype).to(subject.device)
        parts, shrunk = (slice(8), slice(8, None)), []
        site, step = LoraSite(group, case.layer), LoraStep(case.pool, plan)
        for other in reversed(parts):
            part = x.clone()
            part[:, other] = 0
            subject.poison()
            shrunk.append(ops.lora_shrink(part, site, step))
        assert shrunk[0].values.dtype is (torch.float64 if subject.dtype is torch.float64 else torch.float32)
        shrunk[0].values.add_(shrunk[1].values)
        before = wide.clone()
        y = wide[:, 16 : 16 + group.offsets[-1]]
        ops.lora_expand(y, shrunk[0], site, step)
        expected = Bounded.given(before[:, 16 : 16 + group.offsets[-1]]).plus(
            lora_truth(case, x, group, parts)
        )
        assert expected.rounded(subject.dtype).excess(y) <= 1
        assert torch.equal(wide[:, :16], before[:, :16])
        assert torch.equal(wide[:, 16 + group.offsets[-1] :], before[:, 16 + group.offsets[-1] :])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("subject", [*SUBJECTS, FLOAT64])
def test_an_adapter_whose_products_are_infinite_disturbs_no_other(subject: Subject) -> None:
    """Its weights are finite, and the others lack the projection that they are of."""
    geometry = geometry_of(subject.dtype)
    case = lora_case(
        0, device=subject.device, dtype=subject.dtype, lengths=[(0, 3), (0, 3), (1, 3)], ranks=[4],
        geometry=geometry, missing=0.0,
    )  # fmt: skip
    group = geometry.groups[0]
    (first, _, rank), *others = case.segments.records[:, 0]
    for record in others:
        record[:] = 0
    cells = case.segments.cells[first : first + rank * geometry.cells(group.in_features)].tolist()
    for cell in cells:
        begin = cell + case.layer * geometry.slab_elements
        case.pool.view(-1)[begin : begin + geometry.cell_elements] = torch.finfo(subject.dtype).max
    ops = subject.ops()
    plan = ops.plan_lora(case.segments, geometry, subject.device)
    x = torch.ones(10, group.in_features, dtype=subject.dtype, device=subject.device)
    y = torch.zeros(10, group.offsets[-1], dtype=subject.dtype, device=subject.device)
    ops.lora(y, x, LoraSite(group, case.layer), LoraStep(case.pool, plan))
    assert not y[:3].isfinite().all()
    assert y[3:].isfinite().all()
