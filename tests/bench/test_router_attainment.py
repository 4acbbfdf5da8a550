"""Which requests meet the objective: the company that they had, and the cells that are looked at."""

from __future__ import annotations

from typing import Any

import pytest
from manylora_lab.benchmarks import router_proof
from manylora_lab.benchmarks.router_attainment import company, examine, runs_of
from manylora_lab.benchmarks.router_proof import ProofRun, measure
from manylora_lab.sim.replay import Outcome
from manylora_lab.workloads.stream import Piece, StreamRequest

FILES = ("none", "none")


def between(first_s: float, end_s: float) -> Outcome:
    request = StreamRequest(0.0, 0, 0, 0, (Piece(0, 8),), 4)
    return Outcome(request, 8, 0.0, first_s=first_s, end_s=end_s, num_tokens=4)


def test_company_by_hand() -> None:
    """The first is alone for a third of its time, with one for another, and with two for the last."""
    served = [between(1.0, 4.0), between(2.0, 5.0), between(3.0, 4.0), between(6.0, 7.0)]
    mean = company(served)
    assert [mean(each) for each in served] == pytest.approx([2.0, 2.0, 3.0, 1.0])


def test_a_run_gives_the_proofs_attainment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(router_proof.DURATION_S, "chatbot", 4.0)
    run = ProofRun("chatbot", 0.8, 0.05, 99, "manylora", FILES)
    found = examine(run)
    assert found["slo_attainment"] == measure(run)["slo_attainment"]
    assert 0 < found["met"] <= found["requests"]
    bands = found["by_company"]
    assert bands[0]["met"] / bands[0]["requests"] >= found["met"] / found["requests"]


def test_only_cells_that_do_not_hold_are_run() -> None:
    cell: dict[str, Any] = {
        "workload": "agent",
        "load": 0.5,
        "delay_s": 0.2,
        "seeds": [2, 3],
        "best_met": "random",
    }
    record = {"cells": [{**cell, "is_attainment_kept": False}, {**cell, "is_attainment_kept": True}]}
    assert runs_of([record, record], FILES) == [
        ProofRun("agent", 0.5, 0.2, seed, router, FILES)
        for seed in (2, 3)
        for router in ("manylora", "random")
    ]
