"""Real runs on the shipped model, replayed by a fresh policy and lived through again in virtual time."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.sim.conformance import recorded_commands, replay_difference, simulation_difference
from manylora_lab.sim.recorded import MeasuredAnswer, Recording, Told, measured

from manylora import AsyncLLM, SamplingParams
from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.engine.client import EngineStats
from manylora.engine.driver import Driver
from manylora.engine.journal import JournalWriter, fingerprint, read_answered
from manylora.engine.local import LocalEngine
from manylora.protocol.commands import RunStep
from manylora.protocol.events import Abort, AdapterRead, Arrive, CopyDone, Event, StepDone
from manylora.types import Request
from tests.engine.fake_executor import FakeExecutor
from tests.engine.test_engine import INFO, drain, request
from tests.internal import internal_async_llm

DEMO = Path(__file__).parents[2] / "demo"
NAMES = ("turkish", "french", "spanish", "greek", "coffee", "russian")
POOLS = {"page_tokens": 8, "device_pool": "1792KiB", "host_pool": "2MiB"}
"""112 device pages and 128 of the host; the adapters take 205, half of the device at most."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A journal, and what a fresh replica makes of it."""

    journal: Path
    config: PolicyConfig
    entries: Sequence[tuple[float, Event, str | None]]
    told: Sequence[Told]

    @property
    def kinds(self) -> set[str]:
        """Names of all events and commands."""
        return {type(thing).__name__ for told in self.told for thing in (told.event, *told.commands)}


def read(path: Path) -> Run:
    config, answered = read_answered(path)
    entries = list(answered)
    return Run(
        path, config, entries, list(recorded_commands(config, [(now, event) for now, event, _ in entries]))
    )


def adapter_path(name: str) -> str:
    return str(DEMO / "adapters" / name)


async def conversation(llm: AsyncLLM, seed: int) -> None:
    """Two turns; every fifth has two samples, every fourth is given up in the middle of its second turn."""
    rng = random.Random(seed)
    await asyncio.sleep(rng.random() * 0.8)
    prompt = rng.choices(range(5, 4000), k=rng.randint(5, 60))
    for turn in range(2):
        num_tokens = rng.randint(8, 60)
        params = SamplingParams(
            temperature=0.0 if seed % 2 else 0.7, seed=seed, max_tokens=num_tokens, ignore_eos=True,
            n=2 if seed % 5 == 0 else 1,
        )  # fmt: skip
        stream = llm.stream(prompt, params, NAMES[seed % len(NAMES)] if seed % 9 else None)
        replies: dict[int, list[int]] = collections.defaultdict(list)
        async for news in stream:
            replies[news.sample] += news.token_ids
            if turn == 1 and seed % 4 == 0 and len(replies[0]) > 3:
                break
        await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
        prompt = [*prompt, *replies[0], 7, 8, 9]


async def crowd(policy: str, pipeline_depth: int, journal: Path, device: str = "cpu") -> EngineStats:
    """Conversations at once, an adapter that comes and goes, a crush, and an end while a request runs."""
    adapters = {name: adapter_path(name) for name in NAMES}
    settings = {
        "device": device, "dtype": "float32", "cache_policy": policy, "journal": str(journal), "max_num_seqs": 8,
        "pipeline_depth": pipeline_depth, **POOLS,
    }  # fmt: skip
    if policy == "static-lru":
        settings["cache_set"] = "adapter_share=0.5"
    async with internal_async_llm(str(DEMO / "model"), adapters, **settings) as llm:

        async def come_and_go() -> None:
            await asyncio.sleep(0.4)
            await llm.add_adapter("guest", adapter_path("french"))
            params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
            asked = llm.stream([5, 6, 7, 8, 9], params, "guest")
            await anext(asked)
            await llm.remove_adapter("guest")
            async for _ in asked:
                pass

        await asyncio.gather(come_and_go(), *(conversation(llm, seed) for seed in range(15)))
        # Eight that start where seven can end.
        params = SamplingParams(temperature=0.0, max_tokens=115, ignore_eos=True)
        await llm.generate([[5, 6, 7, seed] for seed in range(8)], params)
        stats = await llm.stats()
        endless = llm.stream([5, 6, 7], SamplingParams(max_tokens=400, ignore_eos=True, seed=1))
        await anext(endless)
    return stats


