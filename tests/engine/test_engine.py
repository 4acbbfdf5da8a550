"""The engine's loop and both of its clients, on an executor without tensors."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from manylora.config.policy import PolicyConfig
from manylora.config.sections import EngineSettings, ModelSettings
from manylora.engine import service, wire
from manylora.engine.client import Delta, EngineDead, GenerationRequest
from manylora.engine.driver import Driver
from manylora.engine.journal import JournalWriter, read_journal
from manylora.engine.local import LocalEngine
from manylora.engine.ports import MAX_FAILED_STEPS
from manylora.engine.remote import RemoteEngine
from manylora.policy.replica import Replica
from manylora.protocol.commands import DeviceCommand, InspectAdapter
from manylora.protocol.executor import AdapterChecked, AdapterError
from manylora.types import EngineInfo, InvalidRequest, SamplingParams
from tests.engine.fake_executor import FakeExecutor
from tests.policy.device_model import undisturbed
from tests.policy.reports import gauges

CONFIG = PolicyConfig(num_pages=40, page_tokens=4, max_model_len=64, max_num_seqs=8, max_batch_tokens=16)
INFO = EngineInfo("fake", 64, 7, (6,), 40, 4, 64, "cpu", "float32", 8, 16)
Engine = LocalEngine | RemoteEngine


def request(
    name: str, prompt: tuple[int, ...] = (1, 2, 3), adapter: str | None = None, **params: Any
) -> GenerationRequest:
    stream = params.pop("stream", True)
    return GenerationRequest(
        name, prompt, SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **params}), adapter, stream
    )


async def drain(deltas: AsyncIterator[Delta]) -> tuple[dict[int, list[int]], dict[int, str], list[Delta]]:
    tokens: dict[int, list[int]] = {}
    reasons: dict[int, str] = {}
    seen = []
    async for delta in deltas:
        seen.append(delta)
        tokens.setdefault(delta.sample, []).extend(delta.tokens)
        if delta.finish_reason:
            assert delta.sample not in reasons
            reasons[delta.sample] = delta.finish_reason
    return tokens, reasons, seen


@contextlib.asynccontextmanager
async def running(
    kind: str, executor: FakeExecutor, journal: JournalWriter | None = None
) -> AsyncIterator[Engine]:
    driver = Driver(CONFIG, executor, INFO, journal=journal)
    if kind == "local":
        engine: Engine = LocalEngine(driver)
        yield engine
        await engine.close()
        return
    ours, theirs = socket.socketpair()

    def child() -> None:
        assert isinstance(wire.read_from_server(theirs), wire.Start)
        service.serve(theirs, service.Sender(theirs), driver)
        theirs.close()

    thread = threading.Thread(target=child)
    thread.start()
    engine = await RemoteEngine.connect(ours, EngineSettings(ModelSettings("fake")))
    yield engine
    await engine.close()
    await asyncio.to_thread(thread.join)


kinds = pytest.mark.parametrize("kind", ["local", "remote"])


@kinds
def test_names_that_are_not_utf8_do_not_end_the_conversation(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those of folders nor those that a file gives to its tensors."""
    executor = FakeExecutor()

    obey = executor.obey

    def refuse(command: DeviceCommand) -> None:
        if isinstance(command, InspectAdapter):
            error = f"tensor half\ud83d in {command.path}"
            executor.tell(AdapterChecked(command.adapter, False, error=error))
        else:
            obey(command)

    async def scenario() -> None:
        async with running(kind, executor) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(executor, "obey", refuse)
                with pytest.raises(AdapterError, match="tensor half"):
                    await engine.add_adapter("first", "\udcff")
            assert (await engine.add_adapter("first", "3")).name == "first"

    asyncio.run(asyncio.wait_for(scenario(), 60))


