"""Every field of a live request and of a replica's state is written by its own class."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import manylora.policy.routing
from manylora.policy.routing.replicas import ReplicaState
from manylora.policy.routing.requests import LiveRequest
from tests.policy.test_writers import targets

FIELDS = {field for kind in (LiveRequest, ReplicaState) for field in kind.__slots__}
ROUTING = Path(manylora.policy.routing.__file__).parent
FILES = [*sorted(ROUTING.glob("*.py")), ROUTING.parent / "router.py"]


def written_elsewhere(source: str) -> Iterator[str]:
    """Fields that are assigned to, or whose entries are, by another name than ``self``."""
    for statement in ast.walk(ast.parse(source)):
        for target in targets(statement):
            if isinstance(target, ast.Attribute) and target.attr in FIELDS:
                owner = target.value
                if not (isinstance(owner, ast.Name) and owner.id == "self"):
                    yield target.attr


def test_others_read_only() -> None:
    assert len(FILES) > 30
    for path in FILES:
        assert not list(written_elsewhere(path.read_text())), path.name


def test_another_writer_is_seen() -> None:
    source = (
        "def f(request, replica):\n    request.attempt += 1\n    del replica.requests[1]\n    request.x = 1\n"
    )
    assert sorted(written_elsewhere(source)) == ["attempt", "requests"]
