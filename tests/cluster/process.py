"""Clusters as real processes, and clients that keep every chunk of every stream."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.process import (
    BASE,
    MODEL,
    REPOSITORY,
    TIMEOUT_S,
    Server,
    children_of,
    environment,
    get,
    is_running,
    run_cli,
    wait_until,
)

Json = dict[str, Any]
ADAPTERS = REPOSITORY / "demo" / "adapters"
NAMES = sorted(folder.name for folder in ADAPTERS.iterdir())[:8]
QUEUED_S = 4 * TIMEOUT_S
"""For a stream's next word: requests may wait behind many others."""


class TooLate(AssertionError):
    """Requests have ended before what was to be done while they run."""


class Cluster(Server):
    """``manylora serve --replicas``, small, with the demo's adapters."""

    def __init__(
        self,
        *args: str,
        folder: Path,
        key: str | None = None,
        model: str = MODEL,
        python_path: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        """``key``: what its clients carry; ``python_path``: a folder of modules that come before all others."""
        self.folder = folder
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._have_ended = threading.Event()
        env = dict(env or {})
        if python_path:
            env["PYTHONPATH"] = f"{python_path}:{environment()['PYTHONPATH']}"
        super().__init__(
            "--adapter-dir", str(ADAPTERS), "--max-adapter-rank", "64", "--device-pool", "48MiB", "--host-pool",
            "16MiB", "--cluster-dir", str(folder / "cluster"), *args, model=model, env=env,
        )  # fmt: skip
        self.http.headers.update(self.headers)

    def __enter__(self) -> Cluster:
        return self

    def status(self) -> Json:
        """What ``GET /cluster`` says, of the next router where there is none at the moment."""
        found: list[Json] = []

        def is_told() -> bool:
            answer = get(f"{self.url}/cluster", headers=self.headers)
            assert answer.status_code in (200, 503), answer.text
            if answer.status_code == 200:
                found.append(answer.json())
            return bool(found)

        wait_until(is_told, f"a router's word\n{self.log}")
        return found[0]

    def replicas(self) -> list[Json]:
        found: list[Json] = self.status()["replicas"]
        return found

    def wait_replicas(self, count: int) -> list[Json]:
        """Wait until so many run, and no others are there."""
        found: list[Json] = []

        def are_up() -> bool:
            found[:] = self.replicas()
            # Of one that has just died it may not be known yet.
            alive = [each for each in found if each["state"] == "running" and is_running(each["pid"])]
            return len(alive) == len(found) == count

        wait_until(are_up, f"{count} replicas\n{self.log}", 120.0)
        return found

    def busiest(self) -> Json:
        """The replica with the most requests, once one has any. Raises TooLate when ``ask_all`` has all answers
        and none was seen: a machine that stands still for seconds may hide them."""
        found: list[Json] = []

        def is_one_busy() -> bool:
            have_ended = self._have_ended.is_set()  # before the replicas are asked
            found[:] = self.replicas()
            is_busy = any(each["requests"] and is_running(each["pid"]) for each in found)
            if have_ended and not is_busy:
                raise TooLate("all that was asked has ended")
            return is_busy

        wait_until(is_one_busy, f"requests on a replica\n{self.log}")
        return max(found, key=lambda each: int(each["requests"]) if is_running(each["pid"]) else -1)

    def wait_idle(self) -> None:
        """Wait until no replica has a request: what has ended is told a moment later."""
        wait_until(
            lambda: not any(each["requests"] or each["running"] for each in self.replicas()),
            f"no requests\n{self.log}",
        )

    def moved(self, reason: str) -> int:
        """How many requests went from one replica to another for this reason, by the present router."""
        return int(self.status()["router"]["moved"].get(reason, 0))

    def kill_busiest(self) -> Json:
        """As by SIGKILL; the replica, which has ended then."""
        replica = self.busiest()
        send(replica["pid"], signal.SIGKILL)
        return replica

    def ask_all(self, bodies: list[Json], meanwhile: Callable[[], object] | None = None) -> list[Answer]:
        """See ``ask_all``."""
        try:
            return ask_all(self.url, bodies, meanwhile, self.headers, self._have_ended)
        finally:
            self._have_ended.clear()

    def manage(self, action: str, *args: str) -> str:
        """``manylora cluster``; what it prints."""
        result = run_cli("cluster", action, *args, "--cluster-dir", str(self.folder / "cluster"))
        assert result.returncode == 0, f"{result.stderr}\n{self.log}"
        return result.stdout

    def pids(self) -> list[int]:
        """Of every process of it."""
        return [self.process.pid, *children_of(self.process.pid)]

    def wait_gone(self, pids: list[int], within_s: float) -> None:
        wait_until(lambda: not any(map(is_running, pids)), f"gone: {pids}\n{self.log}", within_s)


@dataclasses.dataclass
class Answer:
    """What came of a request: by choice its text, tokens' log-probabilities and end; usage; an error, if any."""

    body: Json
    choices: dict[int, Json] = dataclasses.field(default_factory=dict)
    usage: Json | None = None
    error: Any = None
    longest_gap_s: float = 0.0
    num_chunks: int = 0

    @property
    def content(self) -> Any:
        """What has to be equal, whatever happened meanwhile."""
        usage = (
            {key: self.usage[key] for key in ("prompt_tokens", "completion_tokens")} if self.usage else None
        )
        choices = {
            number: {key: value for key, value in choice.items() if key != "logprobs"}
            for number, choice in self.choices.items()
        }
        return choices, usage, self.error

    @property
    def logprobs(self) -> list[float]:
        """Of all choices: equal up to the rounding that comes from what ran in the same steps."""
        return [value for _, choice in sorted(self.choices.items()) for value in choice["logprobs"]]


def mixed_bodies(count: int) -> list[Json]:
    """Base and adapters; greedy and seeded; one and several choices; stop strings; log-probabilities; streamed and
    not."""
    bodies = []
    for number in range(count):
        body: Json = {
            "model": [BASE, *NAMES][number % 9],
            "prompt": f"Once upon a time there were {number}",
            "max_tokens": 24 + 8 * (number % 5),
            "temperature": 0.0 if number % 2 else 0.9,
            "seed": number,
            "stream": number % 4 != 3,
        }
        if number % 3 == 0:
            body["n"] = 2 + number % 3
        if number % 5 == 0:
            body["logprobs"] = 2
        if number % 6 == 0:
            body["stop"] = [" the", "ing "]
        if number % 7 == 0:
            body["ignore_eos"] = True
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        bodies.append(body)
    return bodies


def long_bodies(count: int, max_tokens: int = 200) -> list[Json]:
    """Streams that run for a while."""
    return [
        {
            "model": [BASE, *NAMES][number % 9],
            "prompt": f"Tell me story number {number}",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0.0 if number % 2 else 0.8,
            "seed": number,
            "n": 2 if number % 4 == 0 else 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for number in range(count)
    ]


async def _ask(client: httpx.AsyncClient, url: str, body: Json) -> Answer:
    answer = Answer(body)
    last_s = time.monotonic()
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200 or not body["stream"]:
            found = json.loads(await response.aread())
            _add(answer, found)
            return answer
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.monotonic()
            answer.longest_gap_s = max(answer.longest_gap_s, now - last_s)
            last_s = now
            answer.num_chunks += 1
            _add(answer, json.loads(line.removeprefix("data: ")))
    return answer


def _add(answer: Answer, found: Json) -> None:
    if "error" in found:
        answer.error = found["error"]
        return
    answer.usage = found.get("usage") or answer.usage
    for choice in found["choices"]:
        held = answer.choices.setdefault(choice["index"], {"text": "", "logprobs": [], "end": None})
        held["text"] += choice["text"]
        held["end"] = choice.get("finish_reason") or held["end"]
        if choice.get("logprobs"):
            held["logprobs"] += choice["logprobs"]["token_logprobs"]


@contextlib.asynccontextmanager
async def asking(
    url: str, bodies: list[Json], headers: dict[str, str]
) -> AsyncIterator[list[asyncio.Task[Answer]]]:
    """All of them are under way."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=QUEUED_S, limits=limits, headers=headers, verify=False) as client:
        yield [asyncio.create_task(_ask(client, url, body)) for body in bodies]


def ask_all(
    url: str,
    bodies: list[Json],
    meanwhile: Callable[[], object] | None = None,
    headers: dict[str, str] | None = None,
    have_ended: threading.Event | None = None,
) -> list[Answer]:
    """The answers, in order. ``meanwhile`` is done while they come; ``have_ended`` is set when all have come."""

    async def run() -> list[Answer]:
        async with asking(url, bodies, headers or {}) as tasks:
            answers = asyncio.gather(*tasks)
            if have_ended is not None:
                answers.add_done_callback(lambda _: have_ended.set())
            if meanwhile is not None:
                await asyncio.to_thread(meanwhile)
            return list(await answers)

    return asyncio.run(run())


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process; one that is killed has ended then."""
    os.kill(pid, number)
    if number == signal.SIGKILL:
        wait_until(lambda: not is_running(pid), f"the end of {pid}")
