"""Steps at fixed sizes of several ranks: all capture the same ones, whatever fails on one, and exchange alike.

Ranks are threads; on the CPU a replay runs the step's code again.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from manylora.devices.device import Device
from manylora.devices.peers import Exchange, Peers
from manylora.executor import graphs, plan
from manylora.executor.graphs import Bucket, StepGraphs
from manylora.executor.ranks.process import _Rank
from manylora.flags import build_settings
from tests.executor.conftest import Files
from tests.executor.test_graphs import PROMPTS, check, open_all
from tests.executor.test_ranks_merging import RankedRig
from tests.threaded_ranks import RankThread, threaded_ranks

__all__ = ["threaded_ranks"]

ROOM = 3
"""Buckets that are captured where the second rank fails at the next."""


@pytest.fixture
def made(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threaded_ranks: list[RankThread]
) -> Callable[[str], RankedRig]:
    """Two ranks whose steps are padded, with all adapters."""
    monkeypatch.setattr(plan.Plan, "task", functools.partialmethod(plan.Plan.task, pads=True))
    monkeypatch.setattr(graphs, "MIXED_TOKENS", (16, 32))
    monkeypatch.setattr(graphs, "RANK_CLASSES", (16,))

    def make(sharding: str) -> RankedRig:
        sizes: dict[str, Any] = {"num_pages": 400, "page_bytes": 3072, "max_num_seqs": 6}
        rig = RankedRig(files.model, tmp_path, sharding=sharding, max_batch_tokens=40, **sizes)
        for adapter, path in sorted(files.adapters.items()):
            rig.serve(adapter, path)
        return rig

    return make


def ranks_of(threads: list[RankThread]) -> list[_Rank]:
    return [thread.rank for thread in threads if thread.rank is not None]


def graphs_of(rank: _Rank) -> StepGraphs:
    assert rank._worker is not None
    assert rank._worker._graphs is not None
    return rank._worker._graphs


def check_alike(threads: list[RankThread]) -> set[Bucket]:
    """The buckets that both have captured, and what they have exchanged, are the same."""
    first, second = ranks_of(threads)
    captured = set(graphs_of(first).captured)
    assert set(graphs_of(second).captured) == captured
    assert first._peers.digest == second._peers.digest
    assert first._peers.traffic == second._peers.traffic
    return captured


def run_all(rig: RankedRig, files: Files) -> None:
    """Prompts and decoding, of the base and of adapters, full buckets and not, in turn and overlapped."""
    open_all(rig, 1, 3, 6)
    for chosen in [(1,), (3, 6), (6, 3, 1), (1, 3)]:
        rig.decode(1, *chosen)
    rig.open(2, list(range(1, 31)), adapter=2)
    rig.step(rig.row(2, 24), rig.row(3), rig.row(1))
    rig.decode_overlapped(3, 2, 6, 1)
    check(rig, files)


@pytest.mark.parametrize("sharding", ["sharded", "replicated"])
def test_tokens_and_exchanges(
    sharding: str, made: Callable[[str], RankedRig], files: Files, threaded_ranks: list[RankThread]
) -> None:
    rig = made(sharding)
    buckets = check_alike(threaded_ranks)
    assert {(bucket.num_tokens, bucket.max_rank) for bucket in buckets} == {
        (size, rank) for size in (1, 2, 4, 6, 16, 32) for rank in (0, 16)
    }
    run_all(rig, files)
    assert check_alike(threaded_ranks) == buckets
    # A replay's exchanges count as those of any step, with its padding.
    rank = ranks_of(threaded_ranks)[0]
    hidden, layers = 60, 3
    before = {purpose: (one.count, one.num_bytes) for purpose, one in rank._peers.traffic.items()}
    rig.open(7, PROMPTS[2][1], 0)
    rig.decode(1, 7)
    assert rank._worker is not None
    assert rank._worker.bucket == Bucket(16, 6, 0)
    base, sampling = rank._peers.traffic["base"], rank._peers.traffic["sampling"]
    assert base.count - before["base"][0] == 1 + 2 * layers
    assert base.num_bytes - before["base"][1] == (1 + 2 * layers) * 16 * hidden * 4
    assert sampling.count - before["sampling"][0] == 1
    rig.worker.close()


def test_what_was_not_captured_before_serving(
    made: Callable[[str], RankedRig],
    files: Files,
    threaded_ranks: list[RankThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs eagerly, on all ranks: more tokens, and a class of ranks that one rank would capture now."""
    monkeypatch.setattr(graphs, "RANK_CLASSES", (8, 16))
    monkeypatch.setattr(graphs, "COMMON_RANK", 8)
    rig = made("sharded")
    buckets = check_alike(threaded_ranks)
    assert {bucket.max_rank for bucket in buckets} == {0, 8}
    rig.open(1, list(range(1, 39)), adapter=1)
    rig.decode(3, 1)
    rig.open(2, PROMPTS[2][1], adapter=2)  # of rank 9
    rig.decode(2, 1, 2)
    assert check_alike(threaded_ranks) == buckets
    check(rig, files)
    rig.worker.close()


def fail_to_prepare(monkeypatch: pytest.MonkeyPatch, fails: Callable[[], bool]) -> None:
    prepared: Any = StepGraphs._prepared

    def preparing(self: StepGraphs, *args: Any) -> Any:
        if fails():
            raise RuntimeError("no room left\nat length")
        return prepared(self, *args)

    monkeypatch.setattr(StepGraphs, "_prepared", preparing)


