"""One cell of an experiment in simulation: a scenario at a rate, a model on some cards, a cache policy.

Owns how pools are sized and what is measured of a run; which cells there are is each experiment's.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import signal
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.protocol.commands import Command
from manylora_lab.baselines import ALL_CACHE_POLICIES
from manylora_lab.pricing.costs import StepCosts
from manylora_lab.pricing.fit import FittedCosts, fit_profile
from manylora_lab.pricing.shapes import ALL_MODULES, ATTENTION_MODULES, ModelShape, shape_named
from manylora_lab.sim.ablation import ABLATIONS, ablation
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.belady import FORESIGHTS, ForeseenReplay
from manylora_lab.sim.hardware import HARDWARE
from manylora_lab.sim.limits import Recorder, reference, summarize_limits
from manylora_lab.sim.replay import Outcome, Replay
from manylora_lab.sim.shipped import find_profile
from manylora_lab.sim.summary import summarize, ttft_parts_ms
from manylora_lab.workloads.newcomers import renewed
from manylora_lab.workloads.scenarios import RANKS, scenario
from manylora_lab.workloads.stream import Stream

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
R = TypeVar("R")

GIB = 2**30
MEMORY_SHARE = 0.9
"""The share of a card's memory for one engine (vLLM's default); weights come off it, the rest is the pool."""
HOST_POOL_BYTES = 200 * GIB
"""Assumed, of the paper's 256 GB of main memory."""
RUNNING_AT_ONCE = 256
BATCH_TOKENS = 8192
STATIC_PAGE_TOKENS = 32
PAGE_TOKENS = 16
MEASURED = "h200-profile"
"""A name in the place of a hardware: an H200, with costs from the profiles of it that come with manylora."""
REFERENCE = "cached"
"""A name in the place of a policy: unlimited pages and all resident (``sim.limits.reference``); no bound."""
BELADY, BELADY_SEEN = FORESIGHTS
"""Likewise: ``manylora`` with the future in place of its estimates (``sim.belady``), of all adapters or of those
that were asked for; no bounds either. The names of ``sim.ablation.ABLATIONS`` are ``manylora`` taken apart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """``pool_like``: the hardware whose ratio of pool to weights limits the pool, where it is another.

    ``policy``: or ``REFERENCE``, one of ``FORESIGHTS``, an ablation. ``is_warm``: every adapter was asked for once
    before.
    ``sample_s``: how often the device's allocation is noted, in virtual seconds; 0: never. ``settle_s``: what
    comes before that moment is served, and counts nowhere. ``ranks``: instead of FastLibra's. ``is_whole``:
    adapters are on all seven projections. ``newcomers``: so many adapters take the place of others over time.
    """

    scenario: str
    policy: str
    rate: float
    num_adapters: int
    duration_s: float
    model: str = "llama-2-7b"
    cards: int = 1
    hardware: str = "fastlibra-npu"
    pool_like: str | None = None
    popularity: str | None = None
    arrivals: str | None = None
    adapter_share: float = 0.2
    seed: int = 0
    is_warm: bool = True
    sample_s: float = 0.0
    settle_s: float = 0.0
    ranks: str = RANKS
    is_whole: bool = False
    newcomers: int = 0

    @property
    def page_tokens(self) -> int:
        return STATIC_PAGE_TOKENS if self.policy == "static-lru" else PAGE_TOKENS


CellResult = dict[str, Any]
"""Numbers by name: ``sim.summary``'s, the parts of TTFT, the pool's use; ``samples`` where they were asked for."""


def device_pages(cell: Cell, shape: ModelShape) -> int:
    """The pool in pages. Raises ConfigError where weights leave no room."""
    described = "h200" if cell.hardware == MEASURED else cell.hardware
    room = min(
        AnalyticalCosts(shape, HARDWARE[hardware], cell.cards).pool_bytes(MEMORY_SHARE)
        for hardware in {described, cell.pool_like or described}
    )
    return room // shape.page_bytes(cell.page_tokens)


def run_cell(cell: Cell, most_ttft_ms: float | None = None, with_limits: bool = False) -> CellResult:
    """Simulate; equal cells give equal results. With ``most_ttft_ms`` a run whose mean TTFT cannot stay below is
    given up: then that mean is infinite, and all that there is.

    ``with_limits``: also what any policy could have kept, at most (``sim.limits.summarize_limits``).
    """
    if cell.policy == REFERENCE:
        unlimited = reference(*_inputs(cell))
        unlimited.outcomes = [each for each in unlimited.outcomes if each.handed_s >= cell.settle_s]
        return {**summarize(unlimited), **ttft_parts_ms(unlimited.outcomes)}
    record = Recorder(cell.page_tokens) if with_limits else None
    replay = cell_replay(cell, record.watch if record else None)
    usage = _Usage(replay)
    next_sample_s = next_look_s = cell.settle_s
    while replay.advance():
        if record and not replay.outcomes:
            record.begin()
        now_s = replay.since_start_s
        if now_s is None:
            continue
        if now_s < cell.settle_s:
            replay.counters_at_start = replay.report().counters
            continue
        if now_s >= next_sample_s:
            usage.note(now_s)
            next_sample_s = now_s + (cell.sample_s or 1.0)
        if most_ttft_ms is not None and now_s >= next_look_s:
            if _is_hopeless(replay, most_ttft_ms / 1e3, now_s):
                return {"ttft_mean_ms": float("inf")}
            next_look_s = now_s + max(5.0, cell.duration_s / 100)
    replay.run()  # raises where a request was forgotten
    replay.outcomes = [outcome for outcome in replay.outcomes if outcome.handed_s >= cell.settle_s]
    result: CellResult = {**summarize(replay), **ttft_parts_ms(replay.outcomes), **usage.summary()}
    if record:
        result.update(summarize_limits(record, cell_config(cell)))
    if cell.sample_s:
        result["samples"] = usage.samples
        result["ttft_over_time"] = _over_time(replay.outcomes, cell.sample_s)
    return result


def cell_replay(
    cell: Cell,
    watch: Callable[[float, Command], None] | None = None,
    config: PolicyConfig | None = None,
) -> Replay:
    """The cell, not yet run; with another config than its own, where one is given."""
    stream, own, costs, pages = _inputs(cell)
    return policy_replay(cell.policy, stream, config or own, costs, pages, cell.is_warm, watch)


def policy_replay(
    policy: str,
    stream: Stream,
    config: PolicyConfig,
    costs: StepCosts,
    adapter_pages: Sequence[int],
    is_warm: bool = True,
    watch: Callable[[float, Command], None] | None = None,
) -> Replay:
    """The stream under the config's policy, or one of ``FORESIGHTS`` and ``ABLATIONS`` in its place."""
    if policy in FORESIGHTS:
        of_unseen = FORESIGHTS[policy]
        return ForeseenReplay(stream, config, costs, adapter_pages, is_warm, watch, of_unseen=of_unseen)
    cache = ablation(policy) if policy in ABLATIONS else None
    return Replay(stream, config, costs, adapter_pages, is_warm, watch, cache=cache)


