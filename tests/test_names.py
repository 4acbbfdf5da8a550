"""Names of things: two public classes of one name are a reader's trap."""

from __future__ import annotations

import ast
import collections

from tests.test_rooms import LAB, ROOT, modules

# name -> why two classes may share it.
SHARED: dict[str, str] = {}


def classes() -> dict[str, list[str]]:
    """Every public class at the top level of a module, by its name: where it is defined."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for root in (ROOT, LAB):
        for path in modules(root):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(f"{path.relative_to(root.parent)}:{node.lineno}")
    return found


def test_no_two_public_classes_have_one_name() -> None:
    shared = {name: places for name, places in classes().items() if len(places) > 1}
    assert {name: places for name, places in shared.items() if name not in SHARED} == {}
    assert not SHARED.keys() - shared.keys(), "nothing shares these names now: take them off the list"
