"""``manylora bench simulate --replicas N``: a workload over replicas and a router in virtual time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from manylora.config.cluster import MOST_REPLICAS
from manylora.config.declaring import ConfigError
from manylora.config.named import is_import_name
from manylora.config.policy import PolicyConfig
from manylora.config.queueing import QueueConfig
from manylora.config.routing import (
    CaraServeParameters,
    RouterConfig,
    read_parameters,
    split_setting,
)
from manylora.engine.journal import JournalWriter
from manylora.protocol.routing import RankCosts
from manylora.router.policies.policy import find_router
from manylora.solving import solver_is_there, solving
from manylora_lab.baselines import ALL_ROUTERS
from manylora_lab.bench.cluster_picture import draw_routers
from manylora_lab.bench.picture import check_plot
from manylora_lab.bench.provenance import Provenance
from manylora_lab.bench.simulate import (
    SimulatedTarget,
    SimulateSettings,
    config_of,
    modes_of,
    noted,
    notes_of,
    policies_of,
    target_of,
    with_times,
)
from manylora_lab.pricing.caraserve import caraserve_settings, rank_costs, slo_factor, slo_of
from manylora_lab.sim.belady import FORESIGHTS
from manylora_lab.sim.cluster import (
    EAGER_ADAPTERS,
    MOST_REPORT_DELAY_S,
    REPORT_DELAY_S,
    Journal,
    Member,
    VirtualCluster,
)
from manylora_lab.sim.cluster_summary import summarize_cluster
from manylora_lab.sim.replay import difference_of
from manylora_lab.workloads.stream import Stream
from manylora_lab.workloads.terms import suggestion

_COLUMNS = (
    ("TTFT ms", "{ttft_mean_ms:.1f}"),
    ("p99", "{ttft_p99_ms:.1f}"),
    ("TPOT ms", "{tpot_mean_ms:.2f}"),
    ("ms a token", "{time_per_token_mean_ms:.2f}"),
    ("in SLO", "{slo_attainment:.3f}"),
    ("done per s", "{done_per_s:.2f}"),
    ("busy", "{busy_share:.2f}"),
    ("loads", "{adapter_loads:.0f}"),
    ("moves", "{moves}"),
    ("us a choice", "{decision_mean_us:.0f}"),
)
_LEAST_WIDTH = 9


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What to simulate. ``each``: of every replica; its profile or hardware may be several names with commas
    between, which go round the replicas. ``routers``: names with commas between, or "all"; ``router_set``:
    parameters as ROUTER.KEY=VALUE. ``slo_tpot``: seconds, or a multiple of the merged step such as 1.5x.
    ``journals``: a folder for the journals of the router and of each replica, of one case."""

    each: SimulateSettings
    replicas: int
    routers: str = "manylora"
    router_set: Sequence[str] = ()
    slo_tpot: str | None = None
    report_delay_s: float = REPORT_DELAY_S
    journals: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise ConfigError(f"--replicas must be between 1 and {MOST_REPLICAS}, got {self.replicas}")
        if not 0 <= self.report_delay_s <= MOST_REPORT_DELAY_S:
            raise ConfigError(
                f"--report-delay must be between 0 and {MOST_REPORT_DELAY_S:g} seconds, since a router gives up "
                f"replicas that it has not heard of for {RouterConfig().lease_s:g}, got {self.report_delay_s:g}"
            )
        if self.slo_tpot is not None:
            slo_factor(self.slo_tpot)
        if self.each.with_limits:
            raise ConfigError("--limits are those of one replica: leave out --replicas")
        if self.plot is not None:
            check_plot(self.plot)


