"""Policies of one's own, named as ``module:Class``."""

from __future__ import annotations

import importlib
from typing import TypeVar

from manylora.config import ConfigError

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