@kinds
def test_weights_are_read_only_of_adapters_that_the_pool_can_hold(kind: str) -> None:
    executor = FakeExecutor()

    async def scenario() -> None:
        async with running(kind, executor) as engine:
            with pytest.raises(AdapterError, match="takes 1000000 pages"):
                await engine.add_adapter("x", "1000000")
            assert not executor.verified
            executor.failing_verifications = 1
            with pytest.raises(AdapterError, match="made to fail"):
                await engine.add_adapter("x", "3")
            assert not executor.known, "nothing is left of either"
            assert (await engine.add_adapter("x", "4")).num_pages == 4
            assert executor.verified == ["3", "4"]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_load_that_is_not_waited_for_any_more_is_not_begun() -> None:
    executor = FakeExecutor()

    async def scenario() -> None:
        async with running("remote", executor) as engine:
            executor.verify_gate.clear()
            loads = [asyncio.create_task(engine.add_adapter(f"a{i}", str(i + 1))) for i in range(4)]
            while not executor.verified:
                await asyncio.sleep(0.01)
            for load in loads[:3]:  # the first has begun, two wait for it
                load.cancel()
            assert len(await asyncio.gather(*loads[:3], return_exceptions=True)) == 3
            await engine.adapters()  # answered after all that was sent before
            executor.verify_gate.set()
            assert (await loads[3]).name == "a3"
            assert executor.verified == ["1", "4"]
            assert [card.name for card in await engine.adapters()] == ["a0", "a3"]
            assert (await engine.add_adapter("a1", "2")).name == "a1", "the name is free"

    try:
        asyncio.run(asyncio.wait_for(scenario(), 60))
    finally:
        executor.verify_gate.set()


@kinds
def test_requests_get_their_own_tokens(kind: str) -> None:
    async def scenario() -> None:
        async with running(kind, FakeExecutor()) as engine:
            card = await engine.add_adapter("first", "3")
            assert (card.name, card.num_pages, card.rank) == ("first", 3, 8)
            asked = [request(f"r{i}", (i, 2, 3), "first" if i % 2 else None, n=1 + i % 3) for i in range(12)]
            results = await asyncio.gather(*[drain(engine.generate(r)) for r in asked])
            for r, (tokens, reasons, _) in zip(asked, results, strict=True):
                adapter = card.id if r.adapter else 0
                for sample in range(r.params.n):
                    assert tokens[sample] == undisturbed(adapter, r.prompt, r.params, (), sample)
                    assert reasons[sample] == "length"
            stats = await engine.stats()
            assert stats.num_running == stats.num_waiting == stats.pages_running == 0
            assert [(a.name, a.state) for a in stats.adapters] == [("first", "resident")]
            assert stats.generated_tokens >= sum(8 * r.params.n for r in asked)

    asyncio.run(scenario())


@kinds
def test_final_only_requests_come_in_one_delta(kind: str) -> None:
    async def scenario() -> None:
        async with running(kind, FakeExecutor()) as engine:
            tokens, _, deltas = await drain(engine.generate(request("a", n=2, logprobs=0, stream=False)))
            assert len(deltas) == 2
            for delta in deltas:
                assert [p.token for p in delta.logprobs] == list(delta.tokens) == tokens[delta.sample]
                assert all(p.logprob == -float(p.token) for p in delta.logprobs)

    asyncio.run(scenario())


@kinds
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("max_tokens", [0, 8])
def test_a_prompts_logprobs_come_whole_with_the_first_delta(kind: str, stream: bool, max_tokens: int) -> None:
    """Of prompts of several chunks, of pages and a half, and of one token; cached or not."""

    async def scenario() -> None:
        async with running(kind, FakeExecutor()) as engine:
            for number, length in enumerate((42, 42, 16, 17, 2, 1)):
                prompt = tuple(1 + i % 5 for i in range(length))
                asked: Any = {"n": 2, "stream": stream, "max_tokens": max_tokens, "prompt_logprobs": 3}
                tokens, reasons, deltas = await drain(engine.generate(request(f"r{number}", prompt, **asked)))
                first, *others = deltas
                assert first.timing.num_cached_tokens == 0
                assert first.prompt_logprobs is not None
                entries = list(first.prompt_logprobs.entries(prompt[1:]))
                assert len(first.prompt_logprobs) == len(entries) == length - 1
                assert [(e.token, e.logprob, e.top, rank) for e, rank in entries] == [
                    (token, -float(token), (), token + 1) for token in prompt[1:]
                ]
                assert all(delta.prompt_logprobs is None for delta in others)
                assert reasons == {0: "length", 1: "length"}
                for sample in (0, 1):
                    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=3)
                    assert tokens[sample] == undisturbed(0, prompt, params, (), sample)
            # Its pages are in the cache all the same.
            _, _, deltas = await drain(engine.generate(request("last", tuple(1 + i % 5 for i in range(42)))))
            assert (deltas[0].timing.num_cached_tokens, deltas[0].prompt_logprobs) == (40, None)

    asyncio.run(scenario())


