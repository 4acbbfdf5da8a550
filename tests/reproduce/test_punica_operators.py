"""The operators that SGMV is compared with: each against the reference kernels."""

from __future__ import annotations

import pytest
import torch
from manylora_lab.bench.reference import ReferenceOps
from manylora_lab.reproduce.lora_operators import gather, weight_elements
from manylora_lab.reproduce.lora_rig import LoraRig
from manylora_lab.reproduce.punica_fig7 import sgmv_bytes, sgmv_flop
from manylora_lab.reproduce.punica_fig8 import step_of

from manylora.kernels.ops import LoraSite, LoraStep

RANK = 4


@pytest.fixture(scope="module")
def rig() -> LoraRig:
    return LoraRig("cpu", 96, 160, most_models=6, most_rank=8)


@pytest.mark.parametrize("counts", [(1,), (5,), (1, 1, 1), (3, 1, 2)])
@pytest.mark.parametrize("operator", ["sgmv", "loop", "gather-bmm", "bmm"])
def test_operators_add_what_the_reference_adds(rig: LoraRig, operator: str, counts: tuple[int, ...]) -> None:
    case = rig.case(counts, RANK)
    case.y.normal_()
    expected = case.y.clone()
    reference = ReferenceOps()
    plan = reference.plan_lora(case.segments, rig.geometry, rig.device)
    assert plan is not None
    reference.lora(expected, case.x, LoraSite(rig.group, 0), LoraStep(rig.pool, plan))
    before = case.y.clone()
    step_of(rig, case, operator)()
    assert (expected - before).norm() > 0.01 * before.norm(), "the adapters do something"
    torch.testing.assert_close(case.y, expected, rtol=1e-4, atol=1e-5)


def test_gather_copies_each_inputs_own_matrices(rig: LoraRig) -> None:
    case = rig.case((2, 1), RANK)
    a, b = rig.dense(case, 0)
    a_of_each, b_of_each = gather(a, b, torch.tensor([0, 0, 1]))
    assert torch.equal(a_of_each, torch.stack([a[0], a[0], a[1]]))
    assert torch.equal(b_of_each, torch.stack([b[0], b[0], b[1]]))
    before = case.y.clone()
    step_of(rig, case, "gather")()
    assert torch.equal(case.y, before), "it is no whole operator"


def test_the_rig_checks_its_own_kernels(rig: LoraRig) -> None:
    found = rig.errors(rig.case((3, 1, 2), 8))
    assert found["error"] < 1e-5
    assert 0 < found["error_of_bound"] <= 1


@pytest.mark.parametrize("counts", [(4,), (1, 1, 1), (3, 1)])
def test_gather_bmm_moves_twice_each_inputs_weights_more_than_sgmv(counts: tuple[int, ...]) -> None:
    """§7.1."""
    more = weight_elements("gather-bmm", counts, 1000) - weight_elements("sgmv", counts, 1000)
    assert more == 2 * sum(counts) * 1000
    assert weight_elements("loop", counts, 1000) == len(counts) * 1000


def test_the_papers_flop_and_bytes_by_hand() -> None:
    assert sgmv_flop(1, 16, 4096) == 131072
    assert sgmv_bytes(1, 1, 16, 4096, 2) == (4112 + 65536) * 2
    assert sgmv_bytes(64, 8, 16, 4096, 2) == (64 * 4112 + 8 * 65536) * 2
