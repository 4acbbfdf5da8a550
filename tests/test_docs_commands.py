"""Commands and flags in README and docs are those that there are."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from manylora.cli import _parser
from manylora.config.named import find_commands

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "demo" / "README.md",
    ROOT / "lab" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
"""Pages of results have commands of their records' commits."""

FOREIGN = {
    "--address", "--cuda-graph-trace", "--disable-usage-stats", "--enable-prompt-tokens-details", "--generate",
    "--gpu-memory-utilization", "--head", "--include-dashboard", "--kv-cache-usage-percentage-metric",
    "--max-worker-port", "--min-worker-port", "--node-ip-address", "--node-manager-port", "--object-manager-port",
    "--strict", "--total-queued-requests-metric", "--total-running-requests-metric",
}  # fmt: skip
"""Flags of Ray, vLLM, llm-d, nsys and mypy. docs/flags.md has more: tests/test_aliases.py reads that page."""


def code_lines(page: Path) -> Iterator[str]:
    """Of indented blocks, continued lines as one, without what stands before a command."""
    text = re.sub(r"\\\n +", "", page.read_text(encoding="utf-8"))
    for line in re.findall(r"^    (\S.*)$", text, re.MULTILINE):
        yield re.sub(r"^([A-Z_]+=\S+ )+", "", line)


def commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for line in code_lines(page):
            if line.startswith("manylora "):
                # Of alternatives in brackets the first.
                yield page.name, re.sub(r"\[([^]|]+)[^]]*\]", r"\1", line)


def options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Each with its help."""
    for action in parser._actions:
        for option in action.option_strings:
            yield option, action.help or ""
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from options(below)


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return _parser(find_commands())


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_command_is_taken(parser: argparse.ArgumentParser, page: str, line: str) -> None:
    """It is parsed, not run."""
    assert parser.parse_args(shlex.split(line, comments=True)[1:])


def test_every_flag_is_one_that_there_is(parser: argparse.ArgumentParser) -> None:
    """Of ``manylora``, of a benchmark, or of a tool of the repository."""
    known = {option for option, _ in options(parser)}
    for folder in ("lab/src", "tools", "demo"):
        for path in (ROOT / folder).rglob("*.py"):
            known.update(re.findall(r"[\"'](--[a-z][a-z0-9-]*)[\"']", path.read_text(encoding="utf-8")))
    unknown = {}
    for page in PAGES:
        text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"))
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w-]*\.md)", text))
        if page.name != "flags.md" and (missing := named - known - FOREIGN):
            unknown[page.name] = sorted(missing)
    assert unknown == {}
