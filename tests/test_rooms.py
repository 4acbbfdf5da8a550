"""Every import, lazy ones too, against the table of rooms in docs/architecture.md."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "manylora"
LAB = Path(__file__).parent.parent / "lab" / "src" / "manylora_lab"
BOTTOM = {"types", "config", "reports", "protocol"}
FORBIDDEN_NAMES = {"utils", "util", "common", "manager", "helpers", "base", "misc"}

# room -> manylora rooms it may import besides itself; a module at the top level is a room of its own.
ROOMS: dict[str, set[str]] = {
    "_version": set(),
    "rules": set(),
    "types": {"rules"},
    "config": {"rules"},
    "reports": {"types"},
    "protocol": {"types", "reports"},
    "policy": BOTTOM,
    "processes": set(),
    "engine": BOTTOM | {"policy", "processes"},
    "devices": BOTTOM,
    "kernels": BOTTOM | {"devices", "processes"},
    "memory": BOTTOM | {"devices", "kernels"},
    "models": BOTTOM | {"devices", "kernels"},
    "adapters": BOTTOM | {"devices", "kernels", "text"},
    "assist": BOTTOM | {"processes"},
    "executor": BOTTOM | {"devices", "kernels", "memory", "models", "adapters", "assist", "processes"},
    "text": {"types", "engine.client"},
    "metrics": {"types", "engine.client", "text.generate"},
    "server": {"types", "protocol", "engine.client", "engine.scopes", "text", "metrics"},
    "pricing": BOTTOM,
    "solving": {"config", "processes", "protocol", "types"},
    "cluster": BOTTOM
    | {"_version", "adapters.sources", "devices.free_memory", "engine", "inspection", "listening", "main"}
    | {"memory.shares", "metrics", "missing", "models.errors", "models.source", "policy", "pricing", "processes"}
    | {"server", "signals", "solving", "text"},
    "warmup": BOTTOM | {"engine", "flags", "kernels", "main", "models", "progress"},
    "aliases": {"config"},
    "flags": {"aliases", "config", "rules"},
    "options": {"aliases", "config", "flags"},
    "extensions": set(),
    "listening": {"config"},
    "missing": {"config"},
    "progress": set(),
    "signals": set(),
    "arguments": {"types"},
    "exits": set(),
    "feeding": set(),
    "outputs": {"engine.client", "text", "types"},
    "llm": BOTTOM
    | {"arguments", "exits", "feeding", "flags", "text", "engine", "main", "metrics", "outputs"},
    "inspection": BOTTOM | {"adapters", "kernels", "models", "pricing"},
    "cli": {
        "_version",
        "aliases",
        "cluster",
        "config",
        "extensions",
        "flags",
        "main",
        "inspection",
        "missing",
        "options",
        "policy.routing",
        "progress",
        "signals",
    }
    | {"warmup"},
    "__main__": {"cli"},
    "main": {
        "_version",
        "progress",
        "signals",
        "adapters",
        "engine",
        "executor",
        "inspection",
        "listening",
        "missing",
        "models",
        "policy",
        "processes",
    }
    | {"server", "text"}
    | BOTTOM,
    "": {"_version", "llm", "types"},
}
# The laboratory's rooms: what they may import of the laboratory, and of manylora.
LAB_ROOMS: dict[str, tuple[set[str], set[str]]] = {
    "workloads": (set(), BOTTOM),
    "sim": ({"workloads"}, BOTTOM | {"policy", "pricing"}),
    "bench": (
        {"sim", "workloads"},
        BOTTOM
        | {
            "",
            "aliases",
            "assist",
            "engine",
            "executor",
            "kernels",
            "devices",
            "flags",
            "inspection",
            "main",
            "memory",
            "models",
            "options",
            "policy",
        }
        | {"pricing", "progress", "solving", "warmup"},
    ),
    "reproduce": (
        {"bench", "sim", "workloads"},
        BOTTOM
        | {"adapters", "assist", "devices", "engine", "executor", "flags", "kernels", "memory", "policy"}
        | {"pricing", "solving", "warmup"},
    ),
    "commands": ({"bench", "reproduce", "workloads"}, set()),
}
PERSONS = re.compile(r"\b(who|whom|whoever|nobody|somebody|anybody|everybody)\b", re.IGNORECASE)
# file -> a line of text that users or records see, which therefore stays as it is.
PERSONS_IN_TEXTS = {
    LAB / "reproduce" / "punica_fig11.py": "who is first in line",  # a note in docs/results/punica-fig11.json
}
TORCH = {"torch", "triton"}
NO_TORCH = {
    "assist",
    "processes",
    "rules",
    "types",
    "config",
    "reports",
    "protocol",
    "policy",
    "engine",
    "text",
    "metrics",
    "outputs",
    "server",
    "pricing",
    "options",
    "extensions",
    "aliases",
    "flags",
    "llm",
    "solving",
    "cluster",
    "cli",
    "main",
    "inspection",
}
PURE = {"time", "random", "os", "asyncio", "threading", "secrets", "socket"}


LAB_NO_TORCH = {"workloads", "sim", "commands"}


def modules(root: Path = ROOT) -> list[Path]:
    return sorted(root.rglob("*.py"))


def room_of(parts: tuple[str, ...]) -> str:
    return "" if parts in ((), ("__init__",)) else parts[0]


def imports(path: Path) -> list[tuple[str, int]]:
    """Absolute names of everything imported anywhere in the file, and the line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            if node.module == "manylora":  # a room, or a name of the package itself
                rooms = [f"manylora.{a.name}" if a.name in ROOMS else "manylora" for a in node.names]
                found += [(room, node.lineno) for room in rooms]
            else:
                found.append((node.module, node.lineno))
    return found


