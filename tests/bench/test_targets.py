"""The two targets on real engines, and the other dialect of HTTP servers on a stand-in that speaks it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from manylora_lab.bench import http_client, http_target
from manylora_lab.bench.http_target import HttpTarget
from manylora_lab.bench.replay import ReplaySettings
from manylora_lab.bench.serve import measure
from manylora_lab.bench.targets import EngineTarget, TargetRequest, TargetResult, numbers_of, open_engine
from manylora_lab.workloads.chat import TRACES, read_turns, shrunk, to_stream
from manylora_lab.workloads.stream import Stream

from manylora.config.declaring import ConfigError
from manylora.flags import build_settings
from tests.e2e.process import MODEL, REPOSITORY, Server

CALL = TargetRequest((30, 31, 32, 33, 34), 6, "adapter-1")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three shipped adapters under a trace's names."""
    root = tmp_path_factory.mktemp("adapters")
    for number, folder in enumerate(sorted((REPOSITORY / "demo" / "adapters").iterdir())[:3]):
        shutil.copytree(folder, root / f"adapter-{number}")
    return str(root)


@pytest.fixture(scope="module")
def server(adapters: str) -> Iterator[Server]:
    with Server("--adapter-dir", adapters, "--device-pool", "32MiB", "--api-key", "secret") as started:
        yield started.wait_ready()


def engine(adapters: str) -> EngineTarget:
    settings = {"model": MODEL, "adapter_dir": adapters, "device": "cpu", "device_pool": "32MiB"}
    return open_engine(build_settings(settings)[0])


def chat() -> Stream:
    small = shrunk(read_turns(TRACES / "chat_5rps.jsonl.gz", 25), 16)
    turns = (dataclasses.replace(turn, adapter=turn.adapter % 3, rank=8) for turn in small)
    return to_stream(turns, ranks=(8, 8, 8)).with_rate(10.0)


def test_an_engine_and_a_server_give_the_same_tokens(adapters: str, server: Server) -> None:
    async def both() -> tuple[TargetResult, TargetResult, TargetResult]:
        ours = engine(adapters)
        try:
            inside = await ours.generate(CALL)
            base = await ours.generate(dataclasses.replace(CALL, adapter=None))
            assert MODEL in ours.adapters  # by its name, as over HTTP
            assert (await ours.generate(dataclasses.replace(CALL, adapter=MODEL))).tokens == base.tokens
        finally:
            await ours.close()
        with pytest.raises(ConfigError, match=r"HTTP 401: .* \(--api-key says the server's key\)"):
            await HttpTarget.connect(server.url)
        theirs = await HttpTarget.connect(server.url, "secret")
        assert theirs.adapters == {"demo", "adapter-0", "adapter-1", "adapter-2"}
        assert theirs.max_model_len == 1024
        return inside, await theirs.generate(CALL), base

    inside, over_http, base = asyncio.run(both())
    assert len(inside.tokens) == 6
    assert inside.tokens == over_http.tokens != base.tokens
    for answer in (inside, over_http):
        assert answer.error is None
        assert answer.first_s is not None
        assert answer.last_s > answer.first_s
        assert answer.cached_tokens == 0
    assert inside.parts.keys() >= {"queue_s"}
    assert all(value >= 0 for value in inside.parts.values())


def test_a_trace_on_both(adapters: str, server: Server) -> None:
    settings = ReplaySettings()

    async def inside() -> Any:
        target = engine(adapters)
        try:
            return await measure(target, chat(), settings, is_warm=True)
        finally:
            await target.close()

    async def over_http() -> Any:
        return await measure(await HttpTarget.connect(server.url, "secret"), chat(), settings, is_warm=True)

    for found in (asyncio.run(inside()), asyncio.run(over_http())):
        assert [result.error for result in found.results] == [None] * 25
        assert 0 < found.summary["prefix_hit"] <= found.summary["prefix_bound"]
        assert max(found.engine.values()) >= sum(request.output_tokens for request in chat().requests)


