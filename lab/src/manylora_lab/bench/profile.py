"""``manylora profile``: what steps, copies, reads and the engine itself take on this device with this model.

The whole engine serves clients under one load after another (``bench.profile_loads``), and what its steps took is
noted: an engine's steps share the machine with its policy, its event loop and its copies, and take longer than the
same batches one by one. With several ranks it is the same engine on all of them, and sums over them are timed
beside. The report is a profile (``pricing.profile``), from which the simulator's costs are fitted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from manylora.config.declaring import ConfigError
from manylora.config.policy import PolicyConfig
from manylora.config.sections import EngineSettings
from manylora.engine.driver import Driver
from manylora.executor.build import build_worker
from manylora.executor.ranks.executor import RanksLost
from manylora.executor.ranks.start import build_ranks
from manylora.executor.reading import READERS
from manylora.flags import build_settings
from manylora.models.config import read_model_config
from manylora.models.source import resolve_model
from manylora.models.spec import ModelConfig, ModelError
from manylora.protocol.executor import Executor
from manylora.types import EngineInfo
from manylora.warmup import write_random_adapters
from manylora_lab.bench.exchange_times import measure_exchanges
from manylora_lab.bench.picture import check_writable
from manylora_lab.bench.profile_cold import GATE_TURNS, measure_cold
from manylora_lab.bench.profile_grid import GridLimits, make_batches
from manylora_lab.bench.profile_loads import (
    ClientLoad,
    EngineCapacity,
    answer_time_s,
    busy_load,
    crowded_load,
    make_loads,
    overhead_points,
    rank_lines,
    read_points,
    read_under_load,
    run_load,
    step_points,
    wake,
)
from manylora_lab.bench.profile_merging import measure_merging
from manylora_lab.bench.profile_report import ProgressBars, describe
from manylora_lab.bench.profile_rig import ProfileRig, rounded
from manylora_lab.bench.profile_spread import copy_drag, spread_of
from manylora_lab.bench.step_log import StepLog, StepLogger
from manylora_lab.bench.targets import EngineTarget
from manylora_lab.pricing.fit import fit_profile
from manylora_lab.pricing.profile import FORMAT, ExchangePoint, Profile, save_profile
from manylora_lab.pricing.shapes import ModelShape, shape_of

Progress = Callable[[str, int, int], None]
"""Called with what is measured, how much of it is done, and how much there is."""

RANKS = (64, 8, 32, 16)
"""The ranks of the adapters, in turn; 64 and 32 are the FastLibra paper's."""

_HOST_POOL = {"cpu": "256MiB", "cuda": "2GiB"}
_ADAPTER_ROOM = 0.3
_KV_ROOM = 0.6
_READS = 2 * len(RANKS)
"""Adapters read under load in each part: two of each rank."""
_WAKES, _QUICK_WAKES, _MOST_WAKE_TOKENS = 24, 8, 64
"""Prompts that find the engine idle in each part, and the longest of them: short, since what waking takes is told
from the rest by the fit, whose error in a long prompt is more than that."""
_MOST_PASSES = 5
_CROWDS = 2
"""How often each part is watched with too few pages."""
_ATTENTION_GROUPS = ("qkv", "o")
_PACKAGES = ("manylora", "torch", "numpy", "triton", "numba", "flashinfer-python")


@dataclasses.dataclass(frozen=True, slots=True)
class ProfileSettings:
    """What to profile. ``engine``: settings by flag name, ``model`` too. ``budget_s``: for watching the
    engine, pass after pass over its loads, one pass at least. ``with_merging``: also what merging takes."""

    engine: Mapping[str, Any]
    out: Path
    name: str | None = None
    adapter_modules: str = "attention"
    is_quick: bool = False
    budget_s: float = 100.0
    with_merging: bool = False
    commit: str = "unknown"

    def __post_init__(self) -> None:
        if self.adapter_modules not in ("attention", "all"):
            raise ConfigError(f"--adapter-modules must be attention or all, got {self.adapter_modules!r}")
        if not 0 < self.budget_s < float("inf"):
            raise ConfigError(f"--budget must be more than 0, got {self.budget_s}")
        check_writable(self.out)

    @property
    def repeats(self) -> int:
        """How often every copy and read is repeated."""
        return 5 if self.is_quick else 9


