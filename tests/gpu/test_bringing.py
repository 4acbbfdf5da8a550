"""The kernel that copies pages in groups of layers, beside other work of a GPU."""

from __future__ import annotations

import random

import pytest
import torch

from manylora.devices.cuda import CudaDevice
from manylora.kernels.shapes import PageShape
from manylora.kernels.triton.operations import TritonOps
from manylora.memory.bringing import bringer_of
from manylora.memory.gates import CopyGate
from manylora.memory.pool import Arena, HostPool
from tests.e2e.process import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PAGES, ON_HOST = 60, 80
PAGE = PageShape(32, 16, 8, 128, 2)
TURNS = 30


def test_copies_beside_work_of_every_multiprocessor() -> None:
    """To the same bytes; once a group's word says so its bytes are there, as kernels behind it read them."""
    device = CudaDevice()
    arena, host = (
        Arena(PAGES, PAGE, torch.bfloat16, device),
        HostPool(ON_HOST, PAGE, torch.bfloat16, device),
    )
    wait_until(lambda: host.pages_pinned == ON_HOST, "pinned pages", 30)
    bringer = bringer_of(TritonOps(), arena, host, device, 8)
    assert bringer is not None
    lane, source = device.copy_lane(), random.Random(5)
    busy = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    expected = host.run(0, ON_HOST).view(torch.int16).view(ON_HOST, -1)
    expected.random_(-100, 100)
    found = arena.run(0, PAGES).view(torch.int16).view(PAGES, -1)
    for turn in range(1, TURNS + 1):
        count = source.randint(1, 40)
        pairs = list(zip(source.sample(range(ON_HOST), count), source.sample(range(PAGES), count)))
        gate = CopyGate()
        assert bringer.can_bring(pairs)
        for _ in range(20):
            busy @ busy
        with lane.here():
            lane.begin(device.issued())
            bringer.bring(lane, pairs, gate)
            wait = lane.end()
        for _ in range(20):
            busy @ busy
        assert gate.number == turn
        assert gate.pass_whole(0.0)
        landed = found[[target for _, target in pairs]]
        assert torch.equal(landed.cpu(), expected[[page for page, _ in pairs]])
        assert bringer.words.words.tolist() == [turn] * 8
        assert wait() > 0
    host.close()
