"""What the priority of a request may be, over HTTP, and whose request the engine is told it is."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import httpx
import pytest

from manylora.engine.client import EngineStats, GenerationRequest, Timing
from manylora.metrics.requests import Metrics
from manylora.reports import ClientUse
from manylora.text.generate import TextDelta
from manylora.text.tokenizer import Tokenizer
from manylora.types import SamplingParams
from tests.server.conftest import BASE, client_of, make_app
from tests.server.fakes import FakeEngine

ROUTES = {
    "/v1/completions": {"model": BASE, "prompt": [5, 6], "max_tokens": 1},
    "/v1/chat/completions": {"model": BASE, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
}


def ask(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], key: str | None = None, **info: Any
) -> tuple[httpx.Response, FakeEngine]:
    engine = FakeEngine()
    engine.info = dataclasses.replace(engine.info, **info)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    keys = () if key is None else ("first", "second")

    async def scenario() -> httpx.Response:
        async with client_of(make_app(engine, tokenizer, api_keys=keys)) as client:
            return await client.post(path, json=ROUTES[path] | body, headers=headers)

    return asyncio.run(scenario()), engine


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("priority", [-3, 0, 7, 2**31 - 1, None])
def test_an_integer_from_the_floor_reaches_the_engine(
    tokenizer: Tokenizer, path: str, priority: int | None
) -> None:
    response, engine = ask(tokenizer, path, {"priority": priority}, has_priorities=True, priority_floor=-3)
    assert response.status_code == 200
    assert [request.priority for request in engine.requests] == [priority or 0]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("priority", ["high", 1.5, True, [1], {}, -4, 2**31])
def test_another_is_refused_by_name(tokenizer: Tokenizer, path: str, priority: object) -> None:
    response, engine = ask(tokenizer, path, {"priority": priority}, has_priorities=True, priority_floor=-3)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")
    assert engine.requests == []


@pytest.mark.parametrize("path", ROUTES)
def test_without_priorities_the_flag_is_named(tokenizer: Tokenizer, path: str) -> None:
    assert ask(tokenizer, path, {"priority": 0})[0].status_code == 200
    response, _ = ask(tokenizer, path, {"priority": 1})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "priority")
    assert "--scheduling-policy priority" in error["message"]


@pytest.mark.parametrize(("key", "place"), [("first", 0), ("second", 1), (None, 0)])
def test_a_client_is_its_keys_place_whatever_it_says(
    tokenizer: Tokenizer, key: str | None, place: int
) -> None:
    _, engine = ask(tokenizer, "/v1/completions", {"user": "another", "client": 9}, key)
    (request,) = engine.requests
    assert request.client == place
    assert key is None or key not in repr(request)


def test_waits_are_counted_by_priority() -> None:
    info = dataclasses.replace(FakeEngine().info, has_priorities=True)
    metrics = Metrics("base", info)
    for priority in (0, 3, 11, 12, -(10**6)):
        recorder = metrics.request(
            GenerationRequest("r", (1, 2, 3, 4), SamplingParams(), priority=priority), 0.0
        )
        recorder.observe(TextDelta(0, "x", (5,), timing=Timing(queue_s=2.0)))
    gauges = dataclasses.replace(EngineStats().gauges, clients=(ClientUse(1, 12, 6.5, "german"),))
    figures = metrics.figures(EngineStats(gauges))
    counts = {
        name.split('"')[1]: value
        for name, value in figures.items()
        if name.startswith("manylora:priority_queue_time_seconds_count")
    }
    assert counts == {"0": 1, "3": 1, "above 10": 2, "below -10": 1}
    assert figures['manylora:fair_service_tokens_total{client="german"}'] == 12
    assert figures['manylora:fair_counter{client="german"}'] == 6.5
