"""A router under test, and records made short."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from manylora.config.routing import RouterConfig
from manylora.protocol.commands import Status
from manylora.protocol.routing import (
    Asked,
    Assign,
    Listed,
    ReplicaFacts,
    ReplicaReport,
    ReplicaUp,
    RouterCommand,
    RouterEvent,
    StepPlane,
)
from manylora.router.router import Router
from tests.router.invariants import check

FACTS = ReplicaFacts(
    num_pages=1000,
    page_tokens=16,
    max_model_len=4096,
    max_seqs=32,
    planes=(StepPlane(0.01, 1e-4, 1e-7, 1e-5, 1e-6),),
    token_s=1e-4,
    page_in_s=1e-4,
    page_read_s=1e-3,
)
CARASERVE = {
    "decode_slope_s": 4e-6, "decode_base_s": 0.03, "prefill_slope_s": 1e-4, "prefill_base_s": 0.01, "slo_s": 0.04,
}  # fmt: skip
"""Made up: a device's coefficients have no defaults."""

_Command = TypeVar("_Command")


def config_of(policy: str, settings: dict[str, Any] | None = None, **values: Any) -> RouterConfig:
    """A router's settings; caraserve's coefficients where none are given."""
    given = {**(CARASERVE if policy == "caraserve" else {}), **(settings or {})}
    pairs = tuple((key, str(value)) for key, value in given.items())
    return RouterConfig(policy, pairs, **values)


class Rig:
    """Feeds a router, checks its invariants after each event, and keeps all that it commanded."""

    def __init__(self, config: RouterConfig) -> None:
        self.router = Router(config)
        self.now = 0.0
        self.commands: list[RouterCommand] = []
        self._seqs: dict[int, int] = {}

    def tell(self, event: RouterEvent, at: float | None = None) -> list[RouterCommand]:
        """What the router commands at this event."""
        self.now = self.now if at is None else at
        commands = self.router.handle(event, self.now)
        check(self.router)
        self.commands += commands
        return commands

    def up(self, *facts: ReplicaFacts) -> None:
        """Replicas 0, 1, ... of these facts are up."""
        for replica, each in enumerate(facts):
            self.tell(ReplicaUp(replica, 1, each))

    def list_adapters(self, *ranks: int, num_pages: int = 4) -> None:
        """Adapters 1, 2, ... of these ranks."""
        for adapter, rank in enumerate(ranks, 1):
            self.tell(Listed(adapter, rank, num_pages))

    def ask(self, name: str, adapter: int = 0, prompt_tokens: int = 100, **values: Any) -> int | None:
        """Which replica a new request is assigned to; None where it waits."""
        asked = Asked(name, adapter, prompt_tokens, values.pop("max_tokens", 100), **values)
        return target_of(self.tell(asked), name)

    def accept(self, *names: str) -> None:
        """Their replicas have these requests, as reports say that have seen them."""
        for name in names:
            self.router.requests[name].is_accepted = True

    def report(self, replica: int, **values: Any) -> list[RouterCommand]:
        """A report that has seen all assignments so far."""
        self._seqs[replica] = seq = self._seqs.get(replica, 0) + 1
        numbers = [each.number for each in of_kind(self.commands, Assign) if each.replica == replica]
        status = dataclasses.replace(Status(seq, 0, 0, FACTS.num_pages), **values)
        return self.tell(ReplicaReport(replica, 1, max(numbers, default=0), status))


def of_kind(commands: Sequence[RouterCommand], kind: type[_Command]) -> list[_Command]:
    return [command for command in commands if isinstance(command, kind)]


def target_of(commands: Sequence[RouterCommand], name: str) -> int | None:
    """The replica that the last of these commands assigns the request to."""
    found = [each.replica for each in of_kind(commands, Assign) if each.request == name]
    return found[-1] if found else None