def _inputs(cell: Cell) -> tuple[Stream, PolicyConfig, StepCosts, list[int]]:
    """What ``Replay`` takes."""
    stream = cell_stream(cell)
    return stream, cell_config(cell), cell_costs(cell), cell_adapter_pages(cell, stream)


def cell_adapter_pages(cell: Cell, stream: Stream) -> list[int]:
    """What each adapter of the stream takes."""
    shape, modules = shape_named(cell.model), ALL_MODULES if cell.is_whole else ATTENTION_MODULES
    return [shape.adapter_pages(rank, cell.page_tokens, modules) for rank in stream.ranks]


def cell_costs(cell: Cell) -> StepCosts:
    """What things take on the cell's cards."""
    if cell.hardware == MEASURED:
        return measured_costs(cell.model).on_cards(cell.cards)
    return AnalyticalCosts(shape_named(cell.model), HARDWARE[cell.hardware], cell.cards)


@functools.cache
def measured_costs(model: str) -> FittedCosts:
    """By the profile of an H200 that ships."""
    profile = find_profile(f"h200-{model}")
    profile.expect(shape_named(model))
    return fit_profile(profile)


def cell_config(cell: Cell) -> PolicyConfig:
    """The policy's, with the cell's pools."""
    page_bytes = shape_named(cell.model).page_bytes(cell.page_tokens)
    # What no engine has a name for brings its own policy.
    policy = cell.policy if cell.policy in ALL_CACHE_POLICIES else "lru"
    cache = CacheConfig(policy, adapter_share=cell.adapter_share)
    return PolicyConfig(
        num_pages=device_pages(cell, shape_named(cell.model)),
        page_tokens=cell.page_tokens,
        max_model_len=4096,
        max_num_seqs=RUNNING_AT_ONCE,
        max_batch_tokens=BATCH_TOKENS,
        num_host_pages=HOST_POOL_BYTES // page_bytes,
        page_bytes=page_bytes,
        cache=cache,
        pipeline_depth=1,  # as in the papers' engines
    )


