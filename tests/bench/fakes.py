"""A target that answers after a moment with tokens that a test can foretell, and notes what it was asked.

Its replays can run in a time of their own, in which moments are exact and cost nothing.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
from manylora_lab.bench.targets import TargetRequest, TargetResult, has_ids
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest, in_order

Result = TypeVar("Result")


def reply_to(call: TargetRequest) -> list[int]:
    """Depends on the whole prompt and the adapter."""
    assert has_ids(call.prompt)
    start = sum(call.prompt) + 31 * len(call.prompt) + len(call.adapter or "")
    return [5 + (start + 7 * i) % 90 for i in range(call.max_tokens)]


class _NoWait(selectors.DefaultSelector):
    """Instead of waiting, its clock goes on."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing would ever happen"
        self.now_s += timeout
        return super().select(0)


def run_in_own_time(monkeypatch: pytest.MonkeyPatch, work: Coroutine[Any, Any, Result]) -> Result:
    """As ``asyncio.run``, for what uses no threads, processes or sockets: sleeps take no time, and
    ``time.monotonic`` tells of those alone."""
    selector = _NoWait()
    monkeypatch.setattr(time, "monotonic", lambda: selector.now_s)
    loop = asyncio.SelectorEventLoop(selector)
    monkeypatch.setattr(loop, "time", lambda: selector.now_s)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work)


class FakeTarget:
    is_exact = True

    def __init__(
        self, names: set[str], fails: Callable[[TargetRequest], str | None] = lambda call: None
    ) -> None:
        self.description: dict[str, Any] = {"kind": "fake"}
        self.vocab_size: int | None = 1000
        self.max_model_len: int | None = 2048
        self.adapters = frozenset(names)
        self.calls: list[tuple[float, TargetRequest]] = []
        self.running = self.most_running = 0
        self.fails = fails
        self.delay_s = 0.02
        self.cached_tokens: int | None = None
        self.parts: dict[str, float] = {}
        self.death: str | None = None

    async def generate(self, call: TargetRequest) -> TargetResult:
        self.calls.append((time.monotonic(), call))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self.delay_s)
        first_s = time.monotonic()
        await asyncio.sleep(self.delay_s)
        self.running -= 1
        error = self.fails(call)
        if error is not None:
            return TargetResult(error=error)
        last_s = time.monotonic()
        answer = TargetResult(reply_to(call), first_s, last_s, self.cached_tokens, dict(self.parts))
        answer.itls_s = [last_s - first_s]
        return answer

    async def counters(self) -> dict[str, float]:
        return {"calls": len(self.calls), "constant": 3.0}

    async def lost(self) -> str | None:
        return self.death

    async def close(self) -> None:
        pass


def turn(
    conversation: int, index: int, arrival_s: float, new_tokens: int = 4, reply: int = 3
) -> StreamRequest:
    pieces = (Piece((conversation, index), new_tokens),)
    return StreamRequest(arrival_s, conversation % 3, conversation, index, pieces, reply)


def stream_of(*requests: StreamRequest) -> Stream:
    """Of three adapters of rank 8."""
    return in_order("made up", requests, (8, 8, 8), ())
