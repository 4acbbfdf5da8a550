"""The layer benchmark's rig on a CPU: what it times is a decoder's layer, and calls do not change each other."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from manylora_lab.bench.dummies import DEMO
from manylora_lab.bench.kernels.layers import LayerCase, LayerRig
from manylora_lab.bench.reference import ReferenceOps

CASES = [LayerCase(20, (1, 1, 1)), LayerCase(33, (2, 1)), LayerCase(16, (4,))]


@pytest.fixture(scope="module")
def rig() -> LayerRig:
    return LayerRig(DEMO, "cpu", rank=4, num_layers=2, cases=CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layers_give_what_the_reference_gives(rig: LayerRig, case: LayerCase) -> None:
    with torch.inference_mode():
        torch.manual_seed(1)
        out = rig.step(case)()
        torch.manual_seed(1)
        expected = rig.step(case, ReferenceOps())()
    assert out.shape == (sum(case.counts), DEMO.hidden)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)


def test_a_call_does_not_change_the_next(rig: LayerRig) -> None:
    with torch.inference_mode():
        step = rig.step(CASES[1])
        assert torch.equal(step(), step())


def test_times_are_of_one_layer(rig: LayerRig) -> None:
    assert all(seconds > 0 for seconds in rig.seconds([rig.step(case) for case in CASES], repeats=2))


def test_a_case_takes_whole_pages() -> None:
    assert CASES[0].num_pages == 6
    assert dataclasses.replace(CASES[0], context=16).num_pages == 3
