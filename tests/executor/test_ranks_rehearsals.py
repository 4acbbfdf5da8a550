"""Starts of several ranks that compile ahead: rehearsals run alone, leave nothing behind, and come in turn."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from manylora.devices.peers import Peers
from manylora.executor import build, graphs, plan
from manylora.executor.build import RankBuild, in_turn
from manylora.executor.probing import warm_up
from manylora.kernels.select import compiling_ahead
from tests.executor.conftest import Files
from tests.executor.test_graphs import check, open_all
from tests.executor.test_ranks_graphs import check_alike
from tests.executor.test_ranks_merging import RankedRig
from tests.threaded_ranks import RankThread, threaded_ranks

__all__ = ["threaded_ranks"]

Steps = Sequence[Callable[[], object]]
BUCKETS = 2 * 6
"""Of 1, 2, 4, 6, 16 and 32 tokens, with adapters and without."""


class Compilers:
    """Stands for ``compiling_ahead``. The first rank finds nothing compiled, the second all that the first has had
    compiled: so only the first rehearses all steps."""

    def __init__(self, threads: list[RankThread]) -> None:
        self._threads = threads
        self.ran: list[tuple[int, int]] = []
        """Of each rehearsal whose it was, and its steps, in the order of their ends."""
        self.num_closed = 0
        self._running = threading.Lock()

    @contextlib.contextmanager
    def compiling_ahead(self, device: torch.device) -> Iterator[Any]:
        yield self.rehearse
        self.num_closed += 1

    def rehearse(self, steps: Steps, num_decisive: int) -> bool:
        place = next(n for n, one in enumerate(self._threads) if one is threading.current_thread())
        assert self._running.acquire(blocking=False), "one rank at a time"
        chosen = steps if place == 0 else steps[:num_decisive]
        for step in chosen:
            step()
        self.ran.append((place, len(chosen)))
        self._running.release()
        return place == 0


@pytest.fixture
def compilers(threaded_ranks: list[RankThread], monkeypatch: pytest.MonkeyPatch) -> Compilers:
    found = Compilers(threaded_ranks)
    monkeypatch.setattr(build, "compiling_ahead", found.compiling_ahead)
    monkeypatch.setattr(plan.Plan, "task", functools.partialmethod(plan.Plan.task, pads=True))
    monkeypatch.setattr(graphs, "MIXED_TOKENS", (16, 32))
    monkeypatch.setattr(graphs, "RANK_CLASSES", (16,))
    return found


def made(files: Files, folder: Path, sharding: str) -> RankedRig:
    sizes: dict[str, Any] = {"num_pages": 400, "page_bytes": 3072, "max_num_seqs": 6}
    return RankedRig(files.model, folder, sharding=sharding, max_batch_tokens=40, **sizes)


@pytest.mark.parametrize("sharding", ["sharded", "replicated"])
def test_captures_are_rehearsed(
    sharding: str, files: Files, tmp_path: Path, compilers: Compilers, threaded_ranks: list[RankThread]
) -> None:
    """By the first rank all of them, then by the second those that tell; steps serve as if there had been none."""
    rig = made(files, tmp_path, sharding)
    for adapter, path in sorted(files.adapters.items()):
        rig.serve(adapter, path)
    assert compilers.ran == [(0, BUCKETS), (1, 2)]
    assert compilers.num_closed == 2
    assert len(check_alike(threaded_ranks)) == BUCKETS
    ranks = [thread.rank for thread in threaded_ranks]
    for rank in ranks:
        assert rank is not None
        counts = {purpose: one.count for purpose, one in rank._peers.traffic.items()}
        # To meet, and before and after each capture.
        assert counts["start"] == 1 + 2 * BUCKETS
        assert not any(count for purpose, count in counts.items() if purpose != "start")
    open_all(rig, 1, 3, 6)
    rig.decode(2, 1, 3, 6)
    check(rig, files)
    check_alike(threaded_ranks)
    rig.worker.close()


def test_eager_steps_are_rehearsed(
    files: Files,
    tmp_path: Path,
    threaded_ranks: list[RankThread],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before serving, by one rank alone, with adapters and without; each draws a token that there is."""
    tokens: list[int] = []

    class Ended(Exception):
        """Nothing of the warming up itself, which needs both ranks."""

    def prepared(rank: RankBuild, worker: Any, limits: Any) -> None:
        peers = rank._peers
        assert peers is not None
        if peers.rank == 0:
            before = peers.num_exchanges

            def rehearse(steps: Steps, num_decisive: int) -> bool:
                with peers.leaving_out():
                    tokens.extend(done.tokens[0][1][0] for step in steps for done in [step()])  # type: ignore[attr-defined]
                raise Ended

            with pytest.raises(Ended):
                warm_up(worker, limits, None, rehearse)
            assert peers.num_exchanges == before

    monkeypatch.setattr(RankBuild, "prepare", prepared)
    with caplog.at_level(logging.WARNING):
        rig = made(files, tmp_path, "sharded")
    assert len(tokens) >= 3
    assert all(0 <= token < 97 for token in tokens)
    assert not caplog.records
    rig.serve(1, files.adapters[1])
    rig.open(1, [5, 6, 7], adapter=1)
    rig.decode(3, 1)
    check(rig, files)
    rig.worker.close()


def test_a_rehearsal_that_fails_leaves_nothing_out() -> None:
    peers = Peers(1, 2)
    with contextlib.suppress(RuntimeError), peers.leaving_out():
        assert peers.leaves_out
        raise RuntimeError("a rehearsal fails")
    assert not peers.leaves_out


def test_without_a_compiler_ranks_do_not_meet() -> None:
    with compiling_ahead(torch.device("cpu")) as rehearse:
        assert in_turn(rehearse, None) is None  # type: ignore[arg-type]
