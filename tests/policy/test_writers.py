"""Every field of a node, a request's state and a sequence is written by one module."""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator
from pathlib import Path

import manylora.policy
from manylora.policy.sequences import RequestState, Sequence
from manylora.policy.tree import Node

ROOM = Path(manylora.policy.__file__).parent
KINDS = (Node, RequestState, Sequence)
FIELDS = {field for kind in KINDS for field in kind.__slots__}


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to, or deletes; of an item the container."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        found = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        found = [node.target]
    for target in found:
        for part in target.elts if isinstance(target, ast.Tuple) else [target]:
            yield part.value if isinstance(part, ast.Subscript) else part


def written(path: Path) -> Iterator[str]:
    """Fields of those kinds that a module assigns to: by ``self`` only in their class, its constructor left
    out."""
    tree = ast.parse(path.read_text())
    names = {kind.__name__ for kind in KINDS}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name in names]
    methods = [each for of in classes for each in of.body if isinstance(each, ast.FunctionDef)]
    own = {id(inner) for method in methods if method.name != "__init__" for inner in ast.walk(method)}
    for statement in ast.walk(tree):
        for target in targets(statement):
            if not isinstance(target, ast.Attribute) or target.attr not in FIELDS:
                continue
            is_self = isinstance(target.value, ast.Name) and target.value.id == "self"
            if not is_self or id(statement) in own:
                yield target.attr


def test_one_module_writes_each_field() -> None:
    writers = collections.defaultdict(set)
    for path in ROOM.rglob("*.py"):
        for field in written(path):
            writers[field].add(path.stem)
    # Both a node and a sequence have pages and an adapter, each written where its class is.
    shared = set(Node.__slots__) & {*RequestState.__slots__, *Sequence.__slots__}
    for field, modules in writers.items():
        allowed = {"tree", "sequences"} if field in shared else None
        assert len(modules) == 1 or modules == allowed, f"{field} is written by {sorted(modules)}"
    assert set(writers) >= {"residence", "last_use", "visits", "stamps", "evicted_in", "stage", "admitted"}


def test_a_second_writer_is_seen(tmp_path: Path) -> None:
    source = "def f(node, s):\n    node.last_use = 1\n    s.stage, x = 1, 2\n    del s.pages[0]\n"
    (tmp_path / "other.py").write_text(source)
    assert sorted(written(tmp_path / "other.py")) == ["last_use", "pages", "stage"]
