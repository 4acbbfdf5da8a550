"""What a move costs the client of a stream, on a server with two replicas."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from manylora.cluster.admin_link import ask
from manylora_lab.bench.http_client import HttpClient, HttpFailure
from manylora_lab.benchmarks.cluster_rig import status_of
from manylora_lab.benchmarks.cluster_servers import BASE, Server, Servers, prompt_of, times_ms
from manylora_lab.benchmarks.run_report import Row, peer_copy_bandwidth

_STREAM_ROWS = 12
"""Tokens of a stream before it is moved, and after that."""
_ANSWER_S = 60.0


class Streamed:
    """A request whose tokens are noted as they come, until it is ended."""

    def __init__(self, client: HttpClient, prompt: Sequence[int], name: str | None, longest: int) -> None:
        self.id = ""
        self.moments: list[float] = []
        self.began_s = time.monotonic()
        asked = {
            "model": name or BASE, "prompt": list(prompt), "max_tokens": longest,
            "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        self._task = asyncio.create_task(
            client.send("POST", "/v1/completions", json.dumps(asked).encode(), self._hear)
        )

    def _hear(self, line: bytes) -> None:
        if line.startswith(b"data: {"):
            self.id = self.id or json.loads(line[6:])["id"]
            self.moments.append(time.monotonic())

    async def until(self, rows: int) -> None:
        """So many more deliveries have come. Raises HttpFailure and TimeoutError."""
        wanted = len(self.moments) + rows
        async with asyncio.timeout(_ANSWER_S):
            while len(self.moments) < wanted:
                if self._task.done():
                    self._task.result()
                    raise HttpFailure(f"the stream ended after {len(self.moments)} tokens")
                await asyncio.sleep(0.001)

    async def end(self) -> None:
        """The client goes away."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, HttpFailure, OSError):
            await self._task

    def pause(self, after_s: float) -> Pause:
        """The longest time between two deliveries, of which the later came after this moment."""
        return pause_of(self.moments, after_s)


class Pause(NamedTuple):
    """``usual_s``: the median time between deliveries until then. ``position``: deliveries before the pause."""

    seconds: float
    usual_s: float
    position: int


def pause_of(moments: Sequence[float], after_s: float) -> Pause:
    """See Streamed."""
    gaps = [later - one for one, later in itertools.pairwise(moments)]
    first = next(place for place, moment in enumerate(moments[1:]) if moment >= after_s)
    place = max(range(first, len(gaps)), key=gaps.__getitem__)
    return Pause(gaps[place], statistics.median(gaps[:first]), place + 1)


async def order(server: Server, **question: Any) -> str:
    """What the router says to an operator's question. Raises RuntimeError where that is an error."""

    def asked() -> dict[str, Any]:
        for line in ask(server.folder, question):
            answer: dict[str, Any] = json.loads(line)
            return answer
        return {"error": "no answer"}

    async with asyncio.timeout(_ANSWER_S):
        answer = await asyncio.to_thread(asked)
    if "error" in answer:
        raise RuntimeError(f"{question}: {answer['error']}")
    return str(answer.get("said", ""))


async def at(server: Server) -> int:
    """The replica that has a request. Raises RuntimeError where none has."""
    for each in (await status_of(server.url))["replicas"]:
        if each["requests"]:
            return int(each["id"])
    raise RuntimeError("no replica has the request")


async def until_idle(server: Server) -> None:
    """No request is left. Raises TimeoutError."""
    async with asyncio.timeout(_ANSWER_S):
        while (await status_of(server.url))["router"]["requests"]:
            await asyncio.sleep(0.05)


async def moved(
    server: Server, longest: int, context: int, name: str | None, number: int, vocab_size: int
) -> Row:
    """A stream goes to the other replica, and back."""
    client = HttpClient(server.url)
    prompt = prompt_of(f"moved {context} {name} {number}", context, vocab_size)
    stream = Streamed(client, prompt, name, longest)
    found: Row = {"context": context, "adapter": name, "number": number}
    try:
        await stream.until(_STREAM_ROWS)
        found["first_ms"] = 1e3 * (stream.moments[0] - stream.began_s)
        source = await at(server)
        for way, replica in (("there", 1 - source), ("back", source)):
            asked_s = time.monotonic()
            await order(server, do="move", request=stream.id, replica=replica)
            found[f"{way}_answer_ms"] = 1e3 * (time.monotonic() - asked_s)
            await stream.until(_STREAM_ROWS)
            pause = stream.pause(asked_s)
            found[f"{way}_pause_ms"], found["usual_ms"] = 1e3 * pause.seconds, 1e3 * pause.usual_s
            found[f"{way}_tokens"] = context + pause.position
            if await at(server) != replica:
                raise RuntimeError(f"the stream is not at replica {replica}")
    finally:
        await stream.end()
        await client.close()
    await until_idle(server)
    return found


def of_moves(rows: Sequence[Row], bytes_per_token: int, links: Mapping[str, float]) -> Row:
    """Medians of moves of one context, and what its keys and values would take to send."""
    (context,) = {row["context"] for row in rows}
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0] if name.endswith("_ms")}
    tokens = statistics.median(row["there_tokens"] for row in rows)
    cost_s = (middle["there_pause_ms"] - middle["usual_ms"]) / 1e3
    num_bytes = bytes_per_token * tokens
    return {
        "context": context, "adapter": rows[0]["adapter"], "moves": len(rows), "tokens": tokens, **middle,
        "cost_ms": 1e3 * cost_s, "cost_ms_per_1000_tokens": 1e6 * cost_s / tokens,
        "most_pause_ms": max(row["there_pause_ms"] for row in rows), "kv_bytes": num_bytes,
        "even_bytes_per_s": num_bytes / cost_s if cost_s > 0 else None,
        **{f"sending_ms_{name}": 1e3 * num_bytes / rate for name, rate in links.items()},
    }  # fmt: skip


async def drained(server: Server, servers: Servers, vocab_size: int) -> Row:
    """All streams of replica 1 move as it is emptied."""
    scale = servers.scale
    context, client = scale.contexts[0], HttpClient(server.url)
    streams = [
        Streamed(client, prompt_of(f"drained {number}", context, vocab_size), None, scale.longest)
        for number in range(scale.drained)
    ]
    try:
        await asyncio.gather(*(stream.until(_STREAM_ROWS) for stream in streams))
        there = [each["requests"] for each in (await status_of(server.url))["replicas"]]
        asked_s = time.monotonic()
        await order(server, do="drain", replica=1, migrate=True)
        empty_s = time.monotonic() - asked_s
        await asyncio.gather(*(stream.until(_STREAM_ROWS) for stream in streams))
        pauses = [stream.pause(asked_s) for stream in streams]
        return {
            "context": context, "streams_before": there, "empty_s": empty_s,
            "usual_ms": 1e3 * statistics.median(pause.usual_s for pause in pauses),
            **times_ms("pause", [pause.seconds for pause in pauses]),
            "pause_most_ms": 1e3 * max(pause.seconds for pause in pauses),
        }  # fmt: skip
    finally:
        for stream in streams:
            await stream.end()
        await client.close()


def link_rates(is_toy: bool) -> dict[str, float]:
    """Bytes a second of a large copy from the first GPU to the second: by itself, and through the host."""
    return {
        "gpu_to_gpu": peer_copy_bandwidth(is_toy),
        "through_host": peer_copy_bandwidth(is_toy, through_host=True),
    }
