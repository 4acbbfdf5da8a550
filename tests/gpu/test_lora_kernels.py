"""LoRA kernels in CUDA graphs and with dependent launch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from manylora_lab.bench import rounding

from manylora.kernels.ops import AdaptedLinear, LoraLimits, LoraSite, LoraStep, Weight
from manylora.kernels.triton.lora import LoraKernels
from manylora.kernels.triton.lora_plan import DEFAULT, Beside, LoraConfig, TritonLoraPlan
from manylora.kernels.triton.operations import TritonOps
from tests.kernels.cases import LoraCase, adapted_truth, lora_truth
from tests.kernels.implementations import Subject
from tests.kernels.test_lora_kernels import case_of, inputs_of, part_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pdl", [False, True])
def test_replay_follows_the_tables(dtype: torch.dtype, pdl: bool) -> None:
    """Captured with one segment; replayed with more, fewer and none; dependent launch changes no bit."""
    subject, tokens = Subject("gpu", dtype), 24
    case = case_of(subject, [(0, 1), (1, 2), (0, 1), (1, 13), (2, 1)], [3, 20, 64])
    inputs = inputs_of(case, subject, tokens)
    kernels = LoraKernels(dataclasses.replace(DEFAULT, pdl=pdl), 132)
    plain = LoraKernels(DEFAULT, 132)
    limits = LoraLimits(tokens, tokens, 64, case.segments.cells)
    plan = TritonLoraPlan(kernels.config, case.geometry, subject.device, limits)
    widths = [group.offsets[-1] for group in case.geometry.groups]
    outputs = [torch.zeros(tokens, n, dtype=dtype, device=subject.device) for n in widths]

    def step(which: LoraKernels) -> None:
        for group, x, y in zip(case.geometry.groups, inputs, outputs):
            given = LoraSite(group, case.layer), LoraStep(case.pool, plan)
            which.expand(y, which.shrink(x, *given), *given, add=False)

    plan.fill(part_of(case, [1]).segments, tokens)
    step(kernels)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(kernels)
    for chosen in ([0, 1, 2, 3, 4], [3], [], [2, 4]):
        part = part_of(case, chosen)
        plan.fill(part.segments if chosen else None, tokens)
        subject.poison()
        graph.replay()
        found = [y.clone() for y in outputs]
        step(plain)
        for index, (y, x) in enumerate(zip(found, inputs)):
            truth = lora_truth(part, x, case.geometry.groups[index])
            assert truth.excess(y) <= 1
            assert torch.equal(y, outputs[index])


GROUPS = ("qkv", "o", "gate_up", "down")


def linears(config: LoraConfig, case: LoraCase, tokens: int, dtype: torch.dtype) -> Linears:
    """A layer's four linears with adapters as models call them, and what they gave last."""
    generator = torch.Generator().manual_seed(5)
    weights = [
        (torch.randn(group.offsets[-1], group.in_features, generator=generator) * group.in_features**-0.5)
        for group in case.geometry.groups
    ]
    made = TritonOps(lora=LoraKernels(config, 132))
    inputs = inputs_of(case, Subject("gpu", dtype), tokens)
    return Linears(made, case, inputs, [Weight(w.to(dtype).to(case.pool.device)) for w in weights], [])


@dataclasses.dataclass
class Linears:
    made: TritonOps
    case: LoraCase
    inputs: list[torch.Tensor]
    weights: list[Weight]
    outputs: list[torch.Tensor]

    def step(self, plan: TritonLoraPlan) -> None:
        case = self.case
        self.outputs = []
        for group, x, weight in zip(case.geometry.groups, self.inputs, self.weights):
            given = AdaptedLinear(group, case.layer, weight, None), LoraStep(case.pool, plan)
            if group.name == "gate_up":
                self.outputs.append(self.made.lora_gated(x, *given))
            else:
                self.outputs.append(self.made.lora_summands(x, *given).whole)

    def check(self, part: LoraCase, dtype: torch.dtype) -> None:
        for group, x, weight, y in zip(part.geometry.groups, self.inputs, self.weights, self.outputs):
            truth = adapted_truth(part, x, weight.data, None, group)
            if group.name == "gate_up":
                truth = rounding.silu_mul(truth, dtype).rounded(dtype)
            assert truth.excess(y) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "beside",
    [
        None,
        Beside(DEFAULT.short, pdl=True),
        Beside(DEFAULT.short, GROUPS),
        Beside(DEFAULT.short, GROUPS, True),
    ],
)
def test_captured_linears(dtype: torch.dtype, beside: Beside | None) -> None:
    """Replayed with more segments than at capture, fewer and none, on one stream and on two; dependent launch
    changes no bit, nor does a second replay."""
    subject, tokens = Subject("gpu", dtype), 24
    case = case_of(subject, [(0, 1), (1, 2), (0, 1), (1, 13), (2, 1)], [3, 20, 64])
    found = []
    for pdl in (False, True):
        table = () if beside is None else ((tokens, beside),)
        layer = linears(dataclasses.replace(DEFAULT, pdl=pdl, beside=table), case, tokens, dtype)
        limits = LoraLimits(tokens, tokens, 64, case.segments.cells)
        fixed = layer.made.lora_plan(case.geometry, subject.device, limits)
        fixed.fill(part_of(case, [1]).segments, tokens)
        layer.step(fixed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer.step(fixed)
        for chosen in ([0, 1, 2, 3, 4], [3], [], [2, 4]):
            part = part_of(case, chosen)
            fixed.fill(part.segments if chosen else None, tokens)
            subject.poison()
            graph.replay()
            layer.check(part, dtype)
            first = [y.clone() for y in layer.outputs]
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(first, layer.outputs))
            found.append(first)
    half = len(found) // 2
    for plain, dependent in zip(found[:half], found[half:]):
        assert all(torch.equal(a, b) for a, b in zip(plain, dependent))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pdl", [False, True])
def test_prompts(dtype: torch.dtype, pdl: bool) -> None:
    """Long runs in a batch with short ones and none: expand writes and the product adds."""
    subject = Subject("gpu", dtype)
    case = case_of(subject, [(3, 1), (0, 300), (2, 1), (1, 150)], [16, 7, 64])
    config = dataclasses.replace(DEFAULT, pdl=pdl, writes_from=1, mixed=())
    layer = linears(config, case, case.num_tokens + 5, dtype)
    plan = layer.made.lora_plan(case.geometry, subject.device)
    plan.fill(case.segments, case.num_tokens)
    assert len(plan.parts) == 2
    subject.poison()
    layer.step(plan)
    layer.check(case, dtype)
    first = layer.outputs
    layer.step(plan)
    assert all(torch.equal(a, b) for a, b in zip(first, layer.outputs))
