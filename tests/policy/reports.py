"""What a replica reports of itself, for tests that look."""

from __future__ import annotations

from manylora.protocol.commands import Machine, Report
from manylora.protocol.events import ReportDue
from manylora.reports import Counters, Snapshot, Which


def report(replica: Machine, which: Which = "all") -> Report:
    (found,) = replica.handle(ReportDue(which), 0.0)
    assert isinstance(found, Report)
    return found


def gauges(replica: Machine, which: Which = "all") -> Snapshot:
    return report(replica, which).gauges


def counters(replica: Machine) -> Counters:
    return report(replica).counters
