"""docs/routing.md names what there is, and nothing else."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest
from manylora_lab.baselines import ALL_ROUTERS

from manylora.aliases import REMOVED_PARAMETERS
from manylora.config.declaring import ConfigError, setting_of
from manylora.config.routing import ROUTERS, RouterConfig
from manylora.protocol.routing import ReplicaUp
from manylora.router.policies.policy import find_router, router_help
from manylora.router.router import Router
from manylora.rules import fields_of
from tests.router.rig import FACTS, Rig

PAGE = (Path(__file__).parents[2] / "docs" / "routing.md").read_text()


def test_help_names_every_parameter_that_users_set() -> None:
    """The others were removed for them."""
    count, hidden = 0, set[str]()
    for name in ALL_ROUTERS:
        record: type = find_router(name).parameters
        shown = [field.name for field in fields_of(record) if setting_of(field)]
        expected = [f"{name}.{key}" for key in shown] or ["no"]
        assert [line.split()[0] for line in router_help(name).splitlines()] == expected
        if name in ROUTERS:
            count += len(shown)
            hidden |= {f"{name}.{field.name}" for field in fields_of(record) if field.name not in shown}
    assert count <= 16
    assert hidden == REMOVED_PARAMETERS.keys()
    caraserve = router_help("caraserve").splitlines()
    assert [line.rpartition("(")[2] for line in caraserve[1:6]] == ["must be given)"] * 5
    with pytest.raises(
        ConfigError, match=r"--router must be one of round-robin, .*, manylora, module:Class, or"
    ):
        router_help("nearest")


def test_the_example_works(tmp_path: Path, monkeypatch: typing.Any) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "fewest.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_router("fewest:FewestAdapters").__name__ == "FewestAdapters"
    rig = Rig(RouterConfig("fewest:FewestAdapters"))
    assert isinstance(rig.router, Router)
    rig.tell(ReplicaUp(0, 1, FACTS))
    rig.tell(ReplicaUp(1, 1, FACTS))
    rig.list_adapters(8, 8)
    assert [rig.ask(name, adapter=1) for name in "ab"] == [0, 1]
    assert rig.ask("c", adapter=2) == 0
