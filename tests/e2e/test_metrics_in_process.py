"""``LLM.metrics()`` beside a server's ``/metrics``: the same names and, after the same requests, figures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from manylora import LLM, AsyncLLM, SamplingParams
from tests.e2e.process import BASE, MODEL, Server

SETTINGS: dict[str, Any] = {"device_pool": "8MiB", "host_pool": "8MiB", "max_num_seqs": 4, "page_tokens": 16}
NAMES = ("german", "greek")
PROMPT = list(range(5, 45))
REQUESTS: tuple[tuple[str | None, dict[str, Any]], ...] = (
    (None, {"max_tokens": 9}),
    ("german", {"max_tokens": 6}),
    ("german", {"max_tokens": 5, "n": 3, "temperature": 1.0, "seed": 1}),
    ("greek", {"max_tokens": 1}),
    ("greek", {"max_tokens": 7, "stop": ["no such text"]}),
)
TIMES = ("_seconds_sum", "_seconds_total", "_seconds_bucket", "_created", "lora_requests_info")
"""Parts of names whose figures are times."""


def figures(metrics: dict[str, float]) -> dict[str, float]:
    """Those that do not depend on how long things took."""
    return {name: value for name, value in metrics.items() if not any(part in name for part in TIMES)}


@pytest.fixture(scope="module")
def paths(adapters: Path) -> dict[str, str]:
    return {name: str(adapters / name) for name in NAMES}


@pytest.fixture(scope="module")
def served(paths: dict[str, str]) -> list[dict[str, float]]:
    """A server's figures at the start and after the requests."""
    flags = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    named = [word for name, path in paths.items() for word in ("--adapter", f"{name}={path}")]
    with Server(*flags, *named, "--device", "cpu") as server:
        server.wait_ready()
        before = server.metrics()
        for adapter, params in REQUESTS:
            body = {"prompt": PROMPT, "ignore_eos": True, **params}
            answer = server.complete(**body, **({"model": adapter} if adapter else {}))
            assert answer.status_code == 200, answer.text
        return [before, server.wait_quiet()]


def params_of(params: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "ignore_eos": True, **params})


def test_the_same_names_and_figures_as_a_servers(
    served: list[dict[str, float]], paths: dict[str, str]
) -> None:
    with LLM(MODEL, paths, device="cpu", served_model_name=BASE, **SETTINGS) as llm:
        found = [llm.metrics()]
        for adapter, params in REQUESTS:
            llm.generate([PROMPT], params_of(params), adapter)
        found.append(llm.metrics())
    for here, there in zip(found, served, strict=True):
        assert here.keys() == there.keys()
        assert figures(here) == figures(there)
    after = found[1]
    label = f'{{model_name="{BASE}"}}'
    # Tokens but each sample's first; those that come in one delta count as those that are streamed.
    assert after[f"vllm:inter_token_latency_seconds_count{label}"] == 8 + 5 + 3 * 4 + 6
    assert after[f"vllm:time_to_first_token_seconds_count{label}"] == len(REQUESTS)
    assert after['manylora:adapter_generation_tokens_total{adapter_name="german"}'] == 6 + 15


def test_the_first_token_is_not_the_last_though_they_come_together(paths: dict[str, str]) -> None:
    """What is not streamed is given at its end; the figures still know when its first token was there."""
    with LLM(MODEL, paths, device="cpu", served_model_name=BASE, **SETTINGS) as llm:
        llm.generate([PROMPT], params_of({"max_tokens": 2}))  # what starts late has started

        def is_told_apart() -> bool:
            """Unless the machine has done something else between the engine's last token and the answer."""
            before = llm.metrics()
            llm.generate([PROMPT], params_of({"max_tokens": 200}))
            after = {name: value - before.get(name, 0.0) for name, value in llm.metrics().items()}
            first_s, later_s, all_s = (
                after[f'vllm:{name}_seconds_sum{{model_name="{BASE}"}}']
                for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
            )
            kinds = ("queue", "adapter", "kv", "prefill")
            parts_s = [after[f'manylora:ttft_part_seconds_sum{{part="{kind}"}}'] for kind in kinds]
            assert sum(parts_s) == pytest.approx(first_s)
            assert first_s + later_s <= all_s + 1e-6
            return bool(0 < first_s < all_s / 2 and first_s + later_s == pytest.approx(all_s, rel=0.05))

        assert any(is_told_apart() for _ in range(5))


def test_streams_and_what_is_given_up_are_counted(paths: dict[str, str]) -> None:
    async def scenario() -> None:
        async with AsyncLLM(MODEL, paths, device="cpu", served_model_name=BASE, **SETTINGS) as llm:
            stream = llm.stream(PROMPT, params_of({"max_tokens": 300}), "german")
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]
            after = await llm.metrics()
            assert after[f'vllm:request_success_total{{finished_reason="abort",model_name="{BASE}"}}'] == 1
            assert after['manylora:adapter_requests_total{adapter_name="german"}'] == 1
            await llm.remove_adapter("german")
            assert not any("german" in name for name in await llm.metrics())

    asyncio.run(scenario())
