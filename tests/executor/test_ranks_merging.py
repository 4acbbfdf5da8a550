"""Merged weights of several ranks, each of which has a part: right for every row, restored to the bit on all,
whatever fails on one."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manylora.config.merging import MergeConfig, MergeTimes
from manylora.config.sections import EngineSettings
from manylora.executor import build
from manylora.executor.ranks import start
from manylora.protocol.commands import ReportState
from manylora.protocol.executor import ExecutorState
from manylora.types import BASE, RankTraffic
from tests.executor.conftest import Files
from tests.executor.drive import Rig
from tests.executor.test_merging import PROMPT, fail_merges, may_run
from tests.threaded_ranks import RankThread, threaded_ranks, weights_of

__all__ = ["threaded_ranks"]

WAYS = [("sharded", "device"), ("replicated", "host"), ("sharded", "host"), ("replicated", "device")]


class RankedRig(Rig):
    """Two ranks, which are threads."""

    def __init__(self, *args: Any, sharding: str, **settings: Any) -> None:
        self._sharding = sharding
        super().__init__(*args, **settings)

    def built(self, settings: EngineSettings, **how: Any) -> Any:
        ranks: dict[str, Any] = {"tensor_parallel_size": 2, "lora_sharding": self._sharding}
        return start.build_ranks(dataclasses.replace(settings, **ranks), registry_path=how["registry_path"])


@pytest.fixture(params=WAYS, ids="-".join)
def rig(
    request: pytest.FixtureRequest,
    files: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    threaded_ranks: list[RankThread],
) -> Iterator[RankedRig]:
    sharding, copy = request.param
    made = make_rig(files, tmp_path, monkeypatch, sharding, copy)
    yield made
    made.worker.close()


def make_rig(
    files: Files, folder: Path, monkeypatch: pytest.MonkeyPatch, sharding: str, copy: str
) -> RankedRig:
    monkeypatch.setattr(build, "measure_merging", lambda *args, steps_wait: MergeTimes(steps_wait))
    merge = MergeConfig(mode="manylora", copy=copy)
    made = RankedRig(files.model, folder, num_pages=400, page_bytes=3072, merge=merge, sharding=sharding)
    for adapter in sorted(files.adapters):
        made.serve(adapter, files.adapters[adapter])
    return made


def fail_on_the_second(
    threads: list[RankThread], monkeypatch: pytest.MonkeyPatch, failing: set[int]
) -> list[int]:
    """``fail_merges`` of that rank alone."""
    assert threads[1].rank is not None
    worker: Any = SimpleNamespace(worker=threads[1].rank._worker)
    return fail_merges(worker, monkeypatch, failing)


def history(rig: Rig, files: Files, threads: list[RankThread], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the base and of each adapter while one after another is merged, and while switches fail on one rank,
    in each of four groups of projections."""
    ranks = [thread.rank for thread in threads if thread.rank is not None]
    assert len(ranks) == 2
    before = [weights_of(rank) for rank in ranks]
    failing = set[int]()
    calls = fail_on_the_second(threads, monkeypatch, failing)
    for sequence in range(4):
        rig.open(sequence, PROMPT, sequence)
    rig.step(*(rig.row(sequence) for sequence in range(4)))
    for merged in (1, 3, 2, BASE, 2, 1):
        assert rig.merge(merged).ok
        rig.decode(2, *may_run(merged))
        assert ([weights_of(rank) for rank in ranks] == before) == (merged == BASE)
    for group in range(4):
        failing.add(len(calls) + group)
        done = rig.merge(3)
        assert not done.ok
        assert "a launch went wrong" in done.error
        rig.decode(1, *range(4))
        assert [weights_of(rank) for rank in ranks] == before
        failing.clear()
        assert rig.merge(2 - group % 2).ok
        rig.decode(1, 2 - group % 2)
    assert rig.merge(BASE).ok
    assert rig.merge(BASE).ok
    rig.decode(1, *range(4))
    assert [weights_of(rank) for rank in ranks] == before
    for held in rig.sequences.values():
        files.reference.check_greedy(PROMPT, held.generated, files.path(held.adapter))


def test_a_history(
    rig: RankedRig, files: Files, threaded_ranks: list[RankThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.disable(logging.ERROR)
    try:
        history(rig, files, threaded_ranks, monkeypatch)
    finally:
        logging.disable(logging.NOTSET)


def test_an_adapter_that_is_not_there(rig: RankedRig, files: Files) -> None:
    assert rig.merge(1).ok
    done = rig.merge(9)
    assert not done.ok
    assert "adapter 9 is not resident" in done.error
    rig.open(1, PROMPT, 1)
    rig.decode(3, 1)
    files.reference.check_greedy(PROMPT, rig.sequences[1].generated, files.path(1))


def test_weights_that_are_lost_on_one_rank_end_all(
    rig: RankedRig, threaded_ranks: list[RankThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The switch fails there, and so does the way back."""
    logging.disable(logging.ERROR)
    failing = set[int]()
    calls = fail_on_the_second(threaded_ranks, monkeypatch, failing)
    rank = threaded_ranks[1].rank
    assert rank is not None
    merging: Any = rank._worker._merging  # type: ignore[union-attr]

    tried = merging._tried

    def fail() -> None:
        raise RuntimeError("a bus fell off")

    failing.add(len(calls))
    monkeypatch.setattr(
        merging, "_tried", lambda command, failed, write, _: tried(command, failed, write, fail)
    )
    rig.open(1, PROMPT, 1)

    def go_on() -> None:
        for _ in range(3):
            rig.merge(1)
            rig.decode(1, 1)

    with pytest.raises(RuntimeError, match="rank 1 failed: RuntimeError: the base's weights are lost"):
        go_on()
    logging.disable(logging.NOTSET)


def test_exchanges_are_counted(rig: RankedRig, request: pytest.FixtureRequest) -> None:
    """Two of each switch, by which ranks agree; where adapters are sharded one more for each group of projections,
    and one to the base needs none."""
    is_sharded = "sharded" in request.node.name
    before = traffic(rig)
    for adapter in (1, BASE):
        assert rig.merge(adapter).ok
    for now, then in zip(traffic(rig), before, strict=True):
        assert now.merging - then.merging == 4 + 4 * is_sharded
        assert (now.merging_bytes - then.merging_bytes > 4) == is_sharded


def traffic(rig: RankedRig) -> tuple[RankTraffic, ...]:
    """After a step, with whose answer each rank says how it stands."""
    sequence = 100 + rig.num_steps
    rig.open(sequence, PROMPT)
    rig.decode(1, sequence)
    found: list[ExecutorState] = []
    executor: Any = rig.worker
    tell = executor._report
    executor.connect(
        lambda answer: found.append(answer) if isinstance(answer, ExecutorState) else tell(answer)
    )
    executor.obey(ReportState())
    executor.connect(tell)
    return found[0].traffic
