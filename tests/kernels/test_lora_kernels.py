"""The Triton LoRA kernels driven by tables: what they add or write, and tables that are filled again."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from manylora.kernels.ops import LoraLimits, LoraSegments, LoraSite, LoraStep
from manylora.kernels.shapes import AdapterGeometry, PageShape, adapter_geometry
from tests.kernels.cases import LoraCase, llama_groups, lora_case, lora_truth
from tests.kernels.implementations import SLOW, SUBJECTS, Subject

pytest.importorskip("triton")

from manylora.kernels.triton.lora import LoraKernels
from manylora.kernels.triton.lora_plan import DEFAULT, LoraConfig, LoraTileConfig, TritonLoraPlan, runs_of

DEVICES = [
    s for s in SUBJECTS if isinstance(s.values[0], Subject) and s.values[0].kind in ("interpreted", "gpu")
]
SHORT = dataclasses.replace(
    DEFAULT.short, chunk=32, shrink_columns=32, shrink_step=16, expand_columns=32, expand_step=16
)
SMALL = LoraConfig(short=SHORT, long=DEFAULT.long, long_run=6, writes_from=1)
"""Several splits, steps and blocks of columns even for rows of some 50 elements."""


def geometry_of(dtype: torch.dtype) -> AdapterGeometry:
    page = PageShape(layers=2, page_tokens=4, kv_heads=2, head_dim=12, itemsize=torch.finfo(dtype).bits // 8)
    return adapter_geometry(page, [llama_groups(40, 48, 24, 72)] * page.layers)


def case_of(
    subject: Subject,
    lengths: list[tuple[int, int]],
    ranks: list[int],
    seed: int = 0,
) -> LoraCase:
    return lora_case(
        seed, device=subject.device, dtype=subject.dtype, lengths=lengths, ranks=ranks,
        geometry=geometry_of(subject.dtype),
    )  # fmt: skip


def inputs_of(case: LoraCase, subject: Subject, num_tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(num_tokens, group.in_features) for group in case.geometry.groups]
    return [torch.randn(s, generator=generator).to(subject.dtype).to(subject.device) for s in shapes]


def check(
    kernels: LoraKernels,
    plan: TritonLoraPlan,
    case: LoraCase,
    subject: Subject,
    num_tokens: int,
    interpreted: tuple[str, ...] = ("qkv", "down"),
) -> None:
    """Writing everywhere, adding where there is an adapter, and nothing else touched; both exactly alike.

    The interpreter is slow: there, of the widest group and of one with a single projection, or of one of them.
    """
    for group, x in zip(case.geometry.groups, inputs_of(case, subject, num_tokens)):
        if subject.small and group.name not in interpreted:
            continue
        truth = lora_truth(case, x, group)
        subject.poison()
        site, step = LoraSite(group, case.layer), LoraStep(case.pool, plan)
        partial = kernels.shrink(x, site, step)
        written = torch.full_like(truth.exact, float("nan"), dtype=subject.dtype)
        kernels.expand(written, partial, site, step, add=False)
        plus = torch.zeros_like(written)
        kernels.expand(plus, partial, site, step)
        assert torch.equal(written, plus)
        assert truth.excess(written) <= 1


@pytest.mark.parametrize("subject", DEVICES)
@pytest.mark.parametrize("programs", [0, 1])
def test_mixed_lengths_and_ranks(subject: Subject, programs: int) -> None:
    """One-token, short and long runs, gaps before, between and after; few programs that take many items."""
    if subject.small and subject.dtype != torch.float32 and programs:
        pytest.skip(SLOW)

    def limited(config: LoraTileConfig) -> LoraTileConfig:
        return dataclasses.replace(config, shrink_programs=programs, expand_programs=programs)

    config = dataclasses.replace(SMALL, short=limited(SMALL.short), long=limited(SMALL.long))
    case = case_of(subject, [(2, 1), (0, 3), (1, 9), (0, 1)], [1, 5, 16, 40])
    kernels = LoraKernels(config, 2)
    plan = TritonLoraPlan(config, case.geometry, subject.device)
    plan.fill(case.segments, case.num_tokens)
    assert len(plan.parts) == 2
    check(kernels, plan, case, subject, case.num_tokens)


ONE_LAUNCH = {
    "few programs": dataclasses.replace(SHORT, shrink_programs=1, expand_programs=1),
    "narrow": dataclasses.replace(SHORT, tile_columns=16, expand_programs=2),
    "turns": dataclasses.replace(SHORT, expand_tokens=32, stages=2),
    "narrow turns": dataclasses.replace(SHORT, expand_tokens=48, tile_columns=16, expand_columns=64),
}
BOTH = ("few programs", "narrow turns")
"""Between them they take every path that the others take."""


@pytest.mark.parametrize("subject", DEVICES)
@pytest.mark.parametrize("sizes", [ONE_LAUNCH[name] for name in BOTH], ids=BOTH)
def test_long_and_one_token_runs_in_one_launch(subject: Subject, sizes: LoraTileConfig) -> None:
    check_one_launch(subject, sizes)


@pytest.mark.long
@pytest.mark.parametrize("subject", DEVICES)
@pytest.mark.parametrize("name", [name for name in ONE_LAUNCH if name not in BOTH])
def test_one_launch_narrow_or_in_turns_alone(subject: Subject, name: str) -> None:
    check_one_launch(subject, ONE_LAUNCH[name])


def check_one_launch(subject: Subject, sizes: LoraTileConfig) -> None:
    """As captured and as eager steps have it: a prompt of several tiles, the last of one token, among decoding."""
    if subject.small and subject.dtype != torch.float32:
        pytest.skip(SLOW)
    config = dataclasses.replace(SMALL, mixed=((64, sizes),))
    case = case_of(subject, [(0, 1), (2, 33), (0, 1), (1, 20), (3, 1)], [5, 20, 16, 40, 3])
    kernels = LoraKernels(config, 2)
    eager = TritonLoraPlan(config, case.geometry, subject.device)
    eager.fill(case.segments, case.num_tokens)
    assert [part.config.item_tokens for part in eager.parts] == [sizes.item_tokens]
    check(kernels, eager, case, subject, case.num_tokens, ("down",))
    fixed = TritonLoraPlan(config, case.geometry, subject.device, LoraLimits(64, 6, 40, case.segments.cells))
    # That tables may be filled again and again is tested below, too.
    for chosen in ([0, 1, 2, 3, 4],) if subject.small else ([1, 2], [0, 1, 2, 3, 4], [], [4]):
        part = part_of(case, chosen)
        fixed.fill(part.segments if chosen else None, 64)
        check(kernels, fixed, part, subject, 64, ("qkv",))


@pytest.mark.parametrize("subject", DEVICES)
def test_tables_are_filled_again(subject: Subject) -> None:
    """More segments than before, fewer, none: only what is in the tables now is done."""
    if subject.small and subject.dtype != torch.float32:
        pytest.skip(SLOW)
    case = case_of(subject, [(0, 1), (1, 2), (0, 1), (1, 3)], [3, 20])
    kernels = LoraKernels(dataclasses.replace(SMALL, long_run=100), 2)
    room = LoraLimits(12, 12, 32, case.segments.cells)
    plan = TritonLoraPlan(kernels.config, case.geometry, subject.device, room)
    for chosen in ([1], [0, 1, 2, 3], [3], []):
        part = part_of(case, chosen)
        plan.fill(part.segments if chosen else None, 12)
        check(kernels, plan, part, subject, 12, ("down",))


def test_tables_that_are_too_small_are_refused() -> None:
    subject = Subject("interpreted", torch.float32)
    case = case_of(subject, [(0, 1), (0, 1), (0, 1)], [20])
    plan = TritonLoraPlan(SMALL, case.geometry, subject.device, LoraLimits(2, 2, 32, case.segments.cells))
    with pytest.raises(ValueError, match="exceed"):
        plan.fill(case.segments, 3)


def test_runs_cover_every_token_once() -> None:
    segments = LoraSegments(
        np.array([2, 5], np.int32), np.array([1, 4], np.int32), np.zeros((2, 1, 3), np.int64),
        np.zeros((2, 1, 1), np.float32), torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip
    owner = np.full(11, -9)
    for first, count, which in runs_of(segments, 11).T.tolist():
        assert (owner[first : first + count] == -9).all()
        owner[first : first + count] = which
    assert owner.tolist() == [-1, -1, 0, -1, -1, 1, 1, 1, 1, -1, -1]


def part_of(case: LoraCase, chosen: list[int]) -> LoraCase:
    """The case with some of its segments only."""
    whole = case.segments
    part = LoraSegments(
        whole.start[chosen], whole.length[chosen], whole.records[chosen], whole.scales[chosen], whole.cells
    )
    return dataclasses.replace(case, segments=part, adapters=[case.adapters[i] for i in chosen])
