"""Commands that other distributions add to ``manylora``: entry points of the group ``manylora.commands``.

An entry point is a function that adds its parser to the command line's subparsers; the parser's default ``run`` is
given the arguments and returns the exit code. The laboratory is also found where it can be imported but is not
installed, as in a checkout on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

GROUP = "manylora.commands"
LAB = ("bench", "profile", "reproduce", "workload")
"""The laboratory's commands."""

AddParser = Callable[[Any], None]


def find_commands() -> dict[str, AddParser]:
    """Commands by name. One whose package is gone is left out."""
    found: dict[str, AddParser] = {}
    if importlib.util.find_spec("manylora_lab") is not None:
        found |= importlib.import_module("manylora_lab.commands").COMMANDS
    for point in importlib.metadata.entry_points(group=GROUP):
        if point.name not in found:
            with contextlib.suppress(ModuleNotFoundError):
                found[point.name] = point.load()
    return found
