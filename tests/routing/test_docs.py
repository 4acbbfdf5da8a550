"""docs/routing.md names what there is, and nothing else."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest

from manylora.config import ConfigError
from manylora.config.routing import ROUTERS, CaraServeParameters, RouterConfig
from manylora.policy.router import Router
from manylora.policy.routing import ROUTING_POLICIES, find_router, router_help
from manylora.protocol.routing import ReplicaUp, RouterCommand, RouterEvent
from manylora.rules import fields_of
from tests.routing.rig import FACTS, Rig

PAGE = (Path(__file__).parents[2] / "docs" / "routing.md").read_text()


def test_every_policy_and_every_parameter_has_its_line() -> None:
    assert tuple(ROUTING_POLICIES) == ROUTERS
    rows = [row for row in PAGE.splitlines() if row.startswith("|")]
    for name, kind in ROUTING_POLICIES.items():
        assert any(row.startswith(f"| `{name}`") for row in rows), name
        record: type = kind.parameters
        listed = " ".join(row for row in rows if f"`{name}`" in row.split("|")[1])
        for field in fields_of(record):
            assert f"`{field.name}`" in listed, f"{name}.{field.name}"
            is_number = isinstance(field.default, int | float) and field.default < 2**30
            if is_number and record is not CaraServeParameters:
                assert f"`{field.name}` {field.default:g}" in listed, f"{name}.{field.name}"


def test_help_names_every_parameter() -> None:
    for name, kind in ROUTING_POLICIES.items():
        record: type = kind.parameters
        fields = fields_of(record)
        expected = [f"{name}.{field.name}" for field in fields] or ["no"]
        assert [line.split()[0] for line in router_help(name).splitlines()] == expected
    caraserve = router_help("caraserve").splitlines()
    assert [line.rpartition("(")[2] for line in caraserve[1:6]] == ["from --profile)"] * 4 + [
        "from --slo-tpot)"
    ]
    with pytest.raises(ConfigError, match=r"router 'nearest' is not known: use round-robin, .*, manylora$"):
        router_help("nearest")


def test_every_event_and_command_is_named() -> None:
    for kind in (*typing.get_args(RouterEvent), *typing.get_args(RouterCommand)):
        assert re.search(rf"\b{kind.__name__}\b", PAGE), kind.__name__


def test_the_example_works(tmp_path: Path, monkeypatch: typing.Any) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "fewest.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_router("fewest:FewestAdapters").name == "fewest-adapters"
    rig = Rig(RouterConfig("fewest:FewestAdapters"))
    assert isinstance(rig.router, Router)
    rig.tell(ReplicaUp(0, 1, FACTS))
    rig.tell(ReplicaUp(1, 1, FACTS))
    rig.list_adapters(8, 8)
    assert [rig.ask(name, adapter=1) for name in "ab"] == [0, 1]
    assert rig.ask("c", adapter=2) == 0
