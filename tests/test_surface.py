"""Nothing that others rely on goes: names, defaults, routes, statuses and metrics may be added only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.surface import STORED, surface


def missing(stored: Any, found: Any, path: str = "") -> Iterator[str]:
    """Where what is stored is not found as it was."""
    if isinstance(stored, dict):
        for name, inner in stored.items():
            if not isinstance(found, dict) or name not in found:
                yield f"{path}/{name}"
            else:
                yield from missing(inner, found[name], f"{path}/{name}")
    elif stored != found:
        yield f"{path} was {stored}, is {found}"


def test_the_public_surface_stays() -> None:
    """A rename keeps an alias. ``python -m tests.surface`` takes in what was added."""
    assert list(missing(json.loads(STORED.read_text()), surface())) == []


def test_what_goes_is_seen() -> None:
    stored = json.loads(STORED.read_text())
    found = surface()
    del found["classes"]["LLM"]["generate"]["adapter"], found["routes"]["/v1/models"]
    found["flags"]["--port"] = "9000"
    assert sorted(missing(stored, found)) == [
        "/classes/LLM/generate/adapter", "/flags/--port was 8000, is 9000", "/routes//v1/models",
    ]  # fmt: skip


def test_what_was_added_is_stored() -> None:
    assert list(missing(surface(), json.loads(STORED.read_text()))) == []
