"""Runs ``manylora warmup``: requests of every kind, so that kernels are compiled and cached before a server
starts."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from manylora.config.declaring import ConfigError
from manylora.config.sections import EngineSettings
from manylora.engine.client import GenerationRequest
from manylora.engine.local import LocalEngine
from manylora.flags import build_settings
from manylora.kernels.shapes import Projection
from manylora.main import build_driver
from manylora.models.config import read_model_config
from manylora.models.source import resolve_model
from manylora.models.spec import ModelConfig, ModelError
from manylora.progress import Bar
from manylora.types import SamplingParams

RANKS = (8, 64, 256)
"""The ranks of the random adapters: one for each class that steps with adapters are captured for."""

PROMPTS = (1, 100, 700, 3000)
"""The prompts' lengths in tokens, which use different kernels, or a captured step."""


def run(values: Mapping[str, Any]) -> None:
    """Start an engine, and run the requests. ``values``: settings of the engine. Raises ConfigError."""
    settings = build_settings({"host_pool": 0, **values})[0]
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(_run(settings, Path(scratch), began_s))


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
    """Run each prompt length with each adapter and with none, one after another and then all together.
    Returns the number of requests."""
    longest = engine.info.max_model_len - 4
    lengths = sorted({min(length, longest) for length in PROMPTS})
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    calls = []
    for number, (name, length) in enumerate(itertools.product((None, *names), lengths)):
        prompt = tuple(5 + (place * 7 + number) % 97 for place in range(length))
        calls.append(GenerationRequest(f"warmup-{number}", prompt, params, name, stream=False))
    bar = Bar("warming up", "request")
    for done, call in enumerate(calls, 1):
        await _generate(engine, call)
        bar(done, len(calls))
    await asyncio.gather(*(_generate(engine, call) for call in calls))
    return 2 * len(calls)


async def _generate(engine: LocalEngine, call: GenerationRequest) -> None:
    """Wait for the answer. Raises ConfigError where the request fails."""
    async for delta in engine.generate(call):
        if delta.error is not None:
            raise ConfigError(f"a request failed: {delta.error.message}")


def write_random_adapters(
    folder: Path,
    config: ModelConfig,
    dtype: str,
    ranks: Sequence[int],
    count: int,
    projections: Sequence[Projection] | None = None,
) -> list[Path]:
    """Write PEFT adapters of random weights, for measurements of cost only, and return their folders.

    Folders ``adapter-0``, ... have ``ranks`` in turn. Adapters of one rank share a file, not pages.
    ``projections``: the modules that they change in all layers that have them; None: all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if projections is None:
        projections = [projection for group in config.groups for projection in group.projections]
    stems = [
        (f"base_model.model.{config.names.layer_prefix}{layer}.{p.module}", p)
        for layer, groups in enumerate(config.layer_groups)
        for p in projections
        if any(p in group.projections for group in groups)
    ]
    generator = torch.Generator().manual_seed(0)
    for rank in ranks[:count]:
        tensors = {}
        for stem, p in stems:
            for side, sizes in (("A", (rank, p.in_features)), ("B", (p.out_features, rank))):
                values = torch.empty(sizes, dtype=getattr(torch, dtype))
                tensors[f"{stem}.lora_{side}.weight"] = values.uniform_(-0.02, 0.02, generator=generator)
        save_file(tensors, folder / f"rank-{rank}.safetensors")
    modules = sorted({p.module.rpartition(".")[2] for p in projections})
    paths = []
    for index in range(count):
        rank = ranks[index % len(ranks)]
        own = folder / f"adapter-{index}"
        own.mkdir()
        peft = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
        (own / "adapter_config.json").write_text(json.dumps(peft))
        (own / "adapter_model.safetensors").symlink_to(folder / f"rank-{rank}.safetensors")
        paths.append(own)
    return paths
