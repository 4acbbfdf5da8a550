"""Merging through the engine: commands and answers, journal, trace and figures, on an executor without tensors."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.sim.conformance import recorded_commands, replay_difference, simulation_difference

from manylora.cli import main
from manylora.config.merging import MergeConfig, MergeTimes, StepTimes
from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.engine.client import EngineStats, GenerationRequest
from manylora.engine.driver import Driver
from manylora.engine.journal import JournalWriter, TraceWriter, fingerprint, read_answered
from manylora.engine.local import LocalEngine
from manylora.metrics.requests import Metrics
from manylora.protocol.commands import RunStep, SetMerged
from manylora.types import BASE
from tests.engine.fake_executor import FakeExecutor
from tests.engine.test_engine import INFO, drain, request
from tests.policy.device_model import undisturbed

TIMES = MergeTimes(False, 0.001, 0.001, (StepTimes(1, 1, 0.002, 0.001, 0.0015),))
NAMES = ("a0", "a1", None)


def settings(**merge: Any) -> PolicyConfig:
    return PolicyConfig(
        24, 4, 64, 4, 16, 60, cache=CacheConfig(trace=True, interval_s=0.01), pipeline_depth=2,
        merge=MergeConfig(**{"times": TIMES, **merge}),
    )  # fmt: skip


async def phases(engine: LocalEngine) -> None:
    """Each adapter has most requests for a while; every token is checked."""
    ids = {card.name: card.id for card in await engine.adapters()}

    async def ask(r: GenerationRequest) -> None:
        tokens, reasons, _ = await drain(engine.generate(r))
        adapter = BASE if r.adapter is None else ids[r.adapter]
        assert tokens[0] == undisturbed(adapter, r.prompt, r.params, (), 0)
        assert reasons == {0: "length"}

    for phase in range(4):
        hot, other = NAMES[phase % 2], NAMES[(phase + 1) % 3]
        asked = [request(f"{phase}-{n}", (1, 2, n), hot, max_tokens=12) for n in range(9)]
        await asyncio.gather(*[ask(r) for r in asked])
        await asyncio.gather(*[ask(r) for r in [*asked[:6], request(f"{phase}", (3,), other, max_tokens=12)]])


async def run(executor: FakeExecutor, config: PolicyConfig, folder: Path) -> EngineStats:
    journal, trace = JournalWriter(folder / "journal", config), TraceWriter(folder / "trace")
    engine = LocalEngine(Driver(config, executor, INFO, journal=journal, trace=trace))
    for name in NAMES[:2]:
        assert name is not None
        await engine.add_adapter(name, "3")
    await phases(engine)
    if executor.failing_switches == 0:
        for name in NAMES[:2]:
            assert name is not None
            await engine.remove_adapter(name)  # returns when it is unmerged and gone
    stats = await engine.stats()
    await engine.close()
    return stats


KINDS: list[dict[str, Any]] = [
    {"mode": "merged", "starve_s": 0.005}, {"mode": "dlora", "alpha": 0.7, "beta": 0.6}, {"mode": "manylora"},
    {"mode": "manylora", "minority": "wait"},
    {"mode": "merged", "times": dataclasses.replace(TIMES, steps_wait=True)},
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind['mode']}-{kind.get('minority', len(kind))}")
def test_every_mode_gives_the_same_tokens_and_a_journal_that_replays(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    executor, config = FakeExecutor(), settings(**kind)
    stats = asyncio.run(run(executor, config, tmp_path))
    assert len(executor.switches) >= 2
    assert stats.switches_merged == sum(adapter != BASE for adapter in executor.switches)
    assert stats.switches_base == executor.switches.count(BASE)
    assert stats.steps_merged > 0
    assert stats.merged_adapter is None, "what was merged has been removed"

    found, answered = read_answered(tmp_path / "journal")
    assert found == config
    entries = list(answered)
    assert replay_difference(found, entries, fingerprint) is None
    told = list(recorded_commands(found, ((now, event) for now, event, _ in entries)))
    assert simulation_difference(found, told) is None
    merged = BASE
    for each in told:
        for command in each.commands:
            if isinstance(command, SetMerged):
                merged = command.adapter
            assert not isinstance(command, RunStep) or command.merged == merged

    lines = (tmp_path / "trace").read_text().splitlines()
    switches = [line for line in lines if "  merge  " in line or "  unmerge  " in line]
    assert len(switches) == len(executor.switches)


def test_a_journal_stands_beside_a_clairvoyant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(run(FakeExecutor(), settings(mode="manylora"), tmp_path))
    journal, out = str(tmp_path / "journal"), tmp_path / "lost.json"
    assert main(["bench", "clairvoyant", journal, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["steps"] > 10
    assert report["free_s"] <= report["clairvoyant_s"] <= report["taken_s"]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(report)


@pytest.mark.parametrize(
    ("merge", "says"),
    [
        ({"mode": "unmerged"}, "merges nothing"),
        ({"mode": "merged", "times": MergeTimes()}, "has not measured"),
    ],
)
def test_a_journal_without_merging_is_one_line(
    merge: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    JournalWriter(tmp_path / "journal", settings(**merge)).close()
    for path, words in ((tmp_path / "journal", says), (tmp_path / "none", "No such file")):
        assert main(["bench", "clairvoyant", str(path)]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


def test_a_switch_that_fails_is_not_tried_again_for_a_while(tmp_path: Path) -> None:
    executor = FakeExecutor()
    executor.failing_switches = 100
    stats = asyncio.run(run(executor, settings(mode="manylora"), tmp_path))
    assert len(executor.switches) == 1
    assert (stats.switches_failed, stats.switches_merged, stats.merged_adapter) == (1, 0, None)
    assert "the switch failed: made to fail" in (tmp_path / "trace").read_text()


def test_figures_of_dloras_thresholds_and_credits(tmp_path: Path) -> None:
    executor = FakeExecutor()
    executor.failing_switches = 1
    config = settings(mode="dlora", alpha=0.7, beta=0.6)
    stats = asyncio.run(run(executor, config, tmp_path))
    metrics = Metrics("fake", INFO)
    figures = metrics.figures(dataclasses.replace(stats, merged_adapter="a1", pristine_bytes=77))
    assert figures['manylora:merged_adapter{adapter_name="a1"}'] == 1
    assert figures["manylora:pristine_bytes"] == 77
    assert 0 < figures["manylora:merge_beta"] < figures["manylora:merge_alpha"] <= 4
    assert figures['manylora:merge_switches_total{to="merged"}'] == stats.switches_merged
    modes = [
        figures[f'manylora:steps_total{{mode="{mode}",model_name="fake"}}'] for mode in ("unmerged", "merged")
    ]
    assert sum(modes) == stats.steps
    assert "manylora:merge_alpha" not in metrics.figures(EngineStats())


def test_journals_of_before_know_no_merging(tmp_path: Path) -> None:
    config = dataclasses.replace(settings(mode="dlora"), merge=MergeConfig())
    JournalWriter(tmp_path / "journal", config).close()
    header = json.loads((tmp_path / "journal").read_text())
    del header["policy"]["merge"]
    (tmp_path / "older").write_text(json.dumps(header))
    assert read_answered(tmp_path / "older")[0] == config
