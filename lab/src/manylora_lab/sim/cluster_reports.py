"""What a simulated replica tells the router: its own Status, with its place and the assignments it has had."""

from __future__ import annotations

import dataclasses

from manylora.protocol import Status
from manylora.protocol.routing import ReplicaId, ReplicaReport


def report_of(replica: ReplicaId, seen_upto: int, status: Status) -> ReplicaReport:
    """The report of a replica in its first epoch."""
    fields = {field.name: getattr(status, field.name) for field in dataclasses.fields(status)}
    return ReplicaReport(replica, 1, seen_upto=seen_upto, **fields)