@kinds
def test_stop_ids_are_marked(kind: str) -> None:
    async def scenario() -> None:
        async with running(kind, FakeExecutor()) as engine:
            everything = tuple(range(6))
            _, reasons, deltas = await drain(
                engine.generate(request("a", stop_token_ids=everything, min_tokens=2))
            )
            assert reasons == {0: "stop"}
            assert deltas[-1].stop_token
            assert sum(len(d.tokens) for d in deltas) == 2

    asyncio.run(scenario())


@kinds
def test_a_request_may_bring_ends(kind: str) -> None:
    """What no token of the vocabulary has is none."""

    async def scenario() -> None:
        async with running(kind, FakeExecutor()) as engine:
            for ignore_eos, num_tokens in ((False, 2), (True, 5)):
                asked = request("a", min_tokens=2, max_tokens=5, ignore_eos=ignore_eos)
                asked = dataclasses.replace(asked, eos_ids=(*range(6), 10**6))
                _, reasons, deltas = await drain(engine.generate(asked))
                assert reasons == {0: "length" if ignore_eos else "stop"}
                assert sum(len(d.tokens) for d in deltas) == num_tokens

    asyncio.run(scenario())


@kinds
def test_refusals(kind: str) -> None:
    async def scenario() -> None:
        async with running(kind, FakeExecutor()) as engine:
            for bad, status in (
                (request("a", adapter="nobody"), 404),
                (request("b", prompt=()), 400),
                (request("c", prompt=(1,) * 60, n=3), 400),
            ):
                _, _, deltas = await drain(engine.generate(bad))
                assert [d.error.status for d in deltas if d.error] == [status]
            with pytest.raises(AdapterError):
                await engine.add_adapter("x", "bad")
            with pytest.raises(AdapterError, match="40"):
                await engine.add_adapter("x", "40")  # the whole pool: no page for a request
            await engine.add_adapter("x", "1")
            with pytest.raises(AdapterError, match="already"):
                await engine.add_adapter("x", "1")
            with pytest.raises(AdapterError) as unknown:
                await engine.remove_adapter("y")
            assert unknown.value.status == 404
            tokens, _, _ = await drain(engine.generate(request("ok", adapter="x")))
            assert len(tokens[0]) == 8

    asyncio.run(scenario())


@kinds
def test_closing_the_iterator_aborts(kind: str) -> None:
    async def scenario() -> None:
        executor = FakeExecutor()
        executor.step_s = 0.1  # a second request's fifty tokens would take seconds
        async with running(kind, executor) as engine:
            never_read = engine.generate(request("a", max_tokens=50))
            half_read = engine.generate(request("b", max_tokens=50))
            await half_read.__anext__()
            with pytest.raises(InvalidRequest, match="in use"):
                engine.generate(request("b"))
            await never_read.aclose()  # type: ignore[attr-defined]
            await half_read.aclose()  # type: ignore[attr-defined]
            while (await engine.stats()).num_running:
                await asyncio.sleep(0.01)
            assert (await engine.stats()).generated_tokens < 60

    asyncio.run(scenario())