def run(settings: ProfileSettings) -> int:
    """Measure, write the file, say how well costs fit. Raises ConfigError."""
    profile = measure(settings, ProgressBars())
    save_profile(profile, settings.out)
    print(describe(profile, fit_profile(profile)))
    print(f"written to {settings.out}")
    return 0


def measure(settings: ProfileSettings, progress: Progress) -> Profile:
    """The profile, on a worker, or on ranks, that are made and closed here. Raises ConfigError."""
    engine = _engine_settings(settings)
    is_alone = engine.tensor_parallel_size == 1
    executor: Executor
    try:
        config = read_model_config(resolve_model(engine.model.model))
        executor, policy, info = build_worker(engine) if is_alone else build_ranks(engine)
    except ModelError as error:
        raise ConfigError(str(error)) from error
    try:
        with Profiler(settings, executor, policy, info, config, progress) as profiler:
            profiler.watch()
            profile = profiler.profile()
    except RanksLost as error:
        raise ConfigError(f"the ranks are lost: {error}") from error
    finally:
        executor.close()
    if is_alone:  # CPU workers do not serve ranks, and a rank's layers cannot be timed from here
        profile = _with_cold(settings, profile, config, progress)
    else:
        profile = _with_exchanges(profile, info, policy.max_batch_tokens)
    if not settings.with_merging:
        return profile
    found = measure_merging(_with_host_pool(settings.engine), config, profile.model, progress)
    return dataclasses.replace(profile, switches=found.switches, modes=found.modes)


def _with_cold(
    settings: ProfileSettings, profile: Profile, config: ModelConfig, progress: Progress
) -> Profile:
    def write(folder: Path) -> list[Path]:
        return _write_adapters(folder, config, profile.dtype, settings, len(RANKS))

    found = measure_cold(_with_host_pool(settings.engine), config, write, settings.repeats, progress)
    return dataclasses.replace(profile, **found._asdict())


def _with_exchanges(profile: Profile, info: EngineInfo, most: int) -> Profile:
    """Sums over all ranks, of hidden states of 1, 4, 16, ... tokens. Raises ConfigError."""
    counts = [count for power in range(most.bit_length()) if (count := 4**power) < most]
    sizes = [count * profile.model.hidden * profile.model.itemsize for count in (*counts, most)]
    kind = "cpu" if info.device.startswith("cpu") else "cuda"
    try:
        seconds = measure_exchanges(kind, len(info.ranks), info.dtype, sizes)
    except RuntimeError as error:
        raise ConfigError(str(error)) from error
    points = [ExchangePoint(size, rounded(one)) for size, one in zip(sizes, seconds)]
    return dataclasses.replace(profile, exchanges=tuple(points))


