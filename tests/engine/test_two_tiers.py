"""The loop with the real policy and two tiers: copies, parts of the time to first token, trace, stats."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.engine import service
from manylora.engine.client import Delta, EngineStats, GenerationRequest
from manylora.engine.driver import Driver
from manylora.engine.journal import JournalWriter, TraceWriter, read_journal
from manylora.engine.local import LocalEngine
from manylora.engine.ports import EnginePorts
from manylora.policy.replica import Replica
from manylora.protocol.commands import Command, Decided, SwapPages
from manylora.protocol.events import CopyDone, Timer
from manylora.protocol.executor import AdapterError
from manylora.reports import AdapterUse
from manylora.types import SamplingParams
from tests.engine.fake_executor import FakeExecutor
from tests.engine.test_engine import CONFIG, INFO, drain, kinds, request, running
from tests.policy.device_model import undisturbed

SMALL = PolicyConfig(
    num_pages=16, page_tokens=4, max_model_len=64, max_num_seqs=4, max_batch_tokens=16, num_host_pages=60,
    cache=CacheConfig(trace=True, interval_s=0.01),
)  # fmt: skip
NAMES = [f"a{i}" for i in range(5)]


@contextlib.asynccontextmanager
async def small_engine(
    executor: FakeExecutor,
    config: PolicyConfig = SMALL,
    journal: JournalWriter | None = None,
    trace: TraceWriter | None = None,
) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(Driver(config, executor, INFO, journal=journal, trace=trace))
    for name in NAMES:
        await engine.add_adapter(name, "3")
    yield engine
    await engine.close()


def play(driver: Driver) -> None:
    """All turns, on an engine that ends with them."""

    async def scenario() -> None:
        engine = LocalEngine(driver)
        for name in NAMES:
            await engine.add_adapter(name, "3")
        await turns(engine)
        await engine.close()

    asyncio.run(scenario())


async def turns(engine: LocalEngine, rounds: int = 4) -> None:
    """Conversations that take turns, more than the device holds; every token is checked."""
    ids = {card.name: card.id for card in await engine.adapters()}
    prompts = {name: tuple(range(9)) for name in NAMES}
    for turn in range(rounds):
        asked = [request(f"{name}-{turn}", prompts[name], name, max_tokens=4) for name in NAMES]

        async def ask(r: GenerationRequest) -> None:
            assert r.adapter is not None
            tokens, reasons, _ = await drain(engine.generate(r))
            assert tokens[0] == undisturbed(ids[r.adapter], r.prompt, r.params, (), 0)
            assert reasons == {0: "length"}
            prompts[r.adapter] = (*r.prompt, *tokens[0], 7)

        await asyncio.gather(*[ask(r) for r in asked])


def test_copies_fail_and_nobody_can_tell_from_the_tokens() -> None:
    async def scenario() -> None:
        executor = FakeExecutor()
        async with small_engine(executor) as engine:
            await turns(engine)
            assert executor.swaps
            executor.failing_swaps = 3
            await turns(engine)
            stats = await engine.stats()
        assert executor.failing_swaps == 0
        assert stats.swaps_failed == 3
        assert stats.pages_swapped_in > 0
        assert stats.swap_in_s > 0.0

    asyncio.run(scenario())


def test_what_clients_wait_for_is_on_its_way_before_copies_begin() -> None:
    """What is kept or brought for later, when a step has ended, holds its tokens up for none of that."""

    class Noting(FakeExecutor):
        def swap_pages(self, command: SwapPages) -> None:
            held.append(len(driver._ports._outbox._ready))
            super().swap_pages(command)

    held: list[int] = []
    driver = Driver(SMALL, Noting(), INFO)
    play(driver)
    assert len(held) > 10
    assert not any(held)


def test_each_figure_has_one_owner() -> None:
    """A figure is found by its name alone, so no two records have one of the same name."""
    names = [field.name for record in EngineStats().records for field in dataclasses.fields(record)]
    assert len(names) == len(set(names))
    assert EngineStats().preemptions == 0
    with pytest.raises(AttributeError):
        _ = EngineStats().no_such_figure


def test_stats_of_two_tiers_add_up() -> None:
    async def scenario() -> None:
        async with small_engine(FakeExecutor()) as engine:
            await turns(engine)
            stats = await engine.stats()
        uses = (stats.pages_free, stats.pages_running, stats.pages_history, stats.pages_adapters)
        assert sum(uses) == stats.pages_total == 16
        assert stats.host_pages_total == 60
        assert stats.host_pages_history + stats.host_pages_adapters > 0
        assert stats.kv_hit_tokens_device + stats.kv_hit_tokens_host == stats.prefix_hits_tokens > 0
        assert stats.adapter_hits_device + stats.adapter_hits_host + stats.adapter_misses >= 20
        assert {load.host_state for load in stats.adapters} <= {"none", "filling", "held"}
        assert any(load.host_state == "held" for load in stats.adapters)

    asyncio.run(scenario())


@kinds
def test_stats_of_many_adapters_cost_the_loop_what_has_changed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are true of each, however often they are asked for, and whoever comes and goes."""
    told: list[int] = []
    update = EnginePorts._note_uses

    def counted(ports: EnginePorts, uses: Sequence[AdapterUse]) -> None:
        told.append(len(uses))
        update(ports, uses)

    monkeypatch.setattr(EnginePorts, "_note_uses", counted)

    async def scenario() -> None:
        async with running(kind, FakeExecutor()) as engine:
            names = [f"a{i}" for i in range(2 * service.LOADS_A_MESSAGE + 3)]
            for name in names:
                await engine.add_adapter(name, "3")
            stats, again = await asyncio.gather(engine.stats(), engine.stats())
            assert stats.adapters == again.adapters
            assert [(load.name, load.state, load.rank) for load in stats.adapters] == [
                (name, "absent", 8) for name in names
            ]
            for name in ("a7", "a300"):
                await drain(engine.generate(request(name, tuple(range(9)), name)))
            await engine.remove_adapter("a8")
            await engine.add_adapter("a8", "2")
            stats = await engine.stats()
            assert [load.name for load in stats.adapters] == [*names[:8], *names[9:], "a8"]
            resident = {load.name: load.history_pages for load in stats.adapters if load.state == "resident"}
            assert resident.keys() == {"a7", "a300"}
            assert all(resident.values())
            await engine.stats()

    asyncio.run(scenario())
    # The base is always told of, and once more the two that served; one that is added says so itself.
    assert [count for count in told if count > 1] == [3]


