"""What an adapter costs that nobody asks for."""

from __future__ import annotations

import tracemalloc

from manylora.config.policy import PolicyConfig
from manylora.policy.replica import Replica
from manylora.protocol.commands import Report
from manylora.protocol.events import AdapterAdded, AdapterRemoved, Arrive, ReportDue
from manylora.types import Request, SamplingParams
from tests.policy.invariants import check
from tests.policy.reports import gauges

COUNT = 40_000
MOST_BYTES = 300


def test_an_idle_adapter_takes_little_memory_and_is_told_of_all_the_same() -> None:
    replica = Replica(PolicyConfig(100, 16, 200, 8, 64))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for adapter in range(1, COUNT + 1):
        assert replica.handle(AdapterAdded(adapter, 3), 0.0) == []
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert taken / COUNT < MOST_BYTES
    told = gauges(replica).adapters
    assert len(told) == COUNT + 1
    assert {(use.state, use.num_pages, use.host_state) for use in told[1:]} == {("absent", 3, "none")}
    (report,) = replica.handle(ReportDue("changed"), 0.0)
    assert isinstance(report, Report)
    assert len(report.gauges.adapters) == 1, "the base alone"


def test_one_that_is_asked_for_is_found() -> None:
    replica = Replica(PolicyConfig(100, 16, 200, 8, 64))
    for adapter in range(1, 10):
        replica.handle(AdapterAdded(adapter, 3), 0.0)
    replica.handle(Arrive(Request("a", 7, (1, 2), SamplingParams(seed=0))), 0.0)
    check(replica)
    states = {use.adapter: use.state for use in gauges(replica).adapters}
    assert [adapter for adapter, state in states.items() if state == "loading"] == [7]
    for adapter in (3, 7):
        replica.handle(AdapterRemoved(adapter), 0.0)
    check(replica)
    assert [use.adapter for use in gauges(replica).adapters] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