def test_refusals_are_answers(adapters: str, server: Server) -> None:
    async def ask() -> list[TargetResult]:
        calls = [dataclasses.replace(CALL, adapter="nobody"), dataclasses.replace(CALL, max_tokens=5000)]
        theirs = await HttpTarget.connect(server.url, "secret")
        ours = engine(adapters)
        try:
            return [
                await theirs.generate(calls[0]),
                await theirs.generate(calls[1]),
                await ours.generate(calls[0]),
            ]
        finally:
            await ours.close()

    missing, too_long, inside = asyncio.run(ask())
    assert "404" in str(missing.error)
    assert "400" in str(too_long.error)
    assert "does not exist" in str(inside.error)
    assert missing.first_s is None


def test_a_dead_engine_fails_its_requests(adapters: str) -> None:
    async def run() -> list[TargetResult]:
        target = engine(adapters)
        try:
            open_request = asyncio.create_task(target.generate(dataclasses.replace(CALL, max_tokens=1000)))
            await asyncio.sleep(0)  # it has asked
            target._died("it broke")
            return [await open_request, await target.generate(CALL)]
        finally:
            await target.close()

    assert [answer.error for answer in asyncio.run(run())] == ["it broke", "it broke"]


# ---------------------------------------------------------------- the dialect of vLLM, and broken servers


