"""The contract of routing policies. Owns the questions; the router asks them and carries out the answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from manylora.config.declaring import ConfigError
from manylora.config.named import imported_class, place_of
from manylora.config.routing import ROUTERS, NoParameters, RouterConfig, RouterParameters, parameter_lines
from manylora.protocol.routing import Place, Planned, ReplicaId, Solve, Solved, Unplace
from manylora.router.fleet import Fleet
from manylora.router.replicas import ReplicaState
from manylora.router.requests import LiveRequest
from manylora.types import RequestId


@dataclasses.dataclass(frozen=True, slots=True)
class Relocation:
    """A wish that a request leaves its replica for ``target``; None: for the replica chosen then.

    The router makes it if it gains more seconds than it costs, times two for each earlier move of the request,
    and not within the cool-down. It makes one that ``is_forced`` (its replica has no page left) at once.
    ``attempt``: of the request at the moment of the wish.
    """

    request: RequestId
    attempt: int
    source: ReplicaId
    target: ReplicaId | None
    reason: str
    gain_s: float = 0.0
    cost_s: float = 0.0
    is_forced: bool = False


Wish = Relocation | Place | Unplace | Solve | Planned
"""A wish of a policy besides its choices."""


class RoutingPolicy:
    """A routing policy, which chooses the replica of each request."""

    parameters: ClassVar[type[RouterParameters]] = NoParameters
    handover: ClassVar[Literal["wait", "drop"]] = "wait"
    """Assign a moving request anew when its replica has released it (wait), or at once (drop)."""

    def __init__(self, parameters: Any) -> None:
        """``parameters``: a record of the class's ``parameters``."""

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """Return an open replica that can hold the request. None: it waits in the queue, with all behind it."""
        raise NotImplementedError

    def on_timer(self, view: Fleet) -> Sequence[Wish]:
        """Return wishes, on every tick and when a replica reports that it is out of pages."""
        return ()

    def on_solved(self, view: Fleet, solved: Solved) -> Sequence[Wish]:
        """Return wishes that follow from the answer to this policy's Solve."""
        return ()


def find_router(name: str) -> type[RoutingPolicy]:
    """Return the policy class of a name that settings have checked; raise ConfigError if it is not there."""
    found = imported_class("router", place_of("router", ROUTERS, name), RoutingPolicy)
    if found.choose is RoutingPolicy.choose:
        raise ConfigError(f"router {name!r} has no method choose, which says where a request goes")
    return found


def router_help(name: str) -> str:
    """Return the parameters of a routing policy, a line each. Raise ConfigError."""
    RouterConfig(name)
    return "\n".join(parameter_lines(name, find_router(name).parameters))
