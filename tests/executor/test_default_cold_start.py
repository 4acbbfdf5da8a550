"""How requests with cold adapters begin where nobody says: by where the engine runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from manylora_lab.bench.simulate import SimulatedTarget
from manylora_lab.pricing.shapes import SHAPES
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.hardware import HARDWARE

from manylora.config.cold_start import ColdStartConfig
from manylora.config.declaring import ConfigError
from manylora.executor.build import build_worker
from manylora.executor.plan import Kind, with_gates
from manylora.flags import build_settings


def engine(**given: Any) -> Any:
    return build_settings({"model": "demo/model", **given})[0]


@pytest.mark.parametrize(
    ("kind", "launches_wait", "given", "mode"),
    [
        ("cuda", False, {}, "auto"),
        ("cuda", False, {"tensor_parallel_size": 2}, "auto"),
        ("cuda", False, {"host_pool": 0}, "auto"),
        ("cuda", False, {"cold_start": "wait"}, "wait"),
        ("cuda", False, {"cold_start": "layerwise"}, "layerwise"),
        ("cuda", False, {"merge": "dlora"}, "wait"),
        ("cuda", True, {}, "wait"),
        ("cpu", False, {}, "wait"),
        ("cpu", False, {"cold_start": "auto"}, "auto"),
    ],
)
def test_the_default_is_auto_where_steps_can_await_copies(
    kind: Kind, launches_wait: bool, given: dict[str, Any], mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = with_gates(engine(**given), kind, launches_wait).scheduler.cold_start
    assert found.mode == mode
    assert not found.follows_device
    assert not caplog.records, "nothing that was asked for is refused"


def test_the_default_on_a_gpu_is_all_that_auto_is() -> None:
    """What has been measured as ``--cold-start auto`` is what nobody has to ask for."""
    for given in ({}, {"tensor_parallel_size": 2}, {"host_pool": 0}, {"cold_start_stall": 0.1}):
        found, asked = (
            with_gates(engine(**more), "cuda", False) for more in (given, {**given, "cold_start": "auto"})
        )
        assert found == asked


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (4, 2), (16, 8), (32, 16), (192, 16)])
def test_how_many_cpu_threads_there_are_unless_said(cores: int, workers: int) -> None:
    assert ColdStartConfig("cpu").workers_of(cores) == workers
    assert ColdStartConfig("cpu", cpu_workers="40").workers_of(cores) == 40, "a number is honoured"
    assert ColdStartConfig("auto").workers_of(cores) == 0, "auto has none"


@pytest.mark.parametrize("mode", ["wait", "block", "layerwise", "auto"])
def test_threads_that_nothing_would_use_are_refused(mode: str) -> None:
    assert ColdStartConfig(mode, cpu_workers="0").wanted_workers == 0
    with pytest.raises(ConfigError, match=r"^--cpu-lora-workers 2 needs --cold-start cpu$"):
        ColdStartConfig(mode, cpu_workers="2")


def test_copies_land_in_groups_where_captured_steps_see_them() -> None:
    """Elsewhere they land whole, and the policy expects it."""

    def groups(kind: Kind, **given: Any) -> int:
        return with_gates(
            engine(cold_start="layerwise", **given), kind, False
        ).scheduler.cold_start.num_groups

    assert groups("cuda") == 8
    assert groups("cuda", cuda_graphs="off") == groups("cpu") == 1


def test_merging_and_a_mode_that_was_given_are_refused_still() -> None:
    with pytest.raises(ConfigError, match="--cold-start auto does not go with --merge dlora"):
        engine(cold_start="auto", merge="dlora")


def test_an_engine_on_a_cpu_has_what_it_has_without_the_setting(tmp_path: Path) -> None:
    settings = engine(device="cpu", device_pool="8MiB", host_pool="4MiB")
    worker, policy, info = build_worker(settings, registry_path=tmp_path / "registry.sqlite")
    worker.close()
    assert policy.cold_start == ColdStartConfig()
    assert info.cold_start == "wait"


def test_a_simulation_waits() -> None:
    shape = SHAPES["llama-2-7b"]
    target = SimulatedTarget("h200", shape, AnalyticalCosts(shape, HARDWARE["h200"]), None, None)
    assert target.cold_start(engine().scheduler.cold_start, 0).mode == "wait"
