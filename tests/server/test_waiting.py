"""Requests that wait for an engine are bounded by the memory that they take, whatever makes them large."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from manylora.cluster.client import ClusterClient
from manylora.cluster.link import Credentials, Hello
from manylora.config.sections import EngineSettings, ModelSettings
from manylora.engine import wire
from manylora.engine.client import Delta, EngineBusy, EngineClient, GenerationRequest
from manylora.engine.mailboxes import MAX_WAITING_BYTES, Mailboxes
from manylora.engine.remote import RemoteEngine
from manylora.text.generate import TextStream
from manylora.text.tokenizer import Tokenizer
from manylora.types import SamplingParams
from tests.server.fakes import FakeEngine

IDS = tuple(range(1000, 21_000))
KINDS: dict[str, dict[str, Any]] = {
    "prompt": {},
    "stop ids": {"stop_token_ids": IDS},
    "biases": {"logit_bias": [(token, 1.5) for token in IDS[:6000]]},
    "many stop strings": {"stop": ["ab" * 128] * 64},
    "one stop string": {"stop": ["a" * 20_000]},
    "samples": {"n": 128},
}


def request(number: int, **params: Any) -> GenerationRequest:
    prompt = (1, 2) if params else IDS
    return GenerationRequest(f"r{number}", prompt, SamplingParams(**params))


class Waiting(FakeEngine):
    """Takes requests and says nothing of them."""

    def __init__(self, max_bytes: float) -> None:
        super().__init__()
        self.boxes = Mailboxes(max_bytes)
        self.asked: list[GenerationRequest] = []

    def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        return self.boxes.open(request, self.asked.append, self.abort)


@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_takes_about_as_much_memory_as_it_counts_for(kind: str, tokenizer: Tokenizer) -> None:
    raw = msgspec.msgpack.encode(request(0, **KINDS[kind]))
    engine = Waiting(4e6)
    streams: list[TextStream] = []
    tracemalloc.start()
    try:
        with contextlib.suppress(EngineBusy):
            while len(streams) < 1000:
                asked = msgspec.msgpack.decode(raw, type=GenerationRequest)
                named = GenerationRequest(f"r{len(streams)}", asked.prompt, asked.params)
                streams.append(TextStream(engine, tokenizer, named))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 1e6 < kept < 5e6


def test_room_comes_back_with_the_first_word_and_with_the_end() -> None:
    engine = Waiting(1)

    def ask(number: int) -> TextStream:
        return TextStream(engine, None, request(number))

    async def scenario() -> None:
        first = ask(1)  # larger than the bound: what waits already counts
        with pytest.raises(EngineBusy, match="requests that wait take 0 MiB; try again later"):
            ask(2)
        engine.boxes.dispatch([Delta("r1", 0, (5,), serial=engine.asked[0].serial)])
        second = ask(2)
        with pytest.raises(EngineBusy):
            ask(3)
        await first.aclose()
        with pytest.raises(EngineBusy):
            ask(3)
        await second.aclose()
        engine.boxes.dispatch([Delta("r2", 0, (5,), serial=engine.asked[1].serial)])  # came too late
        third = ask(3)
        with pytest.raises(EngineBusy):
            ask(4)
        await third.aclose()
        await ask(4).aclose()

    asyncio.run(scenario())


async def of_one_engine() -> EngineClient:
    ours, theirs = socket.socketpair()
    theirs.sendall(wire.frame(wire.EngineReady(FakeEngine().info)))
    return await RemoteEngine.connect(ours, EngineSettings(ModelSettings("fake")))


def of_a_cluster(max_waiting: int) -> EngineClient:
    hello = Hello("frontend", 0, 0, 0, "1", "fake")
    return ClusterClient(FakeEngine().info, ("127.0.0.1", 1), Credentials(b""), hello, max_waiting, 60.0)


@pytest.mark.parametrize("kind", ["one engine", "a cluster"])
def test_servers_and_front_ends_are_bounded(kind: str) -> None:
    async def scenario() -> None:
        client = await of_one_engine() if kind == "one engine" else of_a_cluster(10_000)
        params = SamplingParams(**KINDS["stop ids"], **KINDS["biases"])
        streams: list[AsyncIterator[Delta]] = []
        with contextlib.suppress(EngineBusy):
            while len(streams) < 1000:
                streams.append(client.generate(GenerationRequest(f"r{len(streams)}", (1,), params)))
        assert MAX_WAITING_BYTES / 2e6 < len(streams) < MAX_WAITING_BYTES / 1e6
        await client.close()

    asyncio.run(scenario())


def test_a_front_end_counts_the_requests_that_have_no_replica() -> None:
    async def scenario() -> None:
        client = of_a_cluster(2)
        streams: list[Any] = [client.generate(request(number, n=1)) for number in range(3)]
        refusal = await anext(streams[2])
        assert refusal.error is not None
        assert refusal.error.status == 429
        await streams[0].aclose()
        again = client.generate(request(4, n=1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(again), 0.05)
        await client.close()

    asyncio.run(scenario())
