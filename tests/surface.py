"""What others rely on: names, defaults, routes, metrics. ``python -m tests.surface`` writes surface.json anew."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import manylora
from manylora import LLM, AsyncLLM, SamplingParams, outputs
from manylora.aliases import ALIASES
from manylora.cli import _parser
from manylora.config.named import find_commands
from manylora.engine.client import EngineStats
from manylora.flags import FLAGS
from manylora.metrics.requests import Metrics
from manylora.server.app import create_app
from manylora.server.connection import ServerSettings
from manylora.server.errors import TYPES
from manylora.text.texts import ModelText, Texts
from tests.engine.test_engine import INFO

STORED = Path(__file__).parent / "surface.json"
ROOT = Path(__file__).parents[1]


class _Client:
    """What an app asks of an engine when it is made."""

    info = INFO


def surface() -> dict[str, Any]:
    """By kind: names, with what each has."""
    app = create_app(_Client(), Texts(ModelText()), ServerSettings("base", "base", "0", ROOT))  # type: ignore[arg-type]
    return {
        "package": {name: {} for name in manylora.__all__},
        "classes": {kind.__name__: _methods(kind) for kind in (LLM, AsyncLLM)},
        "records": {
            kind.__name__: {field.name: {} for field in dataclasses.fields(kind)}
            for kind in (SamplingParams, *_records(outputs))
        },
        "sampling": {field.name: repr(field.default) for field in dataclasses.fields(SamplingParams)},
        "flags": {flag.option: repr(flag.default) for flag in FLAGS},
        "aliases": {alias.option: repr(alias.of) for alias in ALIASES},
        "commands": _commands(_parser(find_commands())),
        "routes": {
            path: {method: {} for method in methods} for path, methods in app.state.document["paths"].items()
        },
        "statuses": {str(status): kind for status, kind in TYPES.items()},
        "metrics": {re.sub(r"\{.*", "", name): {} for name in Metrics("base", INFO).figures(EngineStats())},
        "make": {
            name: {} for name in re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        },
    }


def _methods(kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, member in inspect.getmembers(kind):
        if name.startswith("_") and name != "__init__":
            continue
        found[name] = {p: {} for p in inspect.signature(member).parameters} if callable(member) else {}
    return found


def _records(module: Any) -> list[Any]:
    return [kind for _, kind in inspect.getmembers(module, dataclasses.is_dataclass)]


def _commands(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Subcommands, with their own and their options."""
    found: dict[str, Any] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {name: _commands(inner) for name, inner in action.choices.items()}
        else:
            found |= {option: {} for option in action.option_strings if option.startswith("--")}
    return found


if __name__ == "__main__":
    STORED.write_text(json.dumps(surface(), indent=1, sort_keys=True) + "\n")
    sys.exit(0)
