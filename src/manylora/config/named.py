"""Finds policies by name, and the entry points that other distributions add to ``manylora``.

A policy is the product's own, another distribution's, or any class as ``module:Class``. Entry points of
``manylora.commands`` are functions that add a parser to the command line's subparsers. The parser's default
``run`` takes the arguments and returns the exit code. Entry points of ``manylora.policies`` are tables of the
places of policies, by kind (cache, router, merge) and name. The laboratory is also found where it can be
imported but is not installed, as in a checkout on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from manylora.config.declaring import ConfigError
from manylora.rules import Rule

GROUP = "manylora.commands"
POLICIES = "manylora.policies"
LAB = ("bench", "profile", "reproduce", "workload")
"""The laboratory's commands."""

AddParser = Callable[[Any], None]


def find_commands() -> dict[str, AddParser]:
    """Return other distributions' commands by name."""
    found = _loaded(GROUP)
    if importlib.util.find_spec("manylora_lab") is not None:
        found |= importlib.import_module("manylora_lab.commands").COMMANDS
    return found


@functools.cache
def find_policies(kind: str) -> dict[str, str]:
    """Return the ``module:Class`` of each policy of a kind in other distributions, by name."""
    tables = _loaded(POLICIES)
    if importlib.util.find_spec("manylora_lab") is not None:
        tables["lab"] = importlib.import_module("manylora_lab.baselines").POLICIES
    return {name: place for table in tables.values() for name, place in table.get(kind, {}).items()}


def _loaded(group: str) -> dict[str, Any]:
    """Load the entry points of a group, without those whose package is gone."""
    found = {}
    for point in importlib.metadata.entry_points(group=group):
        with contextlib.suppress(ModuleNotFoundError):
            found[point.name] = point.load()
    return found


def is_import_name(name: str) -> bool:
    """Return whether the name has the form ``module:Class``."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def place_of(kind: str, own: Mapping[str, str], name: str) -> str:
    """Return the class of a policy as ``module:Class``, or "" where the name is unknown."""
    if is_import_name(name):
        return name
    return own.get(name) or find_policies(kind).get(name, "")


def named_policy(kind: str, own: Mapping[str, str]) -> Rule:
    """Make the rule for a policy's name."""
    says = f"one of {', '.join(own)}, module:Class, or a baseline of manylora-lab (pip install manylora-lab)"
    return Rule(says, lambda name: place_of(kind, own, name) != "")


_Base = TypeVar("_Base")


def imported_class(what: str, name: str, base: type[_Base]) -> type[_Base]:
    """Import the class ``name``, a subclass of ``base``. ``what``: the kind of class, for error messages.
    Raises ConfigError where there is none."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # an imported module may raise anything
        raise ConfigError(f"{what} {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{what} {name!r} is no subclass of manylora's {base.__name__}")
    return found