def packages_of(root: Path, room: str) -> set[str]:
    """What a room imports of others' packages, by the names that these are installed by."""
    paths = [path for path in modules(root) if room_of(path.relative_to(root).with_suffix("").parts) == room]
    tops = {name.partition(".")[0] for path in paths for name, _ in imports(path)}
    tops -= {"manylora", "manylora_lab", *sys.stdlib_module_names}
    return {"pyyaml" if top == "yaml" else top.replace("_", "-") for top in tops}


def test_the_page_has_this_table() -> None:
    """A row: its rooms, what they own, what of manylora they may import, and packages, up to a ";"."""
    page = (ROOT.parents[1] / "docs" / "architecture.md").read_text()
    page = page[page.index("\n## Rooms") : page.index("\n## Memory")]
    words = {"those four": BOTTOM, "nothing": set(), "the package itself": {""}}
    seen = set()
    for line in re.findall(r"^\| .*", page, re.MULTILINE):
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        rooms = {room for room in cells[0].split(", ") if room in ROOMS or room in LAB_ROOMS}
        seen |= rooms
        packages = set(cells[-1].partition(";")[0].split(", ")) - {"stdlib"}
        found = set()
        for room in rooms:
            root = LAB if room in LAB_ROOMS else ROOT
            allowed = set.union(*LAB_ROOMS[room]) if root is LAB else ROOMS[room]
            if cells[2] != "what they wire":
                assert set.union(*(words.get(name, {name}) for name in cells[2].split(", "))) == allowed, room
            found |= packages_of(root, room)
        assert not rooms or found == packages, line
    assert {*ROOMS, *LAB_ROOMS} - seen == {"", "__main__", "_version", "commands"}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_table(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    room = room_of(parts)
    assert room in ROOMS, f"{room} is not in the table of rooms"
    allowed = ROOMS[room] | {room}
    for name, line in imports(path):
        where = f"{path.relative_to(ROOT)}:{line}"
        top, _, rest = name.partition(".")
        if top == "manylora":
            target = room_of(tuple(rest.split(".")) if rest else ())
            ok = target in allowed or any(rest == a or rest.startswith(a + ".") for a in allowed if "." in a)
            assert ok, f"{where}: {room or 'the package'} may not import {name}"
        if top in TORCH:
            assert room not in NO_TORCH, f"{where}: {room} does without {top}"
        if room == "policy":
            assert top not in PURE | {"numpy"}, f"{where}: policy imports {name}"
            assert top in sys.stdlib_module_names | {"manylora"}, f"{where}: policy imports {name}"


@pytest.mark.parametrize("path", modules(LAB), ids=lambda p: str(p.relative_to(LAB)))
def test_imports_of_the_laboratory_follow_its_table(path: Path) -> None:
    """But for what is run by hand, which may use anything, and which nothing but the table of pages uses."""
    room = room_of(path.relative_to(LAB).with_suffix("").parts)
    if room in ("", "benchmarks"):
        return
    of_lab, of_core = LAB_ROOMS[room]
    for name, line in imports(path):
        where = f"{path.relative_to(LAB)}:{line}"
        top, _, rest = name.partition(".")
        target = room_of(tuple(rest.split(".")) if rest else ())
        if top == "manylora_lab":
            assert target in of_lab | {room}, f"{where}: {room} may not import {name}"
        if top == "manylora":
            assert target in of_core, f"{where}: {room} may not import {name}"
        if top in TORCH:
            assert room not in LAB_NO_TORCH, f"{where}: {room} does without {top}"


def test_the_product_does_without_the_laboratory() -> None:
    """But for the door by which it finds the laboratory's commands."""
    for path in modules():
        names = {name.partition(".")[0] for name, _ in imports(path)}
        assert "manylora_lab" not in names, path


def test_torch_cuda_only_in_devices() -> None:
    for path in modules():
        if path.relative_to(ROOT).parts[0] != "devices":
            assert "torch.cuda" not in path.read_text(), f"{path}: torch.cuda belongs in devices"


def test_no_file_is_a_god_file() -> None:
    for path in [*modules(), *modules(LAB)]:
        lines = path.read_text().count("\n")
        assert lines <= 500, f"{path} has {lines} lines"
        assert path.stem not in FORBIDDEN_NAMES, f"{path}: say what it owns"


@pytest.mark.parametrize(
    "module",
    [
        "manylora",
        "manylora.cli",
        "manylora.inspection",
        "manylora.main",
        "manylora.policy.replica",
        "manylora.engine.driver",
        "manylora.server.app",
    ],
)
def test_imports_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_things_are_not_called_who() -> None:
    """A sentence says which thing it means: a request, a page, a node."""
    for path in [*modules(), *modules(LAB)]:
        shown = PERSONS_IN_TEXTS.get(path)
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if shown is None or shown not in line:
                assert not PERSONS.search(line), f"{path}:{number}: {line.strip()}"


@pytest.mark.parametrize("room", ["kernels", "memory", "models", "adapters", "executor", "policy", "solving"])
def test_modules_of_a_room_import_each_other_in_one_direction(room: str) -> None:
    """What is imported for its types alone counts."""
    graph: dict[str, set[str]] = {}
    for path in (ROOT / room).rglob("*.py"):
        module = ".".join(("manylora", *path.relative_to(ROOT).with_suffix("").parts))
        graph[module] = {name for name, _ in imports(path)}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
