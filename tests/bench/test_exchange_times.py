"""What sums over ranks take: asked of all ranks at once, in processes of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from manylora_lab.bench.exchange_times import EXCHANGES, exchange_seconds, measure_exchanges

from manylora.devices.device import Device, Tensors
from manylora.devices.peers import Peers, Purpose


class NotedPeers(Peers):
    """Notes the sums that are asked of it."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.sums: list[tuple[int, torch.dtype]] = []

    def add_up(self, tensor: torch.Tensor, purpose: Purpose) -> None:
        assert purpose == "start"
        self.sums.append((tensor.numel() * tensor.itemsize, tensor.dtype))


class NotedDevice(Device):
    num_captures = 0

    def capture(self, run: Callable[[], Tensors]) -> Callable[[], Tensors]:
        self.num_captures += 1
        return run


@pytest.mark.parametrize("captures", [False, True])
def test_sums_of_so_many_bytes(captures: bool) -> None:
    peers, device = NotedPeers(), NotedDevice()
    device.captures = captures
    seconds = exchange_seconds(peers, device, torch.bfloat16, 4096)
    assert 0 < seconds < 1
    assert set(peers.sums) == {(4096, torch.bfloat16)}
    assert len(peers.sums) % EXCHANGES == 0
    assert device.num_captures == captures


def test_two_ranks() -> None:
    assert all(seconds > 0 for seconds in measure_exchanges("cpu", 2, "float32", [1024, 4096]))


def test_a_rank_that_fails() -> None:
    with pytest.raises(RuntimeError, match="exchanges failed"):
        measure_exchanges("cpu", 2, "no dtype", [1024])