class Profiler:
    """Profiles an executor that serves no requests meanwhile; it stays open. A context: its files go at the end.

    ``watch`` may be called for one part of the loads after another, with other work between, so that a machine
    whose speed changes over minutes is seen as often fast and slow as that work sees it. Raises ConfigError.
    """

    def __init__(
        self,
        settings: ProfileSettings,
        executor: Executor,
        policy: PolicyConfig,
        info: EngineInfo,
        config: ModelConfig,
        progress: Progress,
    ) -> None:
        """Reads adapters and rehearses, for what only a first run of a batch costs."""
        self._settings = settings
        self._executor = executor
        self._policy = policy
        self._info = info
        self._config = config
        self._progress = progress
        self._log = StepLog()
        self._crowded = StepLog()
        self._answer_s: list[float] = []
        self._folder = tempfile.TemporaryDirectory()
        try:
            folder = Path(self._folder.name)
            self._prepare(_write_adapters(folder, config, info.dtype, settings, policy.max_num_seqs))
        except BaseException:
            self._folder.cleanup()
            raise

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def _prepare(self, paths: list[Path]) -> None:
        rig = ProfileRig(self._executor, self._policy)
        self._progress("adapters", 0, 1)
        rig.serve(paths, _ADAPTER_ROOM)
        if not rig.num_adapters:
            raise ConfigError("the device's pool is too small for one adapter: raise --device-pool")
        self._progress("adapters", 1, 1)
        self._reads = rig.reads(range(1, 1 + min(len(RANKS), rig.num_adapters)), self._settings.repeats)
        _rehearse(self._settings, rig, self._policy, self._progress)
        # Last: by now a large host pool is pinned.
        self._copies = rig.copies(self._settings.repeats)
        gates = self._policy.cold_start.num_groups > 0
        self._gates = rig.gates(GATE_TURNS * self._settings.repeats) if gates else []
        self._paths = paths[: rig.num_adapters]
        self._adapter_pages = rig.adapter_pages
        rig.forget_adapters()

    def _shape(self) -> ModelShape:
        info = self._info
        name = self._settings.name or Path(info.model).name
        return shape_of(self._config, name, getattr(torch, info.dtype).itemsize)

    def watch(self, part: int = 0, num_parts: int = 1) -> None:
        """Run an engine under this part of the loads, once at least, and for its part of the time."""
        room = EngineCapacity(
            max_seqs=self._policy.max_num_seqs,
            max_len=self._policy.max_model_len,
            num_tokens=int(_KV_ROOM * self._policy.num_pages) * self._policy.page_tokens,
            num_adapters=len(self._paths),
        )
        loads = make_loads(room, self._settings.is_quick)[part::num_parts]
        log = asyncio.run(self._watched(room, loads, self._settings.budget_s / num_parts))
        _add(self._log, log)
        _add(self._crowded, asyncio.run(self._watched_in_need(room, part)))

    def _open(self, policy: PolicyConfig) -> tuple[StepLogger, EngineTarget, list[str]]:
        """An engine on the worker, and its adapters' names."""
        lent = StepLogger(self._executor, policy.page_bytes)
        info = dataclasses.replace(self._info, num_pages=policy.num_pages, max_model_len=policy.max_model_len)
        driver = Driver(policy, lent, info)
        names = [f"profile-{number}" for number in range(len(self._paths))]
        for name, path in zip(names, self._paths):
            driver.add_adapter(name, str(path), verify=False)
        return lent, EngineTarget(driver), names

    async def _watched_in_need(self, room: EngineCapacity, seed: int) -> StepLog:
        """An engine that has half the pages that its clients fill."""
        policy = self._policy
        load = crowded_load(room, policy.num_host_pages * policy.page_tokens)
        of_adapters = self._adapter_pages[: load.adapters]
        of_client = -(-load.turns * (load.context + load.reply) // policy.page_tokens)
        needed = load.clients * of_client + sum(of_adapters)
        num_pages = min(policy.num_pages, max(needed // 2, of_client + max(of_adapters, default=0) + 1))
        lent, target, names = self._open(
            dataclasses.replace(
                policy,
                num_pages=num_pages,
                max_model_len=min(policy.max_model_len, of_client * policy.page_tokens),
            )
        )
        try:
            for number in range(_CROWDS):
                await run_load(target, load, names, seed=seed * _CROWDS + number)
        finally:
            await target.close()
        return lent.log()

    async def _watched(self, room: EngineCapacity, loads: Sequence[ClientLoad], budget_s: float) -> StepLog:
        """The engine's steps, and the reads of its first part, under load."""
        busy = busy_load(room)
        lent, target, names = self._open(self._policy)
        total = _MOST_PASSES * len(loads)
        ends_at = time.monotonic() + budget_s
        try:
            await read_under_load(target, busy, names[:_READS], seed=0)
            reads = lent.log().reads
            count = _QUICK_WAKES if self._settings.is_quick else _WAKES
            answered_s = await wake(
                target,
                names[:_READS],
                (busy.context, max(busy.context, min(_MOST_WAKE_TOKENS, room.max_len // 2))),
                count,
                seed=1,
            )
            for done in range(total):
                if time.monotonic() > ends_at and done >= len(loads):
                    break
                self._progress("engine", done, total)
                await run_load(target, loads[done % len(loads)], names, seed=done)
        finally:
            await target.close()
        self._progress("engine", total, total)
        steps = lent.log().steps
        self._answer_s.append(answer_time_s(steps, answered_s))
        return StepLog(steps, reads=reads)

    def profile(self) -> Profile:
        """The profile of all that was watched."""
        settings, info, shape = self._settings, self._info, self._shape()
        num_ranks = max(1, len(info.ranks))
        projections = projections_of(self._config, settings.adapter_modules)
        profile = Profile(
            format=FORMAT,
            machine=machine_name(info.device.removesuffix(f", {num_ranks} ranks")),
            model=shape,
            fingerprint=shape.fingerprint,
            dtype=info.dtype,
            page_tokens=self._policy.page_tokens,
            adapter_modules=tuple(p.module.rpartition(".")[2] for p in projections),
            reads_at_once=READERS,
            versions=_versions(),
            commit=settings.commit,
            steps=tuple(step_points(self._log.steps)),
            wakes=tuple(step_points(self._log.steps, is_cold=True)),
            copies=tuple(self._copies),
            reads=tuple(read_points(self._log.reads, self._reads)),
            overheads=tuple(overhead_points(self._log.steps)),
            answer_s=statistics.median(self._answer_s),
            pipeline_depth=self._policy.pipeline_depth,
            ranks=rank_lines(self._log.steps),
            gates=tuple(self._gates),
            tensor_parallel_size=num_ranks,
            lora_sharding=info.lora_sharding,
        )
        costs = fit_profile(profile)
        return dataclasses.replace(
            profile,
            copy_drag=copy_drag(self._crowded, costs),
            spread=spread_of(self._log, self._crowded, costs),
        )


def _add(log: StepLog, more: StepLog) -> None:
    log.steps += more.steps
    log.copies += more.copies
    log.reads += more.reads


def _engine_settings(settings: ProfileSettings) -> EngineSettings:
    return build_settings(_with_host_pool(settings.engine))[0]


def _with_host_pool(engine: Mapping[str, Any]) -> dict[str, Any]:
    values = {"cold_start": "wait", **engine}  # what gates cost is measured apart
    if values.get("host_pool") is None:
        on_cpu = values.get("device") == "cpu" or not torch.accelerator.is_available()
        values["host_pool"] = _HOST_POOL["cpu" if on_cpu else "cuda"]
    return values


def _rehearse(settings: ProfileSettings, rig: ProfileRig, policy: PolicyConfig, progress: Progress) -> None:
    """Run every kind of batch once, for what only a first run costs, such as kernels to compile."""
    limits = GridLimits(
        max_seqs=policy.max_num_seqs,
        max_tokens=policy.max_batch_tokens,
        max_len=policy.max_model_len,
        num_pages=rig.num_free_pages,
        page_tokens=policy.page_tokens,
        num_adapters=rig.num_adapters,
    )
    batches = make_batches(limits, settings.is_quick)
    for done, batch in enumerate(batches):
        progress("rehearsal", done, len(batches))
        rig.rehearse(batch)
    progress("rehearsal", len(batches), len(batches))


# ---------------------------------------------------------------- what is measured


def machine_name(device: str) -> str:
    """The device; of a CPU also which one, and on how many threads."""
    if device != "cpu":
        return device
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"cpu ({names[0] if names else model}, {torch.get_num_threads()} threads)"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def projections_of(config: ModelConfig, which: str) -> list[Any]:
    groups = [group for group in config.groups if which == "all" or group.name in _ATTENTION_GROUPS]
    return [projection for group in groups for projection in group.projections]


def _write_adapters(
    folder: Path, config: ModelConfig, dtype: str, settings: ProfileSettings, max_seqs: int
) -> list[Path]:
    """Random PEFT adapters of RANKS in turn, as many as rows."""
    count = min(max_seqs, 16 if settings.is_quick else 48)
    projections = projections_of(config, settings.adapter_modules)
    return write_random_adapters(folder, config, dtype, RANKS, count, projections)


def settings_from(values: Mapping[str, Any], engine: Mapping[str, Any]) -> ProfileSettings:
    """Settings from the command line's values, texts or None; raises ConfigError."""
    is_quick = bool(values.get("quick"))
    text = values.get("budget")
    try:
        budget_s = (25.0 if is_quick else 100.0) if text is None else float(text)
    except ValueError:
        raise ConfigError(f"--budget must be a number of seconds, got {text!r}") from None
    return ProfileSettings(
        engine=engine,
        out=Path(values["out"]),
        name=values.get("name"),
        adapter_modules=values.get("adapter_modules") or "attention",
        is_quick=is_quick,
        budget_s=budget_s,
        with_merging=bool(values.get("merging")),
        commit=values.get("commit") or "unknown",
    )
