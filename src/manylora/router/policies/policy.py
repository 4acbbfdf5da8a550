"""What a routing policy decides. Owns the questions; the router asks them and carries the answers out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from manylora.config import ConfigError, place_of
from manylora.config.named import imported_class
from manylora.config.routing import ROUTERS, NoParameters, RouterConfig, RouterParameters, parameter_lines
from manylora.protocol.routing import Place, Planned, ReplicaId, Solve, Solved, Unplace
from manylora.router.fleet import Fleet
from manylora.router.replicas import ReplicaState
from manylora.router.requests import LiveRequest
from manylora.types import RequestId


@dataclasses.dataclass(frozen=True, slots=True)
class Relocation:
    """A request should leave its replica; ``target``: for which, None: for the one that is then chosen.

    It is made where it gains more seconds than it costs, times two for each move of the request before it, and
    not within the cool-down; one that ``is_forced`` (its replica has no page left) is made at once. ``attempt``:
    of the request, when this was thought of.
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
"""What a policy wants besides choosing."""


class RoutingPolicy:
    """Subclasses say which replica a request goes to. None: it waits in the router's queue, and so do those behind
    it."""

    parameters: ClassVar[type[RouterParameters]] = NoParameters
    handover: ClassVar[Literal["wait", "drop"]] = "wait"
    """Whether a request that moves is assigned anew when its replica has let it go, or at once."""

    def __init__(self, parameters: Any) -> None:
        """``parameters``: a record of the class's ``parameters``."""

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """An open replica that can hold the request, or None."""
        raise NotImplementedError

    def on_timer(self, view: Fleet) -> Sequence[Wish]:
        """What should change now. Asked on every tick, and when a replica reports that it is out of pages."""
        return ()

    def on_solved(self, view: Fleet, solved: Solved) -> Sequence[Wish]:
        """What follows from the answer to a Solve that this policy wished for."""
        return ()


def find_router(name: str) -> type[RoutingPolicy]:
    """The policy of that name, which settings have checked; raises ConfigError where its class is not there."""
    found = imported_class("router", place_of("router", ROUTERS, name), RoutingPolicy)
    if found.choose is RoutingPolicy.choose:
        raise ConfigError(f"router {name!r} has no method choose, which says where a request goes")
    return found


def router_help(name: str) -> str:
    """The parameters of a routing policy, a line each. Raises ConfigError."""
    RouterConfig(name)
    return "\n".join(parameter_lines(name, find_router(name).parameters))
