"""The house: what each room may import, lazily too, and how large it may be."""

from __future__ import annotations

import ast
import collections
import graphlib
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "manylora"
LAB = Path(__file__).parent.parent / "lab" / "src" / "manylora_lab"
BOTTOM = {"types", "config", "reports", "protocol"}
FORBIDDEN_NAMES = {"utils", "util", "common", "manager", "helpers", "base", "misc"}

MOST_LINES, MOST_FILES = 32_500, 200
"""Of code in the product. What an issue adds raises them in the same commit."""

# room -> manylora rooms it may import besides itself; a module at the top level is a room of its own.
ROOMS: dict[str, set[str]] = {
    "_version": set(),
    "rules": set(),
    "types": {"rules"},
    "config": {"rules"},
    "reports": {"types"},
    "protocol": {"types", "reports"},
    "policy": BOTTOM,
    "router": BOTTOM,
    "processes": set(),
    "engine": BOTTOM | {"policy", "processes", "router"},
    "devices": BOTTOM,
    "kernels": BOTTOM | {"devices", "processes"},
    "memory": BOTTOM | {"devices", "kernels"},
    "tensorfile": set(),
    "models": BOTTOM | {"devices", "kernels", "tensorfile"},
    "adapters": BOTTOM | {"devices", "kernels", "tensorfile", "text"},
    "executor": BOTTOM | {"devices", "kernels", "memory", "models", "adapters", "processes"},
    "text": {"types", "engine.client"},
    "metrics": {"types", "reports", "engine.client", "text.generate"},
    "server": {"types", "protocol", "engine.client", "text", "metrics"},
    "solving": {"config", "processes", "protocol", "types"},
    "cluster": BOTTOM
    | {"_version", "adapters.sources", "devices.free_memory", "engine", "inspection", "listening", "main"}
    | {"memory.budget", "metrics", "models.spec", "models.source", "policy", "processes", "progress"}
    | {"router", "server", "solving", "text"},
    "warmup": BOTTOM | {"engine", "flags", "kernels", "main", "models", "progress"},
    "aliases": {"config"},
    "flags": {"aliases", "config", "rules"},
    "listening": {"config"},
    "progress": {"config"},
    "outputs": {"engine.client", "text", "types"},
    "llm": BOTTOM | {"aliases", "flags", "text", "engine", "main", "metrics", "outputs"},
    "inspection": BOTTOM | {"adapters", "kernels", "models", "tensorfile"},
    "cli": {
        "_version",
        "aliases",
        "cluster",
        "config",
        "flags",
        "main",
        "inspection",
        "router.policies",
        "processes",
        "progress",
    }
    | {"warmup"},
    "__main__": {"cli"},
    "main": {
        "_version",
        "progress",
        "adapters",
        "engine",
        "executor",
        "inspection",
        "listening",
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
    "baselines": (set(), BOTTOM | {"policy", "router", "rules"}),
    "pricing": (set(), BOTTOM | {"models"}),
    "sim": ({"pricing", "workloads"}, BOTTOM | {"policy", "router"}),
    "bench": (
        {"baselines", "pricing", "sim", "workloads"},
        BOTTOM
        | {
            "",
            "aliases",
            "engine",
            "executor",
            "kernels",
            "devices",
            "flags",
            "main",
            "memory",
            "models",
            "policy",
            "router",
            "rules",
        }
        | {"progress", "solving", "warmup"},
    ),
    "reproduce": (
        {"baselines", "bench", "pricing", "sim", "workloads"},
        BOTTOM
        | {"adapters", "devices", "engine", "executor", "flags", "kernels", "memory", "policy"}
        | {"router", "solving", "warmup"},
    ),
    "commands": ({"bench", "reproduce", "workloads"}, set()),
}
TORCH = {"torch", "triton"}
NO_TORCH = {
    "processes",
    "rules",
    "types",
    "config",
    "reports",
    "protocol",
    "policy",
    "router",
    "engine",
    "text",
    "metrics",
    "outputs",
    "server",
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


LAB_NO_TORCH = {"workloads", "baselines", "pricing", "sim", "commands"}


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


@pytest.mark.parametrize("room", ROOMS)
def test_imports_follow_the_table(room: str) -> None:
    for path in modules():
        if room_of(path.relative_to(ROOT).with_suffix("").parts) == room:
            check_imports(path)


def test_every_room_is_in_the_table() -> None:
    assert {room_of(path.relative_to(ROOT).with_suffix("").parts) for path in modules()} == set(ROOMS)


def check_imports(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    room = room_of(parts)
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
        if room in ("policy", "router"):
            assert top not in PURE | {"numpy"}, f"{where}: policy imports {name}"
            assert top in sys.stdlib_module_names | {"manylora"}, f"{where}: policy imports {name}"


def test_imports_of_the_laboratory_follow_its_table() -> None:
    """But for what is run by hand, which may use anything."""
    for path in modules(LAB):
        check_lab_imports(path)


def check_lab_imports(path: Path) -> None:
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


_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    tokenize.ENCODING,
}  # fmt: skip


def code_lines(source: str) -> int:
    """Lines that hold more than comments and strings that stand alone, such as docstrings."""
    strings = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            strings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            found |= set(range(token.start[0], token.end[0] + 1))
    return len(found - strings)


def test_what_counts_as_code() -> None:
    source = (
        '"""A module.\n\nTwo lines."""\n\n# a comment\nx = (\n    1,  # one\n\n    "two",\n)\n"""Of x."""\n'
    )
    assert code_lines(source) == 4


def test_the_house_has_its_size() -> None:
    """``pytest -s`` prints the lines of code of each room."""
    for package in (ROOT, LAB):
        rooms: collections.Counter[str] = collections.Counter()
        for path in modules(package):
            rooms[path.relative_to(package).parts[0].removesuffix(".py")] += code_lines(path.read_text())
        files = [path for path in modules(package) if path.name != "__init__.py"]
        folders = collections.Counter(path.parent for path in files)
        short = sum(code_lines(path.read_text()) < 40 for path in files)
        longest = max(path.read_text().count("\n") for path in files)
        print(f"\n{package.name}: {rooms.total():,} lines of code in {len(files)} files, {short} short ones")
        print(f"  longest file: {longest} lines; largest folder: {max(folders.values())} files")
        print("".join(f"  {count:6,}  {room}\n" for room, count in rooms.most_common()))
        assert longest <= 700
        assert not {path.stem for path in files} & FORBIDDEN_NAMES
        if package is ROOT:
            assert rooms.total() <= MOST_LINES
            assert len(files) <= MOST_FILES


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


@pytest.mark.parametrize("room", ["kernels", "memory", "models", "adapters", "executor", "policy", "router"])
def test_modules_of_a_room_import_each_other_in_one_direction(room: str) -> None:
    """What is imported for its types alone counts."""
    graph: dict[str, set[str]] = {}
    for path in (ROOT / room).rglob("*.py"):
        module = ".".join(("manylora", *path.relative_to(ROOT).with_suffix("").parts))
        graph[module] = {name for name, _ in imports(path)}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
