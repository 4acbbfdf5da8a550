"""LoRA kernels in CUDA graphs and with dependent launch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from manylora.kernels.triton.lora_launch import DEFAULT, LoraKernels
from tests.kernels.cases import TOLERANCE
from tests.kernels.implementations import Subject
from tests.kernels.test_lora_kernels import added, case_of, inputs_of, part_of

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
    plan = kernels.reserve(case.geometry, case.segments.cells, tokens, 64)
    widths = [group.offsets[-1] for group in case.geometry.groups]
    outputs = [torch.zeros(tokens, n, dtype=dtype, device=subject.device) for n in widths]

    def step(which: LoraKernels) -> None:
        for group, x, y in zip(case.geometry.groups, inputs, outputs):
            partial = which.shrink(x, case.pool, case.layer, group, plan)
            which.expand(y, partial, case.pool, case.layer, group, plan, add=False)

    kernels.refill(plan, part_of(case, [1]).segments, tokens)
    step(kernels)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(kernels)
    for chosen in ([0, 1, 2, 3, 4], [3], [], [2, 4]):
        part = part_of(case, chosen)
        kernels.refill(plan, part.segments if chosen else None, tokens)
        subject.poison()
        graph.replay()
        found = [y.clone() for y in outputs]
        step(plain)
        for index, (y, x) in enumerate(zip(found, inputs)):
            truth = added(part, x, index)
            assert (y.double() - truth).norm() <= TOLERANCE[dtype] * truth.norm()
            assert torch.equal(y, outputs[index])