@pytest.fixture(
    scope="module",
    params=[
        ("manylora", 1),
        ("manylora", 2),
        pytest.param(("fastlibra", 1), marks=pytest.mark.long),
        ("static-lru", 2),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    journal = tmp_path_factory.mktemp(request.param[0]) / "journal"
    policy, pipeline_depth = request.param
    stats = asyncio.run(crowd(policy, pipeline_depth, journal))
    assert stats.preemptions > 0
    assert min(stats.pages_swapped_in, stats.pages_swapped_out) > 0
    assert min(stats.adapter_evictions, stats.history_evictions, stats.host_evictions) > 0
    assert stats.adapter_reads > len(NAMES)
    return read(journal)


def came_during_steps(told: Sequence[Told]) -> collections.Counter[str]:
    """Events between a RunStep and its StepDone, by name."""
    names: collections.Counter[str] = collections.Counter()
    is_running = False
    for _, event, commands in told:
        is_running = is_running and not isinstance(event, StepDone)
        names[type(event).__name__] += is_running
        is_running = is_running or any(isinstance(command, RunStep) for command in commands)
    return names


def test_a_real_run_comes_out_the_same_again(run: Run) -> None:
    assert run.kinds >= {
        "Arrive", "Abort", "StepDone", "AdapterRead", "AdapterAdded", "AdapterRemoved", "CopyDone", "Timer",
        "RunStep", "SwapPages", "ReadAdapter", "CopyPages", "EvictAdapter", "AdapterFreed", "EndSequence",
    }  # fmt: skip
    assert all(commanded is not None for _, _, commanded in run.entries)
    assert str(replay_difference(run.config, run.entries, fingerprint)) == "None"
    assert str(simulation_difference(run.config, run.told)) == "None"
    held_back = came_during_steps(run.told)
    assert {name for name, count in held_back.items() if count} >= {"Arrive", "CopyDone", "Timer"}


IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path
from manylora.engine.journal import fingerprint
from manylora.engine.journal import read_answered
from manylora_lab.sim.conformance import replay_difference
config, entries = read_answered(Path(sys.argv[1]))
print(replay_difference(config, entries, fingerprint), end="")
"""


def test_no_order_of_hashes_decides(run: Run) -> None:
    """Texts have other hashes in another process: the names of requests, for one."""
    assert any(isinstance(told.event, Arrive) and isinstance(told.event.request.id, str) for told in run.told)
    for seed in ("1", "2"):
        replayed = subprocess.run(
            [sys.executable, "-c", IN_ANOTHER_PROCESS, str(run.journal)],
            capture_output=True, text=True, check=True, timeout=100,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert replayed.stdout == "None"


def test_changed_settings_are_noticed(run: Run) -> None:
    cache = dataclasses.replace(run.config.cache, policy="lru")
    for config in (
        dataclasses.replace(run.config, cache=cache),
        dataclasses.replace(run.config, max_num_seqs=2),
    ):
        replayed = replay_difference(config, run.entries, fingerprint)
        simulated = simulation_difference(config, run.told)
        assert replayed is not None
        assert simulated is not None
        assert replayed.number == simulated.number, "both see the first"
        assert "fingerprint" in str(replayed)
        assert " there, " in str(simulated)


def middle(run: Run, kind: str) -> int:
    """Where the event of that kind in the middle of the run is."""
    places = [place for place, told in enumerate(run.told) if type(told.event).__name__ == kind]
    return places[len(places) // 2]


def changed(
    recording: Recording, event: Event, change: Callable[[MeasuredAnswer], MeasuredAnswer]
) -> Recording:
    """With another measurement of one event."""

    def of(measurements: Sequence[MeasuredAnswer]) -> list[MeasuredAnswer]:
        return [change(m) if m.event is event else m for m in measurements]

    return Recording(of(recording.given), {asked: of(m) for asked, m in recording.answers.items()})


DIFFERENCES = (" s here, ", "here comes", " there, ")
"""The last with two steps in flight: the second one's end says of the first that it has failed."""


@pytest.mark.parametrize("kind", ["StepDone", "CopyDone"])
def test_a_lost_event_is_noticed(run: Run, kind: str) -> None:
    place = middle(run, kind)
    entries = [*run.entries[:place], *run.entries[place + 1 :]]
    replayed = replay_difference(run.config, entries, fingerprint)
    assert replayed is not None
    assert replayed.number > place
    event = run.told[place].event
    lost = changed(measured(run.told), event, lambda m: dataclasses.replace(m, event=None))
    simulated = simulation_difference(run.config, run.told, lost)
    assert simulated is not None
    # Without its end the loop does not wait for the step, and hands over sooner what came while it ran.
    assert simulated.number == place + 1 if kind == "CopyDone" else simulated.number <= place + 1
    assert any(says in simulated.what for says in DIFFERENCES)


@pytest.mark.parametrize(
    ("kind", "scale", "more_s"),
    [("StepDone", 1.01, 0.0), ("StepDone", 0.5, 0.0)]
    + [(kind, 1.0, 0.5) for kind in ("CopyDone", "AdapterRead", "Timer", "Arrive", "Abort")],
)
def test_another_duration_is_noticed(run: Run, kind: str, scale: float, more_s: float) -> None:
    event = run.told[middle(run, kind)].event

    def longer(m: MeasuredAnswer) -> MeasuredAnswer:
        return dataclasses.replace(m, took_s=m.took_s * scale + more_s)

    simulated = simulation_difference(run.config, run.told, changed(measured(run.told), event, longer))
    assert simulated is not None
    assert simulated.number <= middle(run, kind) + 1
    assert any(says in simulated.what for says in DIFFERENCES)


# ---------------------------------------------------------------- a device that fails


CONFIG = PolicyConfig(
    num_pages=16, page_tokens=4, max_model_len=64, max_num_seqs=4, max_batch_tokens=16, num_host_pages=40,
    cache=CacheConfig(interval_s=0.01),
)  # fmt: skip


@pytest.fixture
def failing(tmp_path: Path) -> Run:
    """Steps, copies and reads that fail, on an executor whose copies take next to no time."""

    async def scenario() -> None:
        executor = FakeExecutor()
        journal = JournalWriter(tmp_path / "journal", CONFIG)
        engine = LocalEngine(Driver(CONFIG, executor, INFO, journal=journal))
        executor.failing_reads = executor.failing_swaps = 2
        for name in "abcde":
            await engine.add_adapter(name, "3")
        for turn in range(4):
            executor.failing_steps = turn % 2
            asked = [
                request(f"{name}-{turn}", tuple(range(9 + turn)), name, max_tokens=9, n=1 + turn % 2)
                for name in "abcde"
            ]
            await asyncio.gather(*[drain(engine.generate(r)) for r in asked])
        await engine.close()

    asyncio.run(scenario())
    return read(tmp_path / "journal")


def test_failures_come_out_the_same_again(failing: Run) -> None:
    failed = {type(told.event) for told in failing.told if getattr(told.event, "ok", True) is False}
    assert failed == {StepDone, CopyDone, AdapterRead}
    assert str(replay_difference(failing.config, failing.entries, fingerprint)) == "None"
    assert str(simulation_difference(failing.config, failing.told)) == "None"


# ---------------------------------------------------------------- by hand


PARAMS = SamplingParams(max_tokens=1, seed=0, ignore_eos=True)


PATIENT = dataclasses.replace(CONFIG, cache=CacheConfig(interval_s=60.0))


def by_hand() -> list[Told]:
    """One step from 5.0 to 6.0 s; a request comes meanwhile and is told at 6.5 s, StepDone at 7.0 s."""
    first, second = (Arrive(Request(name, 0, (1, 2, 3), PARAMS)) for name in ("first", "second"))
    events: list[tuple[float, Event]] = [
        (5.0, first),
        (6.0, Abort("nobody")),
        (6.5, second),
        (7.0, StepDone(1, True, ((1, (4,)),))),
    ]
    return list(recorded_commands(PATIENT, events))


def test_what_is_measured() -> None:
    recording = measured(by_hand())
    # Told while the step ran or while the loop caught up: fed a third and two thirds into the step's second.
    assert [(m.took_s, m.late_s) for m in recording.given] == [
        (5.0, 0.0), (pytest.approx(5 + 1 / 3), 0.0), (pytest.approx(5 + 2 / 3), 0.5),
    ]  # fmt: skip
    (step,) = recording.answers["step", 1]
    assert (step.took_s, step.late_s) == (1.0, 0.5)
    # The second request's step has no answer yet.
    assert recording.answers["step", 2] == [MeasuredAnswer(None, 0.0)]
    assert simulation_difference(PATIENT, by_hand()) is None


def test_a_timer_may_be_due_when_a_recording_ends() -> None:
    """The loop tells it after what else has come; a timer that was due before a step ended is a lost one."""
    hasty = dataclasses.replace(PATIENT, cache=CacheConfig(interval_s=2.5))
    first = Arrive(Request("first", 0, (1, 2, 3), PARAMS))
    events: list[tuple[float, Event]] = [
        (5.0, first), (6.0, Abort("nobody")), (7.0, StepDone(1, True, ((1, (4,)),))),
    ]  # fmt: skip
    overtaking: list[tuple[float, Event]] = [(7.6, Abort("nobody")), (7.7, Abort("nobody"))]
    told = list(recorded_commands(hasty, [*events, *overtaking]))
    assert measured(told).answers["timer", 0] == [MeasuredAnswer(None, math.inf)]
    assert simulation_difference(hasty, told) is None

    lost = list(recorded_commands(hasty, [*events[:2], (7.6, events[2][1]), *overtaking[1:]]))
    assert measured(lost).answers["timer", 0] == [MeasuredAnswer(None)]
    difference = simulation_difference(hasty, lost)
    assert difference is not None
    assert difference.what.startswith("here comes Timer()")


def test_a_difference_reads_like_this() -> None:
    told = by_hand()
    times = changed(measured(told), told[2].event, lambda m: dataclasses.replace(m, late_s=0.75))
    assert str(simulation_difference(PATIENT, told, times)) == (
        f"event 3 at 6.500000000 s, {repr(told[2].event)[:160]}...: at 6.750000000 s here, +0.250000000 s"
    )
    *_, row = told[0].commands
    assert isinstance(row, RunStep)
    other = dataclasses.replace(row, rows=(row.rows[0]._replace(num_tokens=2),))
    told[0] = told[0]._replace(commands=[*told[0].commands[:-1], other])
    number = len(told[0].commands)
    assert f": command {number}, RunStep.rows[0].num_tokens is 2 there, 3 here" in str(
        simulation_difference(PATIENT, told)
    )
    told[0] = told[0]._replace(commands=told[0].commands[:-1])
    assert f": command {number} is nothing there, RunStep(step=1" in str(simulation_difference(PATIENT, told))


def test_a_journal_that_makes_no_sense_says_where() -> None:
    entries: list[tuple[float, Event, str | None]] = [
        (now, event, fingerprint(commands)) for now, event, commands in by_hand()
    ]
    tokens: Any = tuple("words")
    entries.append((8.0, Arrive(Request("third", 0, tokens, PARAMS)), None))
    assert str(replay_difference(PATIENT, entries, fingerprint)) == (
        f"event 5 at 8.000000000 s, {repr(entries[4][1])[:160]}...: "
        "the policy fails here: TypeError: 'str' object cannot be interpreted as an integer"
    )