def run_cluster(settings: ClusterSettings, load: Callable[[], Stream]) -> int:
    """Simulate what ``load`` returns, print a line for each router as it is done. Raises ConfigError."""
    foreseen = [name for name in policies_of(settings.each.policies) if name in FORESIGHTS]
    if foreseen:
        raise ConfigError(f"{foreseen[0]} knows what one replica is asked for: leave out --replicas")
    targets = _targets(settings.each)
    if len(targets) > settings.replicas:
        raise ConfigError(
            f"--replicas {settings.replicas} is fewer than the {len(targets)} kinds that are named"
        )
    slo_s = slo_of(settings.slo_tpot, targets[0].costs)
    routers = _routers(settings, targets, slo_s)
    modes = {
        name if mode == "unmerged" else f"{name}+{mode}": (name, mode)
        for name in policies_of(settings.each.policies)
        for mode in modes_of(settings.each.merge)
    }
    configs = {
        name: [config_of(settings.each, policy, target, mode) for target in targets]
        for name, (policy, mode) in modes.items()
    }
    cases = [(router, name) for router in routers for name in configs]
    if settings.journals is not None and len(cases) > 1:
        raise ConfigError("--journals are of one router with one cache policy")
    if settings.journals is not None:
        _make(settings.journals)
    notes = _notes(settings, configs, targets, routers)
    recording = Provenance("the workload's (--seed)")
    stream = load()
    if len(stream.ranks) > EAGER_ADAPTERS and settings.each.is_warm:
        notes.append(f"of more than {EAGER_ADAPTERS} adapters none was asked for before")
    places = " and ".join(dict.fromkeys(target.name for target in targets))
    print(f"{stream.name} on {settings.replicas} x {places}, {len(stream.requests)} requests", flush=True)
    for note in notes:
        print(f"note: {note}", flush=True)
    labels = {case: case[0] if len(configs) == 1 else f"{case[0]}/{case[1]}" for case in cases}
    width = max(map(len, labels.values()))
    print(_line("", width, [heading for heading, _ in _COLUMNS]), flush=True)
    report: dict[str, Any] = {
        "benchmark": "simulate", "workload": stream.name, "requests": len(stream.requests),
        "notes": [*stream.notes, *notes], "device": places, "model": str(targets[0].shape),
        "replicas": settings.replicas, "report_delay_s": settings.report_delay_s, "slo_tpot_s": slo_s,
        "results": {},
    }  # fmt: skip
    drawn = {}
    for (router, name), label in labels.items():
        members = [
            _member(
                with_times(configs[name][place % len(targets)], stream, target),
                stream,
                target,
                settings.each,
                _rank_costs(routers[router], target) if len(targets) > 1 else None,
            )
            for place in range(settings.replicas)
            for target in [targets[place % len(targets)]]
        ]
        with _journals(settings.journals, routers[router], members) as journal, solving() as solve:
            cluster = VirtualCluster(
                stream,
                members,
                routers[router] if settings.replicas > 1 else None,
                is_warm=settings.each.is_warm,
                report_delay_s=settings.report_delay_s,
                solve=solve,
                journal=journal,
            )
            cluster.run()
        result = {
            "config": noted(configs[name][0]),
            "router": {"policy": router, "settings": dict(routers[router].settings)},
            **summarize_cluster(cluster, slo_s),
        }
        _add_service(result, cluster, configs[name][0].queue)
        report["results"][label] = result
        drawn[label] = cluster
        print(_line(label, width, [_cell(form, result) for _, form in _COLUMNS]), flush=True)
    if settings.plot is not None:
        draw_routers(drawn, f"{stream.name}, {settings.replicas} replicas", settings.plot)
    if settings.each.out is not None:
        report["provenance"] = recording.provenance()
        try:
            settings.each.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {settings.each.out}: {error.strerror}") from error
    return 0


def _add_service(result: dict[str, Any], cluster: VirtualCluster, queue: QueueConfig) -> None:
    """How unequally clients were served, by all replicas together and by each."""
    result["service_difference"] = difference_of(cluster.front.outcomes, queue)
    for place, replica in enumerate(result["replicas"]):
        replica["service_difference"] = difference_of(cluster.front.served.get(place, ()), queue)


# ---------------------------------------------------------------- what the settings say


def _targets(settings: SimulateSettings) -> list[SimulatedTarget]:
    """Of each profile or hardware that is named."""
    names = [name.strip() for name in (settings.profile or settings.hardware or "").split(",")]
    found = {}
    for name in dict.fromkeys(names):
        if settings.profile is not None:
            found[name] = target_of(dataclasses.replace(settings, profile=name))
        else:
            found[name] = target_of(dataclasses.replace(settings, hardware=name))
    profiles = [target.profile for target in found.values() if target.profile is not None]
    for profile in profiles:
        profile.expect(model=profiles[0].model)
    return [found[name] for name in names]


