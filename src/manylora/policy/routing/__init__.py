"""The routing policies, each a small class in a file of its own, found by name.

Those of Punica, CaraServe and dLoRA, the simple ones that they are compared with, and ours. A policy of your own
is a subclass of ``RoutingPolicy`` anywhere on the import path, named as ``module:Class``.
"""

from __future__ import annotations

from manylora.config import ConfigError, is_import_name
from manylora.config.routing import ROUTERS, parameter_lines
from manylora.policy.imported import imported_class
from manylora.policy.routing.cache_aware import CacheAware
from manylora.policy.routing.caraserve import CaraServe
from manylora.policy.routing.dlora import Dlora
from manylora.policy.routing.dlora_proactive import DloraProactive
from manylora.policy.routing.dlora_rr import DloraRoundRobin
from manylora.policy.routing.first_fit import FirstFit
from manylora.policy.routing.manylora import CheapestReplica
from manylora.policy.routing.most_idle import MostIdle
from manylora.policy.routing.policy import RoutingPolicy
from manylora.policy.routing.punica import Punica
from manylora.policy.routing.punica_consolidate import PunicaConsolidate
from manylora.policy.routing.random_replica import RandomReplica
from manylora.policy.routing.round_robin import RoundRobin

ROUTING_POLICIES: dict[str, type[RoutingPolicy]] = {
    policy.name: policy
    for policy in (
        RoundRobin, RandomReplica, MostIdle, FirstFit, Punica, PunicaConsolidate, CaraServe,
        DloraRoundRobin, DloraProactive, Dlora, CacheAware, CheapestReplica,
    )
}  # fmt: skip


def find_router(name: str) -> type[RoutingPolicy]:
    """The policy of that name; raises ConfigError for ``module:Class`` where there is none."""
    if not is_import_name(name):
        return ROUTING_POLICIES[name]  # settings refuse names that are not known
    found = imported_class("router", name, RoutingPolicy)
    if found.choose is RoutingPolicy.choose:
        raise ConfigError(f"router {name!r} has no method choose, which says where a request goes")
    return found


def router_help(name: str) -> str:
    """The parameters of a routing policy, a line each. Raises ConfigError."""
    if name not in ROUTERS and not is_import_name(name):
        raise ConfigError(f"router {name!r} is not known: use {', '.join(ROUTERS)}")
    return "\n".join(parameter_lines(name, find_router(name).parameters))