@asynccontextmanager
async def stand_in(complete: Any) -> AsyncIterator[str]:
    """A server without chunks or lengths; ``complete`` gives the bytes for a completion's body."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.partition("Content-Length: ")[2].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length) or b"{}")
        if "/v1/models" in head:
            answer = json.dumps({"data": [{"id": "lora", "parent": "m"}, {"id": "m"}]}).encode()
        else:
            answer = complete(body)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def vllm_chunks(body: dict[str, Any]) -> bytes:
    assert body["stream"] is True
    assert body["ignore_eos"] is True
    assert body["return_token_ids"] is True
    chunks: list[Any] = [
        {"choices": [{"index": 0, "text": "x", "token_ids": [40 + i], "finish_reason": None}]}
        for i in range(body["max_tokens"])
    ]
    usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": 2}}
    chunks.append({"choices": [], "usage": usage})
    return b"".join(b"data: " + json.dumps(c).encode() + b"\n\n" for c in chunks) + b"data: [DONE]\n\n"


def test_return_token_ids_comes_first() -> None:
    async def run() -> tuple[HttpTarget, TargetResult]:
        async with stand_in(vllm_chunks) as url:
            target = await HttpTarget.connect(url)
            return target, await target.generate(TargetRequest((3, 4, 5), 4, "lora"))

    target, answer = asyncio.run(run())
    assert answer.tokens == [40, 41, 42, 43]
    assert answer.cached_tokens == 2
    assert answer.error is None
    assert target.description["asked_for"] == ["ignore_eos", "return_token_ids"]
    assert target.description["model"] == "m"


def test_chats_are_messages_and_thoughts_count_but_are_not_said() -> None:
    bodies: list[dict[str, Any]] = []

    def chunks(body: dict[str, Any]) -> bytes:
        bodies.append(body)
        deltas: list[dict[str, Any]] = [
            {"role": "assistant", "content": ""},
            {"reasoning_content": "hm"},
            {"content": "So "},
            {"content": "it is."},
        ]
        choices: list[dict[str, Any]] = [
            {"index": 0, "delta": delta, "finish_reason": None} for delta in deltas
        ]
        choices.append({"index": 0, "delta": {}, "finish_reason": "length"})
        lines: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
        usage = {"prompt_tokens": 9, "completion_tokens": body["max_tokens"]}
        lines.append({"choices": [], "usage": usage})
        return (
            b"".join(b"data: " + json.dumps(line).encode() + b"\n\n" for line in lines) + b"data: [DONE]\n\n"
        )

    async def run() -> tuple[HttpTarget, TargetResult]:
        async with stand_in(chunks) as url:
            target = await HttpTarget.connect(url, kind="chat")
            return target, await target.generate(TargetRequest(("Is it?", "Yes.", "Why?"), 4, "lora"))

    target, answer = asyncio.run(run())
    assert (answer.error, answer.text, answer.num_tokens) == (None, "So it is.", 4)
    assert len(answer.itls_s) == 2, "neither the role nor the end is a delivery"
    assert bodies[-1]["messages"] == [
        {"role": "user", "content": "Is it?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Why?"},
    ]
    assert "prompt" not in bodies[-1]
    assert bodies[-1]["model"] == "lora"
    assert target.description["prompts"] == "chat"


def test_tokens_without_a_letter_came_by_the_end() -> None:
    def chunks(body: dict[str, Any]) -> bytes:
        lines: list[dict[str, Any]] = [
            {
                "choices": [
                    {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": "length"}
                ]
            },
            {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": body["max_tokens"]}},
        ]
        return b"".join(b"data: " + json.dumps(line).encode() + b"\n\n" for line in lines)

    async def run() -> TargetResult:
        async with stand_in(chunks) as url:
            target = await HttpTarget.connect(url, kind="chat")
            return await target.generate(TargetRequest(("Well?",), 1, None))

    answer = asyncio.run(run())
    assert (answer.error, answer.text, answer.num_tokens) == (None, "", 1)
    assert answer.first_s is not None


def test_a_server_that_tells_text_only_is_refused() -> None:
    async def run() -> None:
        async with stand_in(lambda body: b'data: {"choices": [{"text": "hello"}]}\n\n') as url:
            await HttpTarget.connect(url)

    with pytest.raises(ConfigError, match="does not tell the ids") as caught:
        asyncio.run(run())
    assert "\n" not in str(caught.value)


def test_errors_within_a_stream_and_nonsense_are_answers() -> None:
    bodies = [b'data: {"error": {"message": "out of luck"}}\n\n', b"data: {nonsense}\n\n"]

    def complete(body: dict[str, Any]) -> bytes:
        return vllm_chunks(body) if len(body["prompt"]) == 4 else bodies.pop(0)

    async def run() -> list[TargetResult]:
        async with stand_in(complete) as url:
            target = await HttpTarget.connect(url)
            return [await target.generate(CALL), await target.generate(CALL)]

    first, second = asyncio.run(run())
    assert first.error == "out of luck"
    assert "cannot be read" in str(second.error)


def test_a_server_that_hangs_fails_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "SILENCE_S", 1.5)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        # One answer comes slowly, line by line; the other does not come.
        for _ in range(9 if b"slow" in head else 0):
            await asyncio.sleep(0.2)
            writer.write(b"line\n")
        if b"slow" in head:
            writer.close()

    async def run() -> tuple[bytes, str, bool]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = http_client.HttpClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        hung = asyncio.create_task(client.fetch("/hung"))
        slow = await client.fetch("/slow")
        is_waiting = not hung.done()  # while the server says anything at all
        with pytest.raises(http_client.HttpFailure) as caught:
            await hung
        server.close()
        return slow, str(caught.value), is_waiting

    slow, error, is_waiting = asyncio.run(run())
    assert slow == b"\n".join([b"line"] * 9)
    assert is_waiting
    assert "said nothing for" in error


def test_counters_are_numbers_that_json_knows() -> None:
    page = b'# HELP a Text\na 3\nb_bucket{le="1"} 4\nc{x="y z"} 1.5\nd NaN\ne +Inf\nf nonsense\n'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + page)
        writer.close()

    async def run() -> dict[str, float]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        found = await HttpTarget(http_target.Access(url, None, "m", {})).counters()
        server.close()
        return found

    assert asyncio.run(run()) == {"a": 3, 'c{x="y z"}': 1.5}


def test_a_server_that_hangs_from_the_start_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_target, "_CONNECT_TIMEOUT_S", 0.2)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        await HttpTarget.connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")

    with pytest.raises(ConfigError, match=r"no server answers at .* within"):
        asyncio.run(run())


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "127.0.0.1:1"])
def test_bad_addresses(url: str) -> None:
    with pytest.raises(ConfigError):
        asyncio.run(HttpTarget.connect(url))


def test_numbers_of_whatever_there_is() -> None:
    values = {"a": 1, "b": 2.5, "c": True, "d": "x", "e": (1, 2), "f": {"g": 3, "h": {"i": 4}}}
    assert numbers_of(values) == {"a": 1, "b": 2.5, "f.g": 3, "f.h.i": 4}
