"""``manylora bench simulate``: a workload under cache policies in virtual time, measured or assumed costs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manylora.bench.picture import check_writable
from manylora.config import CACHE_POLICIES, ConfigError, EngineSettings, PolicyConfig
from manylora.flags import build_settings
from manylora.sim.analytical import AnalyticalCosts
from manylora.sim.costs import StepCosts
from manylora.sim.fit import fit_profile
from manylora.sim.hardware import hardware_named
from manylora.sim.limits import reference
from manylora.sim.profile import find_profile
from manylora.sim.replay import Replay
from manylora.sim.shapes import ATTENTION_MODULES, ModelShape, shape_named
from manylora.sim.summary import summarize, ttft_parts_ms
from manylora.workloads.stream import Stream
from manylora.workloads.terms import suggestion

REFERENCE = "cached"
_SHAPE = "llama-2-7b"
_HOST_POOL_BYTES = 32 * 2**30
_COLUMNS = (
    ("TTFT ms", "ttft_mean_ms", "{:.1f}"),
    ("p99", "ttft_p99_ms", "{:.1f}"),
    ("TPOT ms", "tpot_mean_ms", "{:.2f}"),
    ("done per s", "done_per_s", "{:.2f}"),
    ("prefix hit", "prefix_hit", "{:.2f}"),
    ("adapter hit", "adapter_hit_device", "{:.2f}"),
    ("preempted", "preemptions", "{:.0f}"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class SimulateSettings:
    """What to simulate: costs by ``profile``, which has to be of ``model`` where that is given, or by ``hardware``
    and ``shape``. ``policies``: names with commas between, or "all". ``engine``: settings by flag name."""

    profile: str | None = None
    model: str | None = None
    hardware: str | None = None
    shape: str | None = None
    cards: int = 1
    policies: str = "manylora"
    is_warm: bool = True
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    out: Path | None = None

    def __post_init__(self) -> None:
        if (self.profile is None) == (self.hardware is None):
            raise ConfigError("name either --profile, such as h200-llama-2-7b, or --hardware, such as h200")
        if self.profile is not None and self.shape is not None:
            raise ConfigError("a profile knows its model: --shape goes with --hardware")
        if self.hardware is not None and self.model is not None:
            raise ConfigError("--model is compared with a profile's: with --hardware name a --shape")
        if self.cards < 1:
            raise ConfigError(f"--cards must be at least 1, got {self.cards}")
        if self.out is not None:
            check_writable(self.out)


@dataclasses.dataclass(frozen=True, slots=True)
class _Target:
    """What is simulated: costs on all cards, and what the pools and adapters follow from."""

    name: str
    shape: ModelShape
    costs: StepCosts
    modules: tuple[str, ...]
    pool_bytes: int | None


def run(settings: SimulateSettings, load: Callable[[], Stream]) -> int:
    """Simulate what ``load`` returns, print a line for each policy as it is done. Raises ConfigError."""
    target = _target(settings)
    configs = {name: _config(settings, name, target) for name in _policies(settings.policies)}
    stream = load()
    print(f"{stream.name} on {target.name}, {len(stream.requests)} requests", flush=True)
    width = max(len(name) for name in (*configs, REFERENCE))
    print(" " * width + "".join(f"  {heading:>11}" for heading, _, _ in _COLUMNS), flush=True)
    report: dict[str, Any] = {
        "benchmark": "simulate", "workload": stream.name, "requests": len(stream.requests),
        "notes": list(stream.notes), "device": target.name, "model": str(target.shape), "results": {},
    }  # fmt: skip
    for name in (*configs, REFERENCE):
        # Batch sizes and lengths are the first policy's; pools do not matter.
        config = configs.get(name) or next(iter(configs.values()))
        pages = [
            target.shape.adapter_pages(rank, config.page_tokens, target.modules) for rank in stream.ranks
        ]
        if name == REFERENCE:
            replay = reference(stream, config, target.costs, pages)
        else:
            replay = Replay(stream, config, target.costs, pages, is_warm=settings.is_warm)
            replay.run()
        dropped = sum(outcome.is_dropped for outcome in replay.outcomes)
        result = {**summarize(replay), **ttft_parts_ms(replay.outcomes), "dropped": dropped}
        report["results"][name] = {"config": _noted(config), **result} if name in configs else result
        cells = (f"  {form.format(result[key]):>11}" for _, key, form in _COLUMNS)
        print(f"{name:<{width}}" + "".join(cells), flush=True)
    if settings.out is not None:
        try:
            settings.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {settings.out}: {error.strerror}") from error
    return 0


def _policies(text: str) -> list[str]:
    names = list(CACHE_POLICIES) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in CACHE_POLICIES:
            hint = suggestion(name, CACHE_POLICIES) or f": use {', '.join(CACHE_POLICIES)} or all"
            raise ConfigError(f"cache policy {name!r} is not known{hint}")
    return list(dict.fromkeys(names))


def _target(settings: SimulateSettings) -> _Target:
    cards = f"{settings.cards} x " if settings.cards > 1 else ""
    if settings.hardware is not None:
        hardware, shape = hardware_named(settings.hardware), shape_named(settings.shape or _SHAPE)
        costs = AnalyticalCosts(shape, hardware, settings.cards)
        name = f"{cards}{hardware.name} (assumed)"
        return _Target(name, shape, costs, ATTENTION_MODULES, costs.pool_bytes())
    assert settings.profile is not None
    profile = find_profile(settings.profile)
    if settings.model is not None:
        profile.expect(_shape_of_folder(settings.model, profile.model.itemsize))
    measured = fit_profile(profile).on_cards(settings.cards)
    return _Target(f"{cards}{profile.machine}", profile.model, measured, profile.adapter_modules, None)


def _shape_of_folder(model: str, itemsize: int) -> ModelShape:
    from manylora.bench.profile import shape_of
    from manylora.models.config import read_model_config
    from manylora.models.spec import ModelError

    try:
        return shape_of(read_model_config(Path(model)), Path(model).resolve().name, itemsize)
    except ModelError as error:
        raise ConfigError(str(error)) from None


def _config(settings: SimulateSettings, policy: str, target: _Target) -> PolicyConfig:
    """As ``executor.build`` has it on a GPU, but for what depends on free memory there."""
    engine, _ = build_settings({**settings.engine, "cache_policy": policy, "model": "simulated"})
    page_bytes = target.shape.page_bytes(engine.cache.page_tokens)
    num_pages = _pool_bytes(engine, target) // page_bytes
    if num_pages < 1:
        raise ConfigError(f"the device pool holds no page of {page_bytes / 2**20:g} MiB")
    host_bytes = _HOST_POOL_BYTES if engine.cache.host_pool is None else engine.cache.host_pool
    scheduler = engine.scheduler
    num_seqs, batch_tokens, pipeline_depth = scheduler.limits_on("cuda")
    return PolicyConfig(
        num_pages=num_pages,
        page_tokens=engine.cache.page_tokens,
        max_model_len=engine.model.max_model_len or num_pages * engine.cache.page_tokens,
        max_num_seqs=num_seqs,
        max_batch_tokens=batch_tokens,
        num_host_pages=host_bytes // page_bytes,
        page_bytes=page_bytes,
        cache=engine.cache.policy,
        admission=scheduler.admission,
        slo_ttft_s=scheduler.slo_ttft_s,
        pipeline_depth=pipeline_depth,
    )


def _pool_bytes(engine: EngineSettings, target: _Target) -> int:
    found = engine.cache.device_pool or target.pool_bytes
    if found is None:
        raise ConfigError(
            "--device-pool is missing: a profile does not say what its machine has left for pages"
        )
    return found


def _noted(config: PolicyConfig) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    return {**values, "cache": values["cache"]["policy"]}
