"""What pages list, beside the code that it was taken from: fields, limits, events, policies, parts, files."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path

import pytest

from manylora.config import HttpSettings
from manylora.engine import service
from manylora.flags import CLUSTER_FLAGS, FLAGS
from manylora.policy.caches import CACHES
from manylora.policy.routing import ROUTING_POLICIES
from manylora.protocol import commands, events
from manylora.server import (
    bodies,
    chat,
    completions,
    connection,
    errors,
    generation,
    naming,
    sampling,
    schemas,
)
from manylora.server.connection import ConnectionLimits

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "demo" / "README.md",
    *sorted(DOCS.glob("*.md")),
]
NO_FILES = re.compile("^(data/processed_traces|data/language|supervised)/|^router/policy$|NAME")
"""Files within archives of workloads, which docs/workloads.md names, a key of a report, and names that vary."""


def prose(page: Path) -> str:
    """A page without its markers' comments."""
    return re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def section(page: str, heading: str) -> str:
    """From a heading to the next."""
    text = prose(DOCS / page)
    return text[text.index(heading) :].partition("\n#")[0]


def rows(text: str) -> list[list[str]]:
    """Of all tables, as cells."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def coded(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def names(union: object) -> set[str]:
    return {kind.__name__ for kind in typing.get_args(union)}


def test_architecture_lists_events_and_commands() -> None:
    listed = {
        cells[0]: set(cells[1].split(", ")) for cells in rows(section("architecture.md", "## The one idea"))
    }
    assert listed["events"] == names(events.Event)
    assert listed["commands for clients"] == names(commands.ClientCommand)
    assert listed["commands for the engine"] == names(commands.EngineCommand)
    assert listed["commands for the device"] == names(commands.DeviceCommand) & names(commands.Command)


def test_architecture_lists_the_cache_policies() -> None:
    table = section("architecture.md", "## What leaves")
    listed = [name for cells in rows(table) for name in re.findall(r"`([\w-]+)`", cells[0])]
    assert [re.sub(r"^-", "fastlibra-", name) for name in listed] == list(CACHES)


@pytest.mark.parametrize(
    ("heading", "folder", "others"),
    [
        ("## How a decision is made", "policy", {"router", "routing"}),
        (
            "## Which replica",
            "policy/routing",
            {policy.__module__.split(".")[-1] for policy in ROUTING_POLICIES.values()},
        ),
        ("### Processes of a cluster", "cluster", set()),
    ],
)
def test_architecture_has_a_place_for_every_part(heading: str, folder: str, others: set[str]) -> None:
    """``others``: parts that have a table of their own, or a line for all of them."""
    parts = {path.stem for path in (ROOT / "src" / "manylora" / folder).glob("[!_]*")}
    first = [cells[0] for cells in rows(section("architecture.md", heading)) if cells[0].startswith("`")]
    assert {part.rstrip("/") for cell in first for part in coded(cell)} == parts - others


def test_http_names_every_field_and_every_status() -> None:
    """Fields that ask for what the server cannot do stand in the table of those, or among the adapter's."""
    fields, limits = section("http.md", "## Fields"), section("http.md", "## Errors")
    named = coded(fields)
    for body in (schemas.CompletionBody, schemas.ChatBody):
        assert set(body.__struct_fields__) - {"lora_request"} <= named, body.__name__
    refused = set().union(*(coded(cells[0]) for cells in rows(fields)))
    assert refused >= schemas._HARMLESS.keys() | {name for route in schemas._OTHER_ROUTE for name in route}
    assert naming._REFUSED.keys() | set(naming._NAMES) <= named
    listed = {int(cells[0]): coded(cells[1]) for cells in rows(limits) if cells[0].isdecimal()}
    assert {status for status, kinds in listed.items() if status != 500} == errors._TYPES.keys()
    assert all(kind in listed[status] for status, kind in errors._TYPES.items())


