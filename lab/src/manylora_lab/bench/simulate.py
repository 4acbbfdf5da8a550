"""``manylora bench simulate``: a workload under cache policies in virtual time, measured or assumed costs."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from manylora.config.cold_start import ColdStartConfig, check_host_pool
from manylora.config.declaring import ConfigError, setting_of
from manylora.config.merging import MergeConfig, MergeTimes
from manylora.config.named import is_import_name
from manylora.config.policy import CACHE_NUMBERS, PolicyConfig, cache_numbers
from manylora.config.sections import LORA_SHARDINGS, EngineSettings, LoraSharding, lora_sharding_of
from manylora.flags import build_settings
from manylora.policy.cache_policies import find_cache
from manylora.rules import fields_of
from manylora_lab.baselines import ALL_CACHE_POLICIES, ALL_MERGE_MODES
from manylora_lab.bench.picture import check_writable
from manylora_lab.bench.provenance import Provenance
from manylora_lab.pricing.costs import StepCosts
from manylora_lab.pricing.fit import fit_profile
from manylora_lab.pricing.profile import Profile
from manylora_lab.pricing.shapes import ATTENTION_MODULES, ModelShape, shape_named
from manylora_lab.sim.analytical import check_cards
from manylora_lab.sim.belady import FORESIGHTS, ForeseenReplay
from manylora_lab.sim.clairvoyant import Clairvoyant
from manylora_lab.sim.cold import NOTHING_COLD, ColdCosts, assumed_cold, measured_cold
from manylora_lab.sim.device import MergeCosts
from manylora_lab.sim.hardware import Hardware, hardware_named
from manylora_lab.sim.limits import recorded, reference, summarize_limits
from manylora_lab.sim.merging import beside_pristine, measured_costs, measured_times, merge_times
from manylora_lab.sim.parallel import ParallelCosts, adapter_pages, held_shape, measured_link
from manylora_lab.sim.replay import Replay
from manylora_lab.sim.shipped import find_profile
from manylora_lab.sim.stated import described_costs
from manylora_lab.sim.summary import merging, summarize, ttft_parts_ms
from manylora_lab.workloads.stream import Stream
from manylora_lab.workloads.terms import suggestion

REFERENCE = "cached"
_SHAPE = "llama-2-7b"
_NO_CPU = "the profile does not tell it: measure it anew with manylora profile"
_HOST_POOL_BYTES = {"cpu": 4 * 2**30, "cuda": 32 * 2**30}
"""The pool where none is named: the engine takes a share of what its host has free, on a CPU at most so much."""
_COLUMNS = (
    ("TTFT ms", "{ttft_mean_ms:.1f}"),
    ("p99", "{ttft_p99_ms:.1f}"),
    ("TPOT ms", "{tpot_mean_ms:.2f}"),
    ("done per s", "{done_per_s:.2f}"),
    ("prefix hit", "{prefix_hit:.2f}"),
    ("adapter hit", "{adapter_hit_device:.2f}"),
    ("preempted", "{preemptions:.0f}"),
)
_LIMITS = (
    ("KV kept", "{kv_kept:.2f} of {kv_kept_limit:.2f}"),
    ("adapters kept", "{adapter_kept:.2f} of {adapter_kept_limit:.2f}"),
)
_MERGING = (("merged", "{merging[steps_merged]:.2f}"), ("switches", "{merging[switches_merged]:.0f}"))
_DROPPED = ("dropped", "{dropped}")
_LEAST_WIDTH = 9


@dataclasses.dataclass(frozen=True, slots=True)
class SimulateSettings:
    """What to simulate: costs by ``profile``, which has to be of ``model`` and of this machine's ``device`` where
    these are given, or by ``hardware`` and ``shape``. ``interconnect``: a profile, by whose ranks' exchanges the
    hardware's cards exchange. ``policies``: names with commas between, or "all".
    ``merge``: modes likewise, each with every policy. ``copy_limit``: most bytes a second that copies move;
    None: as the costs have it. ``engine``: settings by flag name. ``with_limits``: bounds beside every policy
    (docs/limits.md)."""

    profile: str | None = None
    model: str | None = None
    device: str | None = None
    hardware: str | None = None
    shape: str | None = None
    cards: int = 1
    tensor_parallel_size: int = 1
    lora_sharding: str = "auto"
    interconnect: str | None = None
    policies: str = "manylora"
    merge: str = "unmerged"
    copy_limit: int | None = None
    is_warm: bool = True
    with_limits: bool = False
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    out: Path | None = None

    def __post_init__(self) -> None:
        if (self.profile is None) == (self.hardware is None):
            raise ConfigError("name either --profile, such as h200-llama-2-7b, or --hardware, such as h200")
        if self.profile is not None and self.shape is not None:
            raise ConfigError("a profile knows its model: --shape goes with --hardware")
        if self.hardware is not None and self.model is not None:
            raise ConfigError("--model is compared with a profile's: with --hardware name a --shape")
        if self.hardware is not None and self.device is not None:
            raise ConfigError("--device is compared with a profile's machine: it does not go with --hardware")
        check_cards(self.cards, "--cards")
        if self.tensor_parallel_size < 1:
            raise ConfigError(f"--tensor-parallel-size must be at least 1, got {self.tensor_parallel_size}")
        if self.tensor_parallel_size > 1 and self.cards > 1:
            raise ConfigError(
                "--cards shares a model out ideally: it does not go with --tensor-parallel-size"
            )
        if self.interconnect is not None and (self.hardware is None or self.tensor_parallel_size == 1):
            raise ConfigError("--interconnect goes with --hardware and --tensor-parallel-size above 1")
        if self.lora_sharding not in ("auto", *LORA_SHARDINGS):
            known = ", ".join(("auto", *LORA_SHARDINGS))
            raise ConfigError(f"--lora-sharding must be one of {known}, got {self.lora_sharding!r}")
        if self.out is not None:
            check_writable(self.out)


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedTarget:
    """What is simulated: costs on all cards, and what the engine's settings, pools and adapters follow from.
    ``shape``: what all cards hold together. ``profile``: whence the costs are, if measured. ``sharding``: of
    adapters where the cards share the model by tensor parallelism. ``cold``: what cold starts take, but for what
    settings say; None: a profile that does not tell."""

    name: str
    shape: ModelShape
    costs: StepCosts
    profile: Profile | None
    pool_bytes: int | None
    cards: int = 1
    tensor_parallel_size: int = 1
    sharding: LoraSharding = "sharded"
    cold: ColdCosts | None = None

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """Whose defaults the engine has."""
        return "cuda" if self.profile is None else self.profile.kind

    @property
    def modules(self) -> tuple[str, ...]:
        """That the adapters adapt."""
        return ATTENTION_MODULES if self.profile is None else self.profile.adapter_modules

    def adapter_pages(self, rank: int, page_tokens: int) -> int:
        """Pages that an adapter of this rank takes."""
        return adapter_pages(
            self.shape, self.tensor_parallel_size, self.sharding, rank, page_tokens, self.modules
        )

    def cold_start(self, config: ColdStartConfig, host_bytes: int) -> ColdStartConfig:
        """As an engine there gives it to its policy. Raises ConfigError where the CPU cannot serve."""
        config = config.on_device(has_gates=False)  # wait, where no mode was given
        config = dataclasses.replace(config, lands_whole=self.kind == "cpu" and config.num_groups > 1)
        check_host_pool(config, host_bytes)
        if self.cold is None:
            if config.mode == "cpu":
                raise ConfigError(f"--cold-start cpu: {_NO_CPU}")
            return config
        return dataclasses.replace(config, num_workers=config.workers_of(self.cold.cores))

    def cold_costs(self, config: PolicyConfig) -> ColdCosts:
        """What cold starts take."""
        if self.cold is None:
            return NOTHING_COLD
        return dataclasses.replace(self.cold, num_workers=config.cold_start.num_workers)

    def merge_times(self, config: PolicyConfig) -> MergeTimes | None:
        """What an engine of this config measures before serving, if the profile has it."""
        if self.profile is None or self.cards > 1:
            return None
        return measured_times(self.profile, on_host=config.merge.copy == "host")

    def merge_costs(self, config: PolicyConfig) -> MergeCosts | None:
        """What merged steps take, if the profile has it."""
        if self.profile is None or self.merge_times(config) is None:
            return None
        return measured_costs(self.profile, self.costs, on_host=config.merge.copy == "host")


def run(settings: SimulateSettings, load: Callable[[], Stream]) -> int:
    """Simulate what ``load`` returns, print a line for each policy as it is done. Raises ConfigError."""
    target = target_of(settings)
    foreseen = [name for name in policies_of(settings.policies) if name in FORESIGHTS]
    if foreseen and modes_of(settings.merge) != ["unmerged"]:
        raise ConfigError(
            f"{foreseen[0]} knows when adapters are needed, not when they are merged: leave --merge out"
        )
    configs = {
        name if mode == "unmerged" else f"{name}+{mode}": config_of(settings, name, target, mode)
        for name in policies_of(settings.policies)
        for mode in modes_of(settings.merge)
    }
    # Of the reference batch sizes and lengths matter, pools do not, and pages are as large as by default.
    unlimited = config_of(settings, "lru", target)
    notes = notes_of(configs, target)
    recording = Provenance("the workload's (--seed)")
    stream = load()
    print(f"{stream.name} on {target.name}, {len(stream.requests)} requests", flush=True)
    for note in notes:
        print(f"note: {note}", flush=True)
    columns = (
        *_COLUMNS,
        *(_LIMITS if settings.with_limits else ()),
        *(_MERGING if any(config.merge.is_on for config in configs.values()) else ()),
        *((_DROPPED,) if unlimited.admission == "early-abort" else ()),
    )
    width = max(len(name) for name in (*configs, REFERENCE))
    print(_line("", width, [heading for heading, _ in columns]), flush=True)
    report: dict[str, Any] = {
        "benchmark": "simulate", "workload": stream.name, "requests": len(stream.requests),
        "notes": [*stream.notes, *notes], "device": target.name, "model": str(target.shape), "results": {},
    }  # fmt: skip
    for name, plain in (*configs.items(), (REFERENCE, unlimited)):
        config = with_times(plain, stream, target)
        result = _simulated(name, config, stream, target, settings)
        report["results"][name] = result
        print(_line(name, width, [_cell(form, result) for _, form in columns]), flush=True)
    if settings.out is not None:
        report["provenance"] = recording.provenance()
        try:
            settings.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {settings.out}: {error.strerror}") from error
    return 0


def _simulated(
    name: str, config: PolicyConfig, stream: Stream, target: SimulatedTarget, settings: SimulateSettings
) -> dict[str, Any]:
    """One policy's result, beside it, if asked for, the most that any could have kept; or the reference's."""
    pages = [target.adapter_pages(rank, config.page_tokens) for rank in stream.ranks]
    limit, cold = settings.copy_limit, target.cold_costs(config)
    merge_costs = target.merge_costs(config)
    of_policy: dict[str, Any] = {}
    clairvoyant = Clairvoyant(config.merge) if config.merge.is_on else None
    watch = None if clairvoyant is None else lambda _now, command: clairvoyant.told(command)
    if name == REFERENCE:
        replay = reference(stream, config, target.costs, pages)
    elif name in FORESIGHTS:
        of_unseen = FORESIGHTS[name]
        replay = ForeseenReplay(
            stream, config, target.costs, pages, settings.is_warm, of_unseen=of_unseen, copy_limit=limit
        )
        replay.run()
        of_policy = {"config": {**noted(config), "cache": name}}
    elif settings.with_limits:
        replay, record = recorded(
            stream, config, target.costs, pages, settings.is_warm, watch, merge_costs, limit, cold
        )
        of_policy = {"config": noted(config), **summarize_limits(record, config)}
    else:
        replay = Replay(
            stream, config, target.costs, pages, settings.is_warm, watch, merge_costs, limit, cold=cold
        )
        replay.run()
        of_policy = {"config": noted(config)}
    dropped = sum(outcome.is_dropped for outcome in replay.outcomes)
    merged: dict[str, Any] | None = merging(replay)
    if merged is not None and clairvoyant is not None:
        merged["priced_by"] = "base-only steps" if merge_costs is None else "measured steps"
        merged["clairvoyant"] = clairvoyant.hindsight().report()
    return {
        **of_policy, **summarize(replay), **ttft_parts_ms(replay.outcomes), "dropped": dropped,
        "service_difference": replay.service_difference(), "merging": merged,
    }  # fmt: skip


def _line(name: str, width: int, cells: Sequence[str]) -> str:
    """``cells`` under their columns' headings, or these."""
    widths = (max(_LEAST_WIDTH, len(heading)) for heading, _ in (*_COLUMNS, *_LIMITS, *_MERGING, _DROPPED))
    return f"{name:<{width}}" + "".join(f"  {cell:>{wide}}" for cell, wide in zip(cells, widths))


