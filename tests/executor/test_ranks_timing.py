"""What sums over ranks take: asked of all ranks at once, between steps, and no part of what steps are told by."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from manylora.devices.device import Device, Tensors
from manylora.devices.peers import Peers, Purpose
from manylora.executor.ranks import process
from manylora.executor.ranks.executor import RanksLost
from manylora.executor.ranks.timing import EXCHANGES, exchange_seconds
from manylora.executor.ranks.wire import ExchangeTimed, TimeExchange, packed, unpacked
from manylora.protocol import DEVICE_COMMANDS
from tests.executor.conftest import Files
from tests.executor.test_ranks_merging import RankedRig
from tests.threaded_ranks import RankThread, threaded_ranks

__all__ = ["threaded_ranks"]

PROMPT = [5, 9, 2, 7]


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


@pytest.mark.parametrize("is_captured", [False, True])
def test_sums_of_so_many_bytes(is_captured: bool) -> None:
    peers, device = NotedPeers(), NotedDevice()
    seconds = exchange_seconds(peers, device, torch.bfloat16, 4096, is_captured)
    assert 0 < seconds < 1
    assert set(peers.sums) == {(4096, torch.bfloat16)}
    assert len(peers.sums) % EXCHANGES == 0
    assert device.num_captures == is_captured


def test_between_steps(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threaded_ranks: list[RankThread]
) -> None:
    """The slower rank's time counts; steps before and after go on as they would; a rank that fails is lost."""
    rig = RankedRig(files.model, tmp_path, sharding="sharded", num_pages=400, page_bytes=3072)
    rig.serve(1, files.adapters[1])
    told = {0: 2e-3, 1: 3e-3}

    def timed(*exchange: Any) -> float:
        exchange_seconds(*exchange)
        place = next(n for n, thread in enumerate(threaded_ranks) if thread is threading.current_thread())
        if not told:
            raise ValueError("no memory")
        return told[place]

    monkeypatch.setattr(process, "exchange_seconds", timed)
    rig.open(1, PROMPT, adapter=1)
    rig.decode(2, 1)
    ranks: Any = rig.worker
    traffic = rig.direct.state().traffic
    assert ranks.exchange_s(240) == 3e-3
    assert rig.direct.state().traffic == traffic, "of the base, adapters and sampling"
    rig.decode(3, 1)
    files.reference.check_greedy(PROMPT, rig.sequences[1].generated, files.path(1))
    first, second = (thread.rank for thread in threaded_ranks)
    assert first is not None
    assert second is not None
    assert first._peers.digest == second._peers.digest
    told.clear()
    with pytest.raises(RanksLost, match="failed: ValueError: no memory"):
        ranks.exchange_s(240)
    rig.worker.close()


def test_it_is_a_command_of_the_driver_alone() -> None:
    """Which no journal has, and no policy gives."""
    assert TimeExchange not in DEVICE_COMMANDS
    for message in (TimeExchange(4096), ExchangeTimed(1e-5)):
        assert unpacked(packed(message)) == message