@kinds
def test_unload_waits_for_running_requests_and_a_new_version_is_read_again(kind: str) -> None:
    async def scenario() -> None:
        executor = FakeExecutor()
        executor.step_s = 0.1  # sixty tokens take far longer than the refusal
        async with running(kind, executor) as engine:
            first = await engine.add_adapter("x", "2")
            stream = engine.generate(request("a", max_tokens=60, adapter="x"))
            await stream.__anext__()
            removal = asyncio.create_task(engine.remove_adapter("x"))
            await asyncio.sleep(0)
            _, _, refused = await drain(engine.generate(request("b", adapter="x")))
            assert not removal.done()
            executor.step_s = 0.0
            assert refused[0].error is not None
            assert refused[0].error.status == 404
            second = await engine.add_adapter("x", "2")
            assert second.id != first.id
            tokens, _, _ = await drain(engine.generate(request("c", adapter="x")))
            assert tokens[0] == undisturbed(second.id, (1, 2, 3), SamplingParams(max_tokens=8), (), 0)
            await drain(stream)
            await removal
            assert first.id not in executor.known
            assert first.id not in executor.resident
            assert executor.reads == 2

    asyncio.run(scenario())


@kinds
def test_who_asks_may_give_up(kind: str) -> None:
    """What the loop then answers to nobody does it no harm."""

    async def scenario() -> None:
        executor = FakeExecutor()
        async with running(kind, executor) as engine:
            await engine.add_adapter("x", "2")
            executor.step_gate.clear()
            stream = engine.generate(request("a", max_tokens=8, adapter="x"))
            await asyncio.to_thread(executor.is_held.wait)
            asked = [asyncio.create_task(engine.stats()), asyncio.create_task(engine.remove_adapter("x"))]
            await asyncio.sleep(0)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            assert [task.cancelled() for task in asked] == [True, True]
            executor.step_gate.set()
            await drain(stream)
            tokens, _, _ = await drain(engine.generate(request("b")))
            assert tokens[0] == undisturbed(0, (1, 2, 3), SamplingParams(max_tokens=8), (), 0)
            assert [card.name for card in (await engine.stats()).adapters] == []

    asyncio.run(scenario())


@kinds
def test_a_failed_read_fails_its_requests_only(kind: str) -> None:
    async def scenario() -> None:
        executor = FakeExecutor()
        executor.failing_reads = 1
        async with running(kind, executor) as engine:
            await engine.add_adapter("x", "2")
            (_, _, bad), (good, _, _) = await asyncio.gather(
                drain(engine.generate(request("a", adapter="x"))), drain(engine.generate(request("b")))
            )
            assert bad[0].error is not None
            assert bad[0].error.status == 503
            assert len(good[0]) == 8
            tokens, _, _ = await drain(engine.generate(request("c", adapter="x")))
            assert len(tokens[0]) == 8
            assert (await engine.stats()).adapter_read_failures == 1

    asyncio.run(scenario())


@kinds
def test_a_failed_step_fails_its_requests_and_a_broken_device_ends_the_engine(kind: str) -> None:
    async def scenario() -> None:
        executor = FakeExecutor()
        async with running(kind, executor) as engine:
            executor.failing_steps = 1
            _, reasons, deltas = await drain(engine.generate(request("a", n=2)))
            assert reasons == {0: "error", 1: "error"}
            assert all(d.error is not None and d.error.status == 500 for d in deltas)
            tokens, _, _ = await drain(engine.generate(request("b")))
            assert len(tokens[0]) == 8
            executor.failing_steps = 100
            for i in range(MAX_FAILED_STEPS):
                with contextlib.suppress(EngineDead):
                    await drain(engine.generate(request(f"c{i}")))
            assert "made to fail" in await engine.wait_dead()
            with pytest.raises(EngineDead):
                await drain(engine.generate(request("d")))

    asyncio.run(scenario())


@kinds
def test_close_ends_what_runs(kind: str) -> None:
    async def scenario() -> None:
        executor = FakeExecutor()
        executor.step_s = 0.1  # sixty tokens take far longer than the end
        async with running(kind, executor) as engine:
            stream = engine.generate(request("a", max_tokens=60))
            await stream.__anext__()
        with pytest.raises(EngineDead):
            await drain(stream)
        assert executor.closed == 1
        # A process that ends leaves its memory to the system.
        assert executor.freed == (kind == "local")

    asyncio.run(scenario())


