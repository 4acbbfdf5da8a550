"""Copies of adapters that a router has replicas keep, through links and real processes."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest

from manylora.cluster import messages
from tests.cluster.process import NAMES, Cluster
from tests.cluster.replays import replay_all
from tests.e2e.process import wait_until


@pytest.mark.parametrize("is_pinned", [True, False])
def test_the_order_crosses_a_link(is_pinned: bool) -> None:
    order = messages.KeepAdapter(7, is_pinned)
    decoder = msgspec.msgpack.Decoder(messages.ToReplicaFromRouter)
    assert decoder.decode(msgspec.msgpack.encode(order)) == order


@pytest.mark.long
def test_replicas_keep_what_dlora_places(tmp_path: Path) -> None:
    args = ("--replicas", "2", "--router", "dlora-proactive", "--router-set", "dlora-proactive.replan_s=0.5")
    journal = tmp_path / "journal"
    with Cluster(*args, "--device-pool", "240MiB", "--journal", str(journal), folder=tmp_path) as cluster:
        cluster.wait_ready()
        cluster.wait_replicas(2)

        cluster.complete(model=NAMES[0])  # one replica has it then, and the other is to have a copy

        def is_pinned() -> bool:
            return any('"PinAdapter"' in path.read_text() for path in tmp_path.glob("journal.r?.*"))

        wait_until(is_pinned, "a copy that is kept", 120.0)
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.wait_exit() == 0
    assert len(replay_all(tmp_path)) == 3