def fail_to_capture(monkeypatch: pytest.MonkeyPatch, fails: Callable[[], bool]) -> None:
    """After the run that compiles, which exchanges."""

    def capture(self: Device, run: Callable[[], object]) -> Callable[[], object]:
        run()
        if fails():
            raise RuntimeError("no room left")
        return run

    monkeypatch.setattr(Device, "capture", capture)


def hold_too_much(monkeypatch: pytest.MonkeyPatch, fails: Callable[[], bool]) -> None:
    monkeypatch.setattr(Device, "captured_bytes", lambda self: graphs.MAX_BYTES * fails())


def at_the_second(threads: list[RankThread], number: int) -> Callable[[], bool]:
    """Whether this is the call of that number, or a later one, on the second rank."""
    calls: list[None] = []

    def fails() -> bool:
        if threads.index(threading.current_thread()) == 0:  # type: ignore[arg-type]
            return False
        calls.append(None)
        return len(calls) > number

    return fails


@pytest.mark.parametrize("fail", [fail_to_prepare, fail_to_capture, hold_too_much])
def test_a_rank_that_can_capture_no_more(
    fail: Callable[..., None],
    made: Callable[[str], RankedRig],
    files: Files,
    threaded_ranks: list[RankThread],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All stop where one must, and serve by what they have."""
    fail(monkeypatch, at_the_second(threaded_ranks, ROOM))
    with caplog.at_level(logging.WARNING):
        rig = made("sharded")
    captured = check_alike(threaded_ranks)
    assert len(captured) == ROOM
    warnings = [record.getMessage() for record in caplog.records if "captured ones" in record.getMessage()]
    assert len(warnings) == 2
    assert any("another rank" in line for line in warnings)
    run_all(rig, files)
    assert check_alike(threaded_ranks) == captured
    rig.worker.close()


@pytest.mark.parametrize("is_full", [False, True])
def test_captures_hold_up_to_the_limit_of_several_ranks(
    is_full: bool,
    made: Callable[[str], RankedRig],
    threaded_ranks: list[RankThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a model of three layers, where one rank's captures would be full."""
    monkeypatch.setattr(graphs, "_RANKED_LAYER_BYTES", graphs.MAX_BYTES)
    held = 3 * graphs.MAX_BYTES - (not is_full)
    monkeypatch.setattr(Device, "captured_bytes", lambda _: held)
    rig = made("sharded")
    assert len(check_alike(threaded_ranks)) == (0 if is_full else 12)
    rig.worker.close()


def test_pools_leave_room_for_captures(files: Files) -> None:
    def task(cuda_graphs: str) -> plan.RankTask:
        values = {"model": str(files.model), "device": "cpu", "tensor_parallel_size": 2}
        settings, _ = build_settings({**values, "cuda_graphs": cuda_graphs})
        return plan.planned(settings)._replace(kind="cuda", device=None).task()

    padded, eager = task("on"), task("off")
    assert padded.pads_steps
    assert not eager.pads_steps
    assert padded.graph_bytes == graphs.graph_bytes(3, 2)
    assert padded.activation_bytes - eager.activation_bytes == padded.graph_bytes


def test_a_rank_that_fails_where_others_wait_for_it_ends_the_start(
    made: Callable[[str], RankedRig], threaded_ranks: list[RankThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = at_the_second(threaded_ranks, ROOM)

    def capture(self: Device, run: Callable[[], object]) -> Callable[[], object]:
        if fails():
            raise RuntimeError("out of memory")
        run()
        return run

    monkeypatch.setattr(Device, "capture", capture)
    with pytest.raises(RuntimeError, match=r"rank 1 could not start: .* to be captured.*: out of memory"):
        made("sharded")


def test_ranks_of_which_one_replays_and_one_does_not(
    made: Callable[[str], RankedRig], threaded_ranks: list[RankThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though their exchanges are alike, as they are where a bucket is full."""
    rig = made("replicated")
    open_all(rig, 1, 3)
    run, is_second = StepGraphs.run, at_the_second(threaded_ranks, 0)

    def running(self: StepGraphs, *args: Any) -> Any:
        if not is_second():
            return run(self, *args)
        self.ran = None
        return None

    monkeypatch.setattr(StepGraphs, "run", running)
    with pytest.raises(RuntimeError, match="the ranks disagree about step"):
        rig.decode(1, 1, 3)


def test_a_replays_exchanges_count_as_those_that_were_listed() -> None:
    made, replayed = Peers(0, 2), Peers(0, 2)
    exchanges: list[Exchange] = [("base", 3), ("lora", 2), ("sampling", 5)]
    listed: list[Exchange] = [("base", 1)]
    for purpose, size in exchanges:
        made.note(torch.zeros(size), purpose)
    with replayed.listed(listed):
        for purpose, size in exchanges:
            replayed.note(torch.zeros(size), purpose)
    assert (replayed.num_exchanges, replayed.digest) == (0, 0)
    replayed.note_all(listed)
    assert (replayed.num_exchanges, replayed.digest) == (made.num_exchanges, made.digest)
    assert replayed.traffic == made.traffic
