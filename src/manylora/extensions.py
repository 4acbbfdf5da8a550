"""Commands and policies that other distributions add to ``manylora``, as entry points.

``manylora.commands``: functions that add a parser to the command line's subparsers. The parser's default ``run``
is given the arguments and returns the exit code. ``manylora.policies``: tables that say, by kind (cache, router,
merge) and name, where a policy is, as ``module:Class``. The laboratory is also found where it can be imported but
is not installed, as in a checkout on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

GROUP = "manylora.commands"
POLICIES = "manylora.policies"
LAB = ("bench", "profile", "reproduce", "workload")
"""The laboratory's commands."""

AddParser = Callable[[Any], None]


def find_commands() -> dict[str, AddParser]:
    """Commands by name."""
    found = _loaded(GROUP)
    if importlib.util.find_spec("manylora_lab") is not None:
        found |= importlib.import_module("manylora_lab.commands").COMMANDS
    return found


@functools.cache
def find_policies(kind: str) -> dict[str, str]:
    """The ``module:Class`` of each policy of a kind, by name."""
    tables = _loaded(POLICIES)
    if importlib.util.find_spec("manylora_lab") is not None:
        tables["lab"] = importlib.import_module("manylora_lab.baselines").POLICIES
    return {name: place for table in tables.values() for name, place in table.get(kind, {}).items()}


def _loaded(group: str) -> dict[str, Any]:
    """What the entry points of a group name. One whose package is gone is left out."""
    found = {}
    for point in importlib.metadata.entry_points(group=group):
        with contextlib.suppress(ModuleNotFoundError):
            found[point.name] = point.load()
    return found