def cell_stream(cell: Cell) -> Stream:
    """What is asked for; the same under every policy."""
    asked = _stream(
        cell.scenario, cell.rate, cell.num_adapters, cell.duration_s, cell.seed,
        popularity=cell.popularity, arrivals=cell.arrivals, ranks=cell.ranks,
    )  # fmt: skip
    return renewed(asked, cell.newcomers) if cell.newcomers else asked


_stream = functools.lru_cache(maxsize=2)(scenario)
"""Cells that differ in policy alone often follow one another."""


def _is_hopeless(replay: Replay, limit_s: float, now_s: float) -> bool:
    """Whether the mean TTFT cannot stay below the limit, whatever comes: all have already waited too long."""
    waited = (o.ttft_s if o.num_tokens else now_s - o.handed_s for o in replay.outcomes)
    return sum(waited) > limit_s * len(replay.stream.requests)


class _Usage:
    """The device's pages by use, over time."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self.samples: list[dict[str, float]] = []

    def note(self, at_s: float) -> None:
        now = self._replay.report().gauges
        total = now.pages_total
        self.samples.append(
            {
                "at_s": round(at_s, 3),
                "running": now.pages_running / total,
                "history": now.pages_history / total,
                "adapters": now.pages_adapters / total,
                "invalid": now.invalid_pages / total,
                "waiting": now.num_waiting,
                "running_adapters": sum(1 for use in now.adapters if use.running and use.adapter),
            }
        )

    def summary(self) -> CellResult:
        samples = self.samples or [{"running": 0.0, "history": 0.0, "adapters": 0.0, "invalid": 0.0}]
        mean = {
            name: statistics.fmean(sample[name] for sample in samples)
            for name in ("running", "history", "adapters", "invalid")
        }
        in_use = mean["running"] + mean["history"] + mean["adapters"]
        return {
            **{f"pool_{name}": round(value, 4) for name, value in mean.items()},
            "pool_used": round(in_use, 4),
        }


def _over_time(outcomes: list[Outcome], window_s: float) -> list[tuple[float, float]]:
    """(window's start, mean TTFT in ms of what was asked for in it)."""
    windows: dict[int, list[float]] = {}
    for outcome in outcomes:
        windows.setdefault(int(outcome.handed_s // window_s), []).append(outcome.ttft_s)
    return [(number * window_s, 1e3 * statistics.fmean(windows[number])) for number in sorted(windows)]


def run_cells(cells: Iterable[Cell], workers: int, show: Callable[[str], None]) -> dict[Cell, CellResult]:
    """All of them, each once, in ``workers`` processes."""
    return in_parallel(run_cell, {cell: cell for cell in cells}, workers, show, "simulations done")


def in_parallel(
    call: Callable[[T], R],
    arguments: dict[K, T],
    workers: int,
    show: Callable[[str], None],
    what: str,
    keep: Callable[[K, R], None] = lambda key, result: None,
) -> dict[K, R]:
    """``call`` of each argument, by its key, in the arguments' order; in ``workers`` processes, if more than 1.

    ``keep`` is told of each result when it is there, here.
    """
    results: dict[K, R] = {}

    def note(key: K, result: R) -> None:
        results[key] = result
        keep(key, result)
        show(f"{len(results)} of {len(arguments)} {what}")

    if workers == 1 or len(arguments) == 1:
        for key, argument in arguments.items():
            note(key, call(argument))
        return results
    # Ctrl-C reaches every process: a worker that took it for an error of one argument would go on to the next.
    at_once = (signal.SIGINT, signal.SIG_DFL)
    with concurrent.futures.ProcessPoolExecutor(workers, initializer=signal.signal, initargs=at_once) as pool:
        running = {pool.submit(call, argument): key for key, argument in arguments.items()}
        try:
            for done in concurrent.futures.as_completed(running):
                note(running[done], done.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {key: results[key] for key in arguments}


def peak_rate(cell: Cell, limit_ms: float = 500.0, tolerance: float = 0.05, highest: float = 200.0) -> float:
    """The highest rate, within ``tolerance`` of itself, at which the mean TTFT stays below the limit (§6.1).

    Doubles from ``cell.rate`` and bisects; 0 where even a hundredth of that rate is too much.
    """

    def is_borne(rate: float) -> bool:
        result = run_cell(dataclasses.replace(cell, rate=rate, sample_s=0.0), limit_ms)
        return bool(result["ttft_mean_ms"] < limit_ms)

    low, high = 0.0, cell.rate
    while high <= highest and is_borne(high):
        low, high = high, 2 * high
    while high > cell.rate / 100 and high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (middle, high) if is_borne(middle) else (low, middle)
    return low