@pytest.mark.parametrize("frees", [True, False])
def test_what_was_written_is_complete_before_memory_is_freed(tmp_path: Path, frees: bool) -> None:
    path = tmp_path / "journal.jsonl"
    seen: list[str] = []

    class Slow(FakeExecutor):
        """Whatever comes after its end may not come at all."""

        def close(self, *, frees: bool = True) -> None:
            super().close(frees=frees)
            seen.extend(type(event).__name__ for _, event in read_journal(path)[1])

    executor = Slow()
    driver = Driver(CONFIG, executor, INFO, journal=JournalWriter(path, CONFIG))
    driver.start(lambda _: None, lambda _: None)
    driver.add_adapter("first", "3")
    driver.stats().result(60)
    driver.close(frees=frees)
    assert seen == ["AdapterAdded", "ReportDue"]
    assert executor.freed == frees


def test_a_journal_replays_into_the_same_commands(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    recorded: list[Any] = []

    class Recording(JournalWriter):
        def record(self, event: Any, now: float) -> None:
            super().record(event, now)
            recorded.append(event)

    async def scenario() -> None:
        async with running("local", FakeExecutor(), Recording(path, CONFIG)) as engine:
            await engine.add_adapter("x", "3")
            asked = [
                request(f"r{i}", (i, 2, 3), "x" if i % 2 else None, n=2, max_tokens=20) for i in range(9)
            ]
            await asyncio.gather(*[drain(engine.generate(r)) for r in asked])
            await engine.remove_adapter("x")

    asyncio.run(scenario())
    config, events = read_journal(path)
    assert config == CONFIG
    one, other = Replica(config), Replica(config)
    replayed = list(events)
    assert [event for _, event in replayed] == recorded
    for (now, event), original in zip(replayed, recorded, strict=True):
        assert one.handle(event, now) == other.handle(original, now)
    assert gauges(one).num_running == 0


@kinds
def test_nobody_waits_for_an_engine_that_died_meanwhile(kind: str) -> None:
    async def scenario() -> None:
        executor = FakeExecutor()
        async with running(kind, executor) as engine:
            await engine.add_adapter("x", "2")
            executor.step_gate.clear()
            executor.failing_steps = 100
            stream = engine.generate(request("a", adapter="x"))
            await asyncio.to_thread(executor.is_held.wait)  # the step that will fail is running now

            def broken(step: object) -> None:
                raise RuntimeError("device gone")

            executor.computed = broken  # type: ignore[assignment, method-assign]
            other = engine.generate(request("b"))
            asked = [asyncio.create_task(engine.stats()), asyncio.create_task(engine.remove_adapter("x"))]
            await asyncio.sleep(0)  # they have asked
            executor.step_gate.set()
            for pending in (*asked, asyncio.create_task(drain(other))):
                with contextlib.suppress(EngineDead, AdapterError):
                    await asyncio.wait_for(pending, 60)
            with contextlib.suppress(EngineDead):
                await drain(stream)
            await asyncio.wait_for(engine.wait_dead(), 60)
            with pytest.raises((EngineDead, AdapterError)):
                await asyncio.wait_for(engine.stats(), 60)

    asyncio.run(scenario())


def test_a_sender_that_cannot_send_hangs_up(caplog: pytest.LogCaptureFixture) -> None:
    """Silent, the engine would be alive to its server for ever."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    sender = service.Sender(theirs)
    sender.send(wire.Failed("the first"))
    sender.send(object())  # type: ignore[arg-type]
    sender.send(wire.Failed("never sent"))
    with ours, theirs, ours.makefile("rb") as received:
        everything = received.read()  # until it hangs up
    assert everything == wire.frame(wire.Failed("the first"))
    sender.close()
    assert "could not be sent" in caplog.text
