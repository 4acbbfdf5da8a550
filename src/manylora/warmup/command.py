"""``manylora warmup``: run what a server will run, for what only a first run costs."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manylora.config import ConfigError, EngineSettings
from manylora.engine.client import GenerationRequest
from manylora.engine.local import LocalEngine
from manylora.flags import build_settings
from manylora.main import build_driver
from manylora.models.config import read_model_config
from manylora.models.source import resolve_model
from manylora.models.spec import ModelError
from manylora.progress import Bar
from manylora.types import SamplingParams
from manylora.warmup.random_adapters import write_random_adapters

RANKS = (8, 64, 256)
"""One of each of the classes that steps with adapters are captured for."""

PROMPTS = (1, 100, 700, 3000)
"""Tokens: lengths that take other kernels, or a captured step."""


def run(values: Mapping[str, Any]) -> int:
    """``values``: settings of the engine. Raises ConfigError."""
    settings = build_settings({"host_pool": 0, **values})[0]
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(_run(settings, Path(scratch), began_s))
    return 0


async def _run(settings: EngineSettings, folder: Path, began_s: float) -> None:
    largest = settings.adapters.max_adapter_rank
    ranks = sorted({rank if largest is None else min(rank, largest) for rank in RANKS})
    try:
        config = read_model_config(resolve_model(settings.model.model))
    except ModelError as error:
        raise ConfigError(str(error)) from error
    dtype = settings.model.dtype if settings.model.dtype != "auto" else "float16"
    paths = write_random_adapters(folder, config, dtype, ranks, len(ranks))
    adapters = tuple((f"rank-{rank}", str(path)) for rank, path in zip(ranks, paths))
    served = dataclasses.replace(settings.adapters, adapters=adapters, adapter_dir=None)
    driver = build_driver(dataclasses.replace(settings, adapters=served), shows_progress=True)
    engine = LocalEngine(driver)
    ready_s = time.monotonic()
    try:
        num_requests = await _serve(engine, [name for name, _ in adapters])
    finally:
        await engine.close()
    ended_s = time.monotonic()
    print(
        f"{driver.info.device}: engine ready in {ready_s - began_s:.1f} s, {num_requests} requests in "
        f"{ended_s - ready_s:.1f} s; what they compiled is cached"
    )


async def _serve(engine: LocalEngine, names: list[str]) -> int:
    """Each prompt length with each adapter and without, alone and then all together; returns how many."""
    longest = engine.info.max_model_len - 4
    lengths = sorted({min(length, longest) for length in PROMPTS})
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    calls = [
        GenerationRequest(
            f"warmup-{number}",
            tuple(5 + (place * 7 + number) % 97 for place in range(length)),
            params,
            name,
            stream=False,
        )
        for number, (length, name) in enumerate(
            (length, name) for name in (None, *names) for length in lengths
        )
    ]
    bar = Bar("warming up", "request")
    for done, call in enumerate(calls, 1):
        await _generate(engine, call)
        bar(done, len(calls))
    await asyncio.gather(*(_generate(engine, call) for call in calls))
    return 2 * len(calls)


async def _generate(engine: LocalEngine, call: GenerationRequest) -> None:
    """Raises ConfigError where the request fails."""
    async for delta in engine.generate(call):
        if delta.error is not None:
            raise ConfigError(f"a request failed: {delta.error.message}")
