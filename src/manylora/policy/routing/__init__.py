"""The routing policies, each a small class in a file of its own, found by name.

Those of Punica, CaraServe and dLoRA, two simple ones, and ours. A policy of your own is a subclass of
``RoutingPolicy`` anywhere on the import path, named as ``module:Class``.
"""

from __future__ import annotations

from manylora.config import ConfigError, place_of
from manylora.config.routing import ROUTERS, RouterConfig, parameter_lines
from manylora.policy.imported import imported_class
from manylora.policy.routing.policy import RoutingPolicy


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
