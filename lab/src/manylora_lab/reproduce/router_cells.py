"""Clusters of our router's own figures: replicas that are A10 with Llama-2-7B of assumed costs, what they could do
at most, and what no router can better."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import random
import statistics
from collections.abc import Sequence

from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.config.routing import RouterConfig
from manylora.solving import solving
from manylora_lab.pricing.costs import StepWork, prefill_pairs
from manylora_lab.pricing.ranks import RankedStep, fit_rank_lines
from manylora_lab.pricing.shapes import shape_named
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.cluster import Member, VirtualCluster
from manylora_lab.sim.hardware import HARDWARE
from manylora_lab.sim.replay import Outcome
from manylora_lab.workloads.stream import Stream

REPLICAS, ADAPTERS = 8, 100
CLAIRVOYANT = "clairvoyant"
"""In the place of a router: ours, told of every reply's length."""
SLO_TIMES, SLO_CONTEXT = 1.5, 512
SHAPE = shape_named("llama-2-7b")
PAGE_TOKENS, MOST_SEQS = 16, 64
RANKS = (32, 64)
_CARD = HARDWARE["a10"]


def costs_of() -> AnalyticalCosts:
    return AnalyticalCosts(SHAPE, _CARD, launch_s=1e-3)


def config_of(costs: AnalyticalCosts) -> PolicyConfig:
    page_bytes = SHAPE.page_bytes(PAGE_TOKENS)
    return PolicyConfig(
        num_pages=costs.pool_bytes() // page_bytes,
        page_tokens=PAGE_TOKENS,
        max_model_len=4096,
        max_num_seqs=MOST_SEQS,
        max_batch_tokens=2048,
        num_host_pages=32 * 2**30 // page_bytes,
        page_bytes=page_bytes,
        cache=CacheConfig("manylora"),
    )


def slo_s() -> float:
    """The objective for the time between tokens."""
    return SLO_TIMES * costs_of().step_s(StepWork(1, 0, SLO_CONTEXT))


def fitted(stream: Stream, most_tokens: int = 4096) -> Stream:
    """Without the conversations that no replica can hold."""
    sizes: collections.Counter[int] = collections.Counter()
    for request in stream.requests:
        sizes[request.conversation] += request.new_tokens + request.output_tokens
    kept = [request for request in stream.requests if sizes[request.conversation] < most_tokens]
    return dataclasses.replace(stream, requests=tuple(kept))


def pooled_peak(stream: Stream) -> float:
    """Requests a second that all replicas together could serve at the stream's mean lengths: prompts by their
    arithmetic, tokens by steps of as many rows as fit."""
    costs, config = costs_of(), config_of(costs_of())
    prompt = statistics.fmean(request.new_tokens for request in stream.requests)
    output = statistics.fmean(request.output_tokens for request in stream.requests)
    said: collections.Counter[int] = collections.Counter()
    before = []
    for request in stream.requests:
        before.append(said[request.conversation])
        said[request.conversation] += request.new_tokens + request.output_tokens
    held = statistics.fmean(before) + prompt + output / 2
    rows = min(MOST_SEQS, int(config.num_pages * PAGE_TOKENS / held))
    step_s = costs.step_s(StepWork(rows, 0, int(rows * held)))
    prompt_s = costs.step_s(StepWork(0, 4096, 4096)) / 4096 * prompt
    return REPLICAS / (prompt_s + output * step_s / rows)


def lower_bound_s(outcomes: Sequence[Outcome]) -> float:
    """See the module's text."""
    costs = costs_of()
    counts = collections.Counter(piece.identity for outcome in outcomes for piece in outcome.request.prompt)
    token_s = 2 * SHAPE.layer_parameters / _CARD.sustained_flops
    alone, jobs = [], []
    for outcome in outcomes:
        own = sum(piece.num_tokens for piece in outcome.request.prompt if counts[piece.identity] == 1)
        own = max(own, 1)
        alone.append(costs.step_s(StepWork(0, own, own, 0, 0, prefill_pairs(0, own))))
        jobs.append((outcome.handed_s, own * token_s / REPLICAS))
    return max(statistics.fmean(alone), mean_flow_s(jobs))


def mean_flow_s(jobs: Sequence[tuple[float, float]]) -> float:
    """The least mean time from arrival to end on one machine: shortest remaining work first."""
    waiting: list[float] = []
    now, total, arrivals = 0.0, 0.0, sorted(jobs)
    for place, (arrival, work) in enumerate(arrivals):
        now = max(now, arrival)
        heapq.heappush(waiting, work)
        until = arrivals[place + 1][0] if place + 1 < len(arrivals) else float("inf")
        while waiting and now < until:
            spent = min(waiting[0], until - now)
            total += spent * len(waiting)
            now += spent
            left = waiting[0] - spent
            if left > 1e-15:
                heapq.heapreplace(waiting, left)
            else:
                heapq.heappop(waiting)
    return total / len(jobs)


def caraserve_settings() -> list[tuple[str, str]]:
    """Lines fitted to steps of the simulated replica; it reads each distinct adapter once, so mbgmv."""
    costs, source, decodes = costs_of(), random.Random(0), []
    for _ in range(400):
        ranks = source.choices(RANKS, k=source.randint(1, 48))
        num_bytes = sum(SHAPE.adapter_bytes(rank) for rank in ranks)
        work = StepWork(len(ranks), 0, 512 * len(ranks), num_bytes, len(ranks), 0, num_bytes)
        decodes.append(RankedStep(sum(ranks), len(ranks) * max(ranks), costs.step_s(work)))
    prefills = [(count, costs.step_s(StepWork(0, count, count))) for count in range(16, 2049, 16)]
    lines = fit_rank_lines(decodes, prefills)
    assert lines is not None
    values = {
        "decode_slope_s": lines.mbgmv.slope_s, "decode_base_s": lines.mbgmv.base_s,
        "prefill_slope_s": lines.prefill.slope_s, "prefill_base_s": lines.prefill.base_s, "slo_s": slo_s(),
    }  # fmt: skip
    return [("kernel", "mbgmv"), *((name, repr(value)) for name, value in values.items())]


def settings_of(router: str) -> tuple[tuple[str, str], ...]:
    """The parameters of a router in these figures."""
    if router == "caraserve":
        return tuple(caraserve_settings())
    return ()


def run_router(
    stream: Stream,
    router: str,
    delay_s: float,
    replicas: int = REPLICAS,
    more: Sequence[tuple[str, str]] = (),
) -> VirtualCluster:
    """The stream to its end behind a router, or ``CLAIRVOYANT``. ``more``: parameters."""
    costs = costs_of()
    pages = [SHAPE.adapter_pages(rank, PAGE_TOKENS) for rank in stream.ranks]
    member, knows_all = Member(config_of(costs), costs, pages), router == CLAIRVOYANT
    config = RouterConfig("manylora" if knows_all else router, (*settings_of(router), *more))
    with solving() as solve:
        cluster = VirtualCluster(
            stream, [member] * replicas, config, report_delay_s=delay_s, solve=solve, tells_lengths=knows_all
        )
        cluster.run()
    return cluster