def _cell(form: str, result: Mapping[str, Any]) -> str:
    try:
        return form.format_map(result)
    except (KeyError, TypeError):  # the reference has no limits beside it, and merges nothing
        return "-"


def notes_of(configs: Mapping[str, PolicyConfig], target: SimulatedTarget) -> list[str]:
    """What is not as the profile has it, or as an engine's requests have it."""
    notes = []
    if any(config.queue.has_priorities for config in configs.values()):
        notes.append("a workload has no priorities: all requests have the usual one, 0")
    if any(config.merge.is_on and target.merge_times(config) is None for config in configs.values()):
        notes.append("merged steps were not measured: they are priced by steps of the base alone")
    if target.profile is None:
        return notes
    measured, depth = target.profile.page_tokens, target.profile.steps_in_flight
    given = next(config.pipeline_depth for config in configs.values())
    if given != depth:
        notes.append(
            f"the profile is of an engine with pipeline_depth {depth}, not {given}: what the host takes between "
            "steps is another there"
        )
    return notes + [
        f"{name} has pages of {config.page_tokens} tokens, the profile is of pages of {measured}"
        for name, config in configs.items()
        if config.page_tokens != measured
    ]


def modes_of(text: str) -> list[str]:
    """Modes of merging from names with commas between. Raises ConfigError."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ALL_MERGE_MODES:
            hint = suggestion(name, ALL_MERGE_MODES) or f": use {', '.join(ALL_MERGE_MODES)}"
            raise ConfigError(f"--merge {name!r} is not known{hint}")
    return list(dict.fromkeys(names))


def policies_of(text: str) -> list[str]:
    """Cache policies from names with commas between, or "all". Raises ConfigError."""
    names = list(ALL_CACHE_POLICIES) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if is_import_name(name):
            find_cache(name)
        elif name not in (*ALL_CACHE_POLICIES, *FORESIGHTS):
            hint = suggestion(name, ALL_CACHE_POLICIES) or f": use {', '.join(ALL_CACHE_POLICIES)} or all"
            raise ConfigError(f"cache policy {name!r} is not known{hint}")
    return list(dict.fromkeys(names))


def target_of(settings: SimulateSettings) -> SimulatedTarget:
    """What the settings name. Raises ConfigError."""
    cards = f"{settings.cards} x " if settings.cards > 1 else ""
    if settings.hardware is not None:
        hardware, shape = hardware_named(settings.hardware), shape_named(settings.shape or _SHAPE)
        if settings.tensor_parallel_size > 1:
            return _parallel_target(settings, hardware, shape)
        costs = described_costs(shape, hardware, settings.cards)
        name = f"{cards}{hardware.name} (assumed)"
        cold = assumed_cold(shape, ATTENTION_MODULES, hardware)
        return SimulatedTarget(name, shape, costs, None, costs.pool_bytes(), cold=cold)
    assert settings.profile is not None
    profile = find_profile(settings.profile)
    size = settings.tensor_parallel_size
    profile.expect(tensor_parallel_size=size)
    if settings.model is not None:
        profile.expect(_shape_of_folder(settings.model, profile.model.itemsize))
    if settings.device is not None:
        profile.expect(machine=_this_machine(settings.device))
    measured = fit_profile(profile).on_cards(settings.cards)
    sharding = lora_sharding_of(settings.lora_sharding, size)
    if profile.lora_sharding:
        if settings.lora_sharding not in ("auto", profile.lora_sharding):
            raise ConfigError(f"the profile is of {profile.lora_sharding} adapters, not of {sharding} ones")
        sharding = lora_sharding_of(profile.lora_sharding, size)
    of_ranks = f", {size} ranks, adapters {sharding}" if size > 1 else ""
    return SimulatedTarget(
        f"{cards}{profile.machine}{of_ranks}", held_shape(profile.model, size), measured, profile, None,
        settings.cards, size, sharding, measured_cold(profile),
    )  # fmt: skip


def _parallel_target(settings: SimulateSettings, hardware: Hardware, shape: ModelShape) -> SimulatedTarget:
    size = settings.tensor_parallel_size
    sharding = lora_sharding_of(settings.lora_sharding, size)
    exchanges = ""
    if settings.interconnect is not None:
        link = measured_link(find_profile(settings.interconnect), size)
        hardware, exchanges = dataclasses.replace(hardware, interconnect=link), f", exchanges {link.name}"
    costs = ParallelCosts(shape, hardware, size, sharding=sharding)
    name = f"{size} x {hardware.name}, tensor parallel, adapters {sharding} (assumed{exchanges})"
    return SimulatedTarget(name, costs.shape, costs, None, costs.pool_bytes(), size, size, sharding)


def _shape_of_folder(model: str, itemsize: int) -> ModelShape:
    from manylora.models.config import read_model_config
    from manylora.models.spec import ModelError
    from manylora_lab.pricing.shapes import shape_of

    try:
        return shape_of(read_model_config(Path(model)), Path(model).resolve().name, itemsize)
    except ModelError as error:
        raise ConfigError(str(error)) from None


def _this_machine(device: str) -> str:
    from manylora.devices.device import open_device
    from manylora_lab.bench.profile import machine_name

    return machine_name(open_device(device).name)


def config_of(
    settings: SimulateSettings, policy: str, target: SimulatedTarget, mode: str = "unmerged"
) -> PolicyConfig:
    """The config that ``executor.build`` gives on such a device, but for what depends on free memory there. Raises
    ConfigError."""
    given = {
        **{name: value for name, value in settings.engine.items() if _says_something(name, mode)},
        "cache_policy": "manylora" if policy in FORESIGHTS else policy, "model": "simulated", "merge": mode,
    }  # fmt: skip
    if given.get("fair_by") == "key":
        raise ConfigError("--fair-by key: a workload's requests have no API keys; simulate --fair-by adapter")
    given["cache_set"] = _of_policy(given.get("cache_set", ()), given["cache_policy"])
    engine, _ = build_settings(given)
    page_bytes = target.shape.page_bytes(engine.cache.page_tokens)
    pool_bytes, merge = beside_pristine(
        engine.scheduler.merge, _pool_bytes(engine, target), target.shape.layer_bytes, target.kind
    )
    num_pages = pool_bytes // page_bytes
    if num_pages < 1:
        raise ConfigError(f"the device pool holds no page of {page_bytes / 2**20:g} MiB")
    host_pool = engine.cache.host_pool
    host_bytes = _HOST_POOL_BYTES[target.kind] if host_pool is None else host_pool
    scheduler = engine.scheduler
    num_seqs, batch_tokens, pipeline_depth = scheduler.limits_on(target.kind)
    if target.profile is not None:
        pipeline_depth = scheduler.pipeline_depth or target.profile.steps_in_flight
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
        queue=scheduler.queue,
        merge=merge,
        max_prefills_per_step=scheduler.max_prefills,
        kept_share=scheduler.kept_share,
        cold_start=target.cold_start(scheduler.cold_start, host_bytes),
    )


def _of_policy(texts: Sequence[str], policy: str) -> list[str]:
    """Without the numbers that only other cache policies have."""
    others = set(CACHE_NUMBERS) - set(cache_numbers(policy))
    return [text for text in texts if text.partition("=")[0] not in others]


def _says_something(name: str, mode: str) -> bool:
    """Whether a setting has to do with that mode of merging, or with none."""
    about = {setting.name: setting for field in fields_of(MergeConfig) if (setting := setting_of(field))}
    needs = about[name].needs if name in about else None
    return needs is None or needs[1].holds(mode)


def with_times(config: PolicyConfig, stream: Stream, target: SimulatedTarget) -> PolicyConfig:
    """Where adapters are merged, with what the engine would have measured before serving: of the stream's median
    rank."""
    if not config.merge.is_on or not stream.ranks:
        return config
    rank = statistics.median_low(stream.ranks)
    num_pages = target.adapter_pages(rank, config.page_tokens)
    times = target.merge_times(config) or merge_times(
        target.costs,
        num_pages * config.page_bytes,
        target.shape.layer_bytes,
        config.max_num_seqs,
        config.max_batch_tokens,
        on_host=config.merge.copy == "host",
    )
    return dataclasses.replace(config, merge=dataclasses.replace(config.merge, times=times))


def _pool_bytes(engine: EngineSettings, target: SimulatedTarget) -> int:
    found = engine.cache.device_pool or target.pool_bytes
    if found is None:
        raise ConfigError(
            "--device-pool is missing: a profile does not say what its machine has left for pages"
        )
    return found


def noted(config: PolicyConfig) -> dict[str, Any]:
    """A config as a report has it."""
    values = dataclasses.asdict(config)
    return {**values, "cache": values["cache"]["policy"]}
