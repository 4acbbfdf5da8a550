"""What a sum over all ranks takes: of tensors like those that steps add up, between steps."""

from __future__ import annotations

import statistics
import time

import torch

from manylora.devices.device import Device, Tensors
from manylora.devices.peers import Peers

EXCHANGES = 16
"""One after the other, as in a step: what is launched ahead of the device does not count."""

_ROUNDS = 7


def exchange_seconds(
    peers: Peers, device: Device, dtype: torch.dtype, num_bytes: int, is_captured: bool
) -> float:
    """The median of some rounds, for one exchange. All ranks ask for the same. ``is_captured``: as steps are."""
    tensor = device.zeros((max(1, num_bytes // dtype.itemsize),), dtype)

    def add_up() -> Tensors:
        for _ in range(EXCHANGES):
            peers.add_up(tensor, "start")
        return (tensor,)

    run = device.capture(add_up) if is_captured else add_up
    run()
    rounds = []
    for _ in range(_ROUNDS):
        device.synchronize()
        began_s = time.perf_counter()
        run()
        device.synchronize()
        rounds.append((time.perf_counter() - began_s) / EXCHANGES)
    return statistics.median(rounds)