@kinds
def test_the_first_delta_says_what_a_request_waited_for(kind: str) -> None:
    async def scenario() -> None:
        async with running(kind, FakeExecutor()) as engine:
            await engine.add_adapter("x", "3")

            async def first_and_rest(name: str) -> tuple[Delta, list[Delta]]:
                _, _, deltas = await drain(engine.generate(request(name, adapter="x")))
                return deltas[0], deltas[1:]

            cold, rest = await first_and_rest("cold")
            assert cold.timing.adapter_s > 0.0
            assert cold.timing.kv_s == 0.0
            assert rest
            assert all(d.timing[1:] == (0, 0.0, 0.0, 0.0) for d in rest)
            warm, _ = await first_and_rest("warm")
            assert warm.timing.adapter_s == warm.timing.kv_s == 0.0

    asyncio.run(scenario())


LINE = re.compile(r" *\d+\.\d{3} s  [a-z-]+ +a\d@\d+ +(adapter of 3 pages|page \d+ of its prefix) +[a-z]+")


def test_a_trace_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "trace"

    async def scenario() -> None:
        async with small_engine(FakeExecutor(), trace=TraceWriter(path)) as engine:
            await turns(engine)

    asyncio.run(scenario())
    lines = path.read_text().splitlines()
    assert lines
    assert all(LINE.match(line) for line in lines), lines
    times = [float(line.split()[0]) for line in lines]
    assert times == sorted(times)
    assert 0.0 <= times[0] < 60.0  # since the engine's start
    assert any("page 1 of its prefix" in line for line in lines)
    assert any("worth" in line for line in lines)


def test_trace_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    trace = TraceWriter(path)
    trace.record(Decided("evict", 3, 7, 1, "demand", -3.214), "german@3", 12.3451)
    trace.record(Decided("read", 3, 0, 12, "queue"), "german@3", 12.5)
    trace.flush()
    expected = [
        "    12.345 s  evict       german@3                  page 7 of its prefix       demand    worth -3.21",
        "    12.500 s  read        german@3                  adapter of 12 pages        queue",
    ]
    assert path.read_text().splitlines() == expected
    trace.close()
    trace.close()


def test_a_trace_that_cannot_be_written_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with small_engine(FakeExecutor(), trace=TraceWriter(Path("/dev/full"))) as engine:
            await turns(engine)

    asyncio.run(scenario())
    assert len([r for r in caplog.records if "the trace ends here" in r.getMessage()]) == 1


def test_a_journal_of_copies_and_timers_replays_into_the_same_commands(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    obeyed: list[Command] = []
    driver = Driver(SMALL, FakeExecutor(), INFO, journal=JournalWriter(path, SMALL))
    decide = driver._machine.handle
    driver._machine.handle = lambda event, now: _kept(decide(event, now), obeyed)  # type: ignore[method-assign]
    play(driver)
    config, events = read_journal(path)
    assert config == SMALL
    replica, replayed = Replica(config), list(events)
    assert {CopyDone, Timer} <= {type(event) for _, event in replayed}
    assert [command for now, event in replayed for command in replica.handle(event, now)] == obeyed


def _kept(commands: list[Command], kept: list[Command]) -> list[Command]:
    kept += commands
    return commands


@pytest.mark.parametrize(("policy", "limit"), [("manylora", 39), ("lru", 39), ("static-lru", 8)])
def test_an_adapter_larger_than_its_room_is_refused_with_both_sizes(policy: str, limit: int) -> None:
    async def scenario() -> None:
        config = dataclasses.replace(CONFIG, cache=CacheConfig(policy=policy, adapter_share=0.2))
        engine = LocalEngine(Driver(config, FakeExecutor(), INFO))
        with pytest.raises(AdapterError, match=f"takes {limit + 1} pages .* 40, .* may take {limit}:"):
            await engine.add_adapter("x", str(limit + 1))
        card = await engine.add_adapter("x", str(limit))
        tokens, _, _ = await drain(engine.generate(request("r", (1,), "x", max_tokens=3)))
        assert tokens[0] == undisturbed(card.id, (1,), SamplingParams(max_tokens=3), (), 0)
        await engine.close()

    asyncio.run(scenario())
