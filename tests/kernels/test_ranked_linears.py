"""A rank's linears with adapters by the Triton kernels: what runs beside the product, and in which order.

The rank is alone: it has all inputs and outputs, and its exchanges are noted.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manylora.devices.peers import Peers, Purpose
from manylora.kernels.ops import LoraLimits, Shrunk, Summands, Weight
from manylora.kernels.shapes import ProjectionGroup
from manylora.models.layers import RankedLinear, Step
from manylora.models.share import LinearShare
from tests.kernels.cases import LoraCase, adapted_truth
from tests.kernels.implementations import Subject
from tests.kernels.test_lora_kernels import case_of
from tests.kernels.test_lora_linear import BESIDE, MIXED, TRITON

pytest.importorskip("triton")

from manylora.kernels.triton.lora import LoraKernels
from manylora.kernels.triton.lora_plan import DEFAULT
from manylora.kernels.triton.operations import TritonOps

TOKENS = 24
EXACT = [one for one in TRITON if isinstance(one.values[0], Subject) and one.values[0].dtype is torch.float32]


class Log(list[str]):
    """What was issued, in order."""


class NotedPeers(Peers):
    def __init__(self, log: Log) -> None:
        super().__init__(0, 1)
        self._log = log

    def add_up(self, tensor: torch.Tensor, purpose: Purpose) -> None:
        assert tensor.is_contiguous()
        self._log.append(purpose)


class NotedSide:
    def __init__(self, log: Log, side: Any) -> None:
        self._log, self._side = log, side

    def fork(self) -> None:
        self._log.append("fork")
        self._side.fork()

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        self._log.append("beside:")
        with self._side.use():
            yield
        self._log.append("in line:")

    def join(self) -> None:
        self._log.append("join")
        self._side.join()


class NotedOps(TritonOps):
    """Of a device whose captured steps run LoRA beside the product."""

    def __init__(self, log: Log) -> None:
        config = dataclasses.replace(DEFAULT, beside=((64, BESIDE),))
        super().__init__(lora=LoraKernels(config, 4))
        self._log = log
        self.sides: list[Any] = []

    def lora_side(self, plan: Any) -> Any:
        side = super().lora_side(plan)
        self.sides.append(side)
        return NotedSide(self._log, side)

    def linear(self, *given: Any) -> torch.Tensor:
        self._log.append("product")
        return super().linear(*given)

    def lora_shrink(self, *given: Any) -> Shrunk:
        self._log.append("shrink")
        return super().lora_shrink(*given)

    def lora_expand(self, *given: Any) -> None:
        self._log.append("expand")
        super().lora_expand(*given)


@dataclasses.dataclass
class Made:
    """One of a rank's linears, its input and what is right."""

    linear: RankedLinear
    x: torch.Tensor
    truth: Any
    step: Step


def made(
    case: LoraCase, group: ProjectionGroup, ops: NotedOps, plan: Any, log: Log, is_sharded: bool
) -> Made:
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(case.pool.device)

    inputs, outputs = range(group.in_features), range(group.offsets[-1])
    parts = tuple(range(projection.out_features) for projection in group.projections)
    kind: Any = "row" if group.name in ("o", "down") else "column"
    share = LinearShare(kind, group, parts, inputs, group, inputs, parts, inputs, outputs)
    weight = drawn(len(outputs), len(inputs)) * len(inputs) ** -0.5
    x = drawn(TOKENS, len(inputs))
    peers: Any = NotedPeers(log)
    linear = RankedLinear(group, case.layer, Weight(weight), None, share, is_sharded, peers)
    batch: Any = SimpleNamespace(lora=plan, cold=None)
    return Made(linear, x, adapted_truth(case, x, weight, None, group), Step(ops, batch, case.pool))


def fixed(ops: NotedOps, case: LoraCase) -> Any:
    """A captured step's plan of the case."""
    cells = case.segments.cells
    plan = ops.lora_plan(case.geometry, cells.device, LoraLimits(TOKENS, 8, 32, cells))
    plan.fill(case.segments, case.num_tokens)
    return plan


def answered(
    subject: Subject, case: LoraCase, ops: NotedOps, plan: Any, log: Log, is_sharded: bool
) -> Iterator[tuple[ProjectionGroup, Made, Summands]]:
    """Each of the case's linears with what it gives; the log has what was issued for that one."""
    for group in case.geometry.groups:
        if subject.small and group.name in ("o", "qkv"):
            continue
        one = made(case, group, ops, plan, log, is_sharded)
        log.clear()
        yield group, one, one.linear(one.x, one.step)


@pytest.mark.parametrize("subject", EXACT)
@pytest.mark.parametrize("is_captured", [True, False])
def test_sharded(subject: Subject, is_captured: bool) -> None:
    """In a captured step the product runs beside shrink and the exchange, and ends before the base's exchange."""
    log = Log()
    ops, case = NotedOps(log), case_of(subject, MIXED, [3, 20])
    plan = fixed(ops, case) if is_captured else ops.plan_lora(case.segments, case.geometry, subject.device)
    for _, one, y in answered(subject, case, ops, plan, log, is_sharded=True):
        assert y.adapted is None
        exchanged = ["base"] if one.linear.share.kind == "row" else []
        expected = ["fork", "shrink", "beside:", "product", "in line:", "lora", "join", "expand"]
        assert log == [*expected, *exchanged]
        assert one.truth.excess(y.product) <= 1
    in_line = {type(side).__name__ for side in ops.sides} == {"InLine"}
    assert in_line != is_captured


@pytest.mark.parametrize("subject", EXACT)
def test_replicated(subject: Subject) -> None:
    """What reads a column linear adds its two parts up, as with one rank; a row linear's go into one exchange."""
    log = Log()
    ops, case = NotedOps(log), case_of(subject, MIXED, [3, 20])
    plan = fixed(ops, case)
    for group, one, y in answered(subject, case, ops, plan, log, is_sharded=False):
        alone = ops.lora_summands(one.x, one.linear, one.step.lora)
        if one.linear.share.kind == "row":
            assert y.adapted is None
            assert log.count("base") == 1
            assert torch.equal(y.product, alone.whole)
        else:
            assert "base" not in log
            assert y.adapted is not None
            assert alone.adapted is not None
            assert torch.equal(y.product, alone.product)
            assert torch.equal(y.adapted, alone.adapted)
        assert "lora" not in log
        assert one.truth.excess(Summands(*y).whole) <= 1
        if group.name == "gate_up":
            gated = one.linear.gated(one.x, one.step, "silu")
            expected = ops.lora_gated(one.x, one.linear, one.step.lora)
            assert torch.equal(gated, expected)
