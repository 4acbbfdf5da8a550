"""Policies that settings name: the product's own, another distribution's, or any class as ``module:Class``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TypeVar

from manylora.config.declaring import ConfigError
from manylora.extensions import find_policies
from manylora.rules import Rule


def is_import_name(name: str) -> bool:
    """Whether it names an attribute of a module, as ``module:Class``."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def place_of(kind: str, own: Mapping[str, str], name: str) -> str:
    """Where the class of a policy is, as ``module:Class``; "" where the name is not known."""
    if is_import_name(name):
        return name
    return own.get(name) or find_policies(kind).get(name, "")


def named_policy(kind: str, own: Mapping[str, str]) -> Rule:
    """The rule for a policy's name."""
    says = f"one of {', '.join(own)}, module:Class, or a baseline of manylora-lab (pip install manylora-lab)"
    return Rule(says, lambda name: place_of(kind, own, name) != "")


_Base = TypeVar("_Base")


def imported_class(what: str, name: str, base: type[_Base]) -> type[_Base]:
    """The class ``name``, of ``base``. ``what``: it is in errors. Raises ConfigError where there is none."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a module raises that is imported
        raise ConfigError(f"{what} {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{what} {name!r} is no subclass of manylora's {base.__name__}")
    return found