def test_http_names_every_route() -> None:
    """tests/surface.json holds those that the server has; /cluster is a cluster's own."""
    routes = json.loads((ROOT / "tests" / "surface.json").read_text())["routes"]
    named = coded(section("http.md", "## Routes"))
    assert {path.replace("{name}", "NAME") for path in routes} | {"/cluster"} <= named


def test_http_says_the_limits_that_hold() -> None:
    limits = ConnectionLimits()
    said = {cells[0]: cells[1] for cells in rows(section("http.md", "## Limits"))}
    for row, numbers in {
        "requests waiting for admission": [HttpSettings().max_waiting],
        "connections": [limits.max_connections],
        "connections for probes alone, beside these": [connection.PROBE_CONNECTIONS],
        "request line and headers; trailers": [limits.head_bytes // 1024],
        "a request's headers": [limits.head_s],
        "a request's body": [limits.body_s, limits.body_bytes_per_s],
        "bodies that are not whole, together": [limits.upload_bytes // 2**20],
        "what is left of a body that was answered early": [connection.LINGER_S],
        "an answer, while its client reads nothing": [limits.write_s],
        "what is unread of one stream": [generation.MAX_UNSENT_BYTES // 2**20],
        "lists and objects, strings, values in a body": [
            bodies.MAX_CONTAINERS, bodies.MAX_STRINGS, bodies.MAX_VALUES
        ],
        "prompts in a body; prompts times `n`": [completions.MAX_PROMPTS, completions.MAX_CHOICES],
        "messages": [chat.MAX_MESSAGES],
        "`stop`": [sampling.MAX_STOP_STRINGS, sampling.MAX_STOP_CHARS],
        "`stop_token_ids`; `logit_bias`": [sampling.MAX_STOP_TOKEN_IDS, sampling.MAX_BIASED_TOKENS],
        "biases, stop ids and characters of stop strings, times prompts": [sampling.MAX_PARAMETERS],
        "requests sent ahead on one connection": [connection.MAX_AHEAD],
        "adapters waiting to be loaded": [service.MAX_LOADS],
    }.items():  # fmt: skip
        assert [
            float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\d|\d", said[row])
        ] == numbers, row


def test_values_of_flags_are_among_their_choices() -> None:
    """As in `--merge dlora`; ``tests/test_docs_commands.py`` asks whether the flags are there."""
    choices = {flag.option: set(flag.choices) for flag in (*FLAGS, *CLUSTER_FLAGS) if flag.choices}
    choices |= {"--router": set(ROUTING_POLICIES), "--cache-policy": set(CACHES)}
    choices["--device"].add("sim")  # reproduce's
    named = [
        (page.name, option, value)
        for page in PAGES
        for code in coded(prose(page))
        for option, value in re.findall(r"(?<![\w-])(--[a-z][\w-]*) ([a-z][\w-]*)", code)
        if option in choices
    ]
    assert len(named) > 30
    assert [each for each in named if each[2] not in choices[each[1]]] == []


ROOTS = [
    ROOT,
    ROOT / "docs",
    *(ROOT / "src" / folder for folder in (".", "manylora", "manylora/policy", "manylora/executor")),
    ROOT / "lab" / "src" / "manylora_lab",
]
"""What names of files and modules may begin from."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_modules_that_are_named_are_there(page: Path) -> None:
    """As `tests/parity`, `policy/tree.py`, `executor/ranked_*` or, of a module, `policy/tree.Node`."""
    missing = set()
    for code in coded(prose(page)):
        if not re.fullmatch(r"[a-z_]\w*(/[\w.*-]+)+/?", code) or NO_FILES.search(code):
            continue
        stem, _, name = code.partition(".")
        places = [root / path for root in ROOTS for path in (code, f"{code}.py", f"{stem}.py")]
        found = [path for place in places for path in place.parent.glob(place.name)]
        if not any(not name or path.suffix == f".{name}" or name in path.read_text() for path in found):
            missing.add(code)
    assert missing == set()
