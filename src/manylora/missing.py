"""Packages that are not installed, told from mistakes in manylora's own imports. Does not know what needs them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from manylora.config import ConfigError

_DISTRIBUTIONS = {"opentelemetry": "opentelemetry-api", "yaml": "pyyaml"}
"""By the package that is imported, where the name for pip is another."""


@contextlib.contextmanager
def naming_what_is_missing() -> Iterator[None]:
    """Raise ConfigError for an import within that fails in another distribution; manylora's own are bugs."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("manylora") or package in sys.stdlib_module_names:
            raise
        raise ConfigError(_reason(error, package)) from error


def _reason(error: ImportError, package: str) -> str:
    if not package:  # raised by hand, in a package that lacks another one
        return " ".join(str(error).split())
    distribution = _DISTRIBUTIONS.get(package, package.replace("_", "-"))
    if isinstance(error, ModuleNotFoundError):
        return f"{package} is not installed: pip install {distribution}"
    return f"{package} does not work here ({error}): pip install --upgrade {distribution}"