def _names(text: str) -> list[str]:
    names = list(ALL_ROUTERS) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if is_import_name(name):
            find_router(name)
        elif name not in ALL_ROUTERS:
            hint = suggestion(name, ALL_ROUTERS) or f": use {', '.join(ALL_ROUTERS)} or all"
            raise ConfigError(f"router {name!r} is not known{hint}")
    return list(dict.fromkeys(names))


def _routers(
    settings: ClusterSettings, targets: Sequence[SimulatedTarget], slo_s: float | None
) -> dict[str, RouterConfig]:
    names = _names(settings.routers)
    given: dict[str, list[tuple[str, str]]] = {name: [] for name in names}
    for text in settings.router_set:
        router, key, value = split_setting(text)
        if router not in given:
            raise ConfigError(f"--router-set {text}: {router!r} is not among --router {', '.join(names)}")
        given[router].append((key, value))
    found = {}
    for name, pairs in given.items():
        if find_router(name).parameters is CaraServeParameters:
            each = [caraserve_settings(name, pairs, target.profile, slo_s) for target in targets]
            pairs = [*pairs, *each[0]]
        read_parameters(name, find_router(name).parameters, pairs)
        found[name] = RouterConfig(name, tuple(pairs))
    return found


def _rank_costs(router: RouterConfig, target: SimulatedTarget) -> RankCosts | None:
    """A device's coefficients, where the router goes by any."""
    if find_router(router.policy).parameters is not CaraServeParameters:
        return None
    return rank_costs(router.policy, router.settings, target.profile)


def _notes(
    settings: ClusterSettings,
    configs: dict[str, list[PolicyConfig]],
    targets: Sequence[SimulatedTarget],
    routers: dict[str, RouterConfig],
) -> list[str]:
    found = dict.fromkeys(
        note
        for place, target in enumerate(targets)
        for note in notes_of({name: each[place] for name, each in configs.items()}, target)
    )
    notes = list(found)
    if settings.replicas == 1:
        notes.append("one replica has no router: all of them give the same")
    if "dlora" in routers and not solver_is_there():
        notes.append("highspy is not installed: a greedy plan stands for dlora's programme")
    return notes


def _member(
    config: PolicyConfig,
    stream: Stream,
    target: SimulatedTarget,
    settings: SimulateSettings,
    costs_by_rank: RankCosts | None,
) -> Member:
    pages = [target.adapter_pages(rank, config.page_tokens) for rank in stream.ranks]
    merging = target.merge_costs(config)
    return Member(
        config, target.costs, pages, target.name, merging=merging, copy_limit=settings.copy_limit,
        cold=target.cold_costs(config), rank_costs=costs_by_rank,
    )  # fmt: skip


def _make(folder: Path) -> None:
    """A folder for journals. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write journals to {folder}: {error.strerror}") from error


@contextlib.contextmanager
def _journals(
    folder: Path | None, router: RouterConfig, members: Sequence[Member]
) -> Iterator[Journal | None]:
    """Writes ``router`` and ``replica-0``, ``replica-1``, ... into the folder; None without one."""
    if folder is None:
        yield None
        return
    try:
        writers: dict[int | None, JournalWriter] = {}
        if len(members) > 1:
            writers[None] = JournalWriter(folder / "router", router)
        for place, member in enumerate(members):
            writers[place] = JournalWriter(folder / f"replica-{place}", member.config)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write journals to {folder}: {error}") from error

    def record(machine: int | None, now: float, event: object, commands: Sequence[object]) -> None:
        writers[machine].record(event, now)
        writers[machine].answered(commands)

    try:
        yield record
    finally:
        for writer in writers.values():
            writer.close()


def _line(name: str, width: int, cells: Sequence[str]) -> str:
    widths = (max(_LEAST_WIDTH, len(heading)) for heading, _ in _COLUMNS)
    return f"{name:<{width}}" + "".join(f"  {cell:>{wide}}" for cell, wide in zip(cells, widths))


def _cell(form: str, result: dict[str, Any]) -> str:
    try:
        return form.format_map(result)
    except TypeError:  # without an objective
        return "-"
