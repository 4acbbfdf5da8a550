"""Real clusters of the demo beside the simulator: the same streams, settings and routers, replicas bound to cores.

    python -m manylora_lab.benchmarks.cluster_reality --out FILE.json
    python -m manylora_lab.benchmarks.cluster_reality --parts pair --out FILE.json

First every core is profiled, all at the same time, as ``manylora profile --quick`` does. ``pair``: a replica on
each of two cores, simulated with its core's profile: mean time to the first token, tokens a second, and each
replica's share of them, asked to be within 15 %. ``caraserve-fig20``, ``dlora-fig11``, ``punica-fig13``: the
papers' loads scaled down to the demo, under each of their routers: whether the simulator puts routers in the order
in which they really are. Rates are shares of what the profiled cores can do. Adapters are the demo's, replicas
begin without any; nothing is merged.

The front end, the router and the clients have no core of their own, and what they take is not simulated.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from manylora.pricing.caraserve import caraserve_settings, merged_step_s
from manylora.pricing.costs import StepWork
from manylora.pricing.fit import FittedCosts, fit_profile
from manylora.pricing.profile import Profile, save_profile
from manylora.solving.process import solving
from manylora_lab.benchmarks.cluster_rig import (
    ADAPTERS,
    Facts,
    Row,
    ServedStream,
    cores,
    facts_of,
    numbers,
    profiles,
    serve,
)
from manylora_lab.benchmarks.run_report import RunReport, run_parser
from manylora_lab.reproduce import caraserve_cells, dlora_cells, punica_fig13
from manylora_lab.sim.cluster import Member, VirtualCluster
from manylora_lab.sim.cluster_summary import summarize_cluster
from manylora_lab.sim.shipped import find_profile
from manylora_lab.workloads.arrivals import poisson
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest
from manylora_lab.workloads.synthetic import independent

_KERNEL = ("kernel", "mbgmv")
COMPARED = ("ttft_mean_ms", "output_tokens_per_s")
ASKED = 0.15
CLOSE = 0.05
"""Routers that differ by less in the simulation have no order there."""
SLO_TIMES = 1.5
LENGTHS = 1 / 8
"""Of what the papers' requests have, for contexts of 1,024 tokens."""
_ROWS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class LoadPart:
    """``load``: the share of the peak. ``stream``: made from a rate, a duration and a seed. ``metric``: by which
    routers are ordered; less is better."""

    routers: tuple[str, ...]
    replicas: int
    load: float
    stream: Callable[[float, float, int], Stream]
    metric: str
    args: tuple[str, ...] = ()


# ---------------------------------------------------------------- streams


def _on_demo(stream: Stream) -> Stream:
    """With the demo's adapters in place of the stream's; their ranks are the cluster's to say."""
    requests = (
        dataclasses.replace(each, adapter=None if each.adapter is None else each.adapter % len(ADAPTERS))
        for each in stream.requests
    )
    return dataclasses.replace(stream, requests=tuple(requests), ranks=(1,) * len(ADAPTERS))


def _plain(rate: float, duration_s: float, seed: int) -> Stream:
    """Poisson arrivals over all adapters alike."""
    source = random.Random(f"{seed} requests")
    lengths = independent("lognormal(40,0.5)", "lognormal(40,0.5)")
    requests = []
    for number, moment in enumerate(poisson(rate, duration_s, random.Random(f"{seed} times"))):
        prompt, output = lengths(source)
        adapter = source.randrange(len(ADAPTERS))
        requests.append(StreamRequest(moment, adapter, number, 0, (Piece(number, prompt),), output))
    return _on_demo(Stream("plain", tuple(requests), (1,) * len(ADAPTERS)))


def _caraserve(rate: float, duration_s: float, seed: int) -> Stream:
    case = caraserve_cells.ServersCase("mbgmv", "random", 2, len(ADAPTERS), rate, duration_s, seed)
    return _on_demo(caraserve_cells.stream_of(case))


def _dlora(rate: float, duration_s: float, seed: int) -> Stream:
    case = dlora_cells.DloraCase("rr", len(ADAPTERS), rate, duration_s, 2, seed, "maf2", length_scale=LENGTHS)
    return _on_demo(dlora_cells.stream_of(case))


def _punica(rate: float, duration_s: float, seed: int) -> Stream:
    """Rising to the rate, and falling."""
    replicas = 4
    theirs_s = duration_s * rate / (replicas * punica_fig13.REPLICA_RATE)
    case = punica_fig13.LoadCase("punica", replicas, theirs_s, seed)
    stream = punica_fig13.stream_of(case)
    return _on_demo(stream.with_rate(theirs_s / duration_s).with_lengths(LENGTHS))


PARTS = {
    "pair": LoadPart(("round-robin", "manylora"), 2, 0.3, _plain, "ttft_mean_ms"),
    "caraserve-fig20": LoadPart(
        ("caraserve", "most-idle", "first-fit", "random", "manylora"), 2, 0.5, _caraserve, "tpot_mean_ms"
    ),
    "dlora-fig11": LoadPart(
        ("dlora", "dlora-proactive", "dlora-rr", "manylora"), 2, 0.5, _dlora, "latency_ms_token"
    ),
    "punica-fig13": LoadPart(
        ("punica", "punica-consolidate", "most-idle", "manylora"), 4, 0.6, _punica, "replica_seconds",
        args=("--max-num-seqs", "8"),
    ),
}  # fmt: skip


# ---------------------------------------------------------------- simulated


def peak_per_s(costs: Sequence[FittedCosts], stream: Stream, rows: int) -> float:
    """Requests a second of the stream's mean lengths that cores with these costs can serve together."""
    prompt = statistics.fmean(request.new_tokens for request in stream.requests)
    output = statistics.fmean(request.output_tokens for request in stream.requests)
    peak = 0.0
    for each in costs:
        step_s = each.step_s(StepWork(rows, 0, int(rows * (prompt + output / 2)))) + each.overhead_s(rows, 0)
        prompt_s = each.step_s(StepWork(0, 512, 512)) / 512 * prompt
        peak += 1 / (prompt_s + output * step_s / rows)
    return peak


def router_settings(router: str, profile: Profile, slo_s: float) -> list[tuple[str, str]]:
    """What CaraServe's scheduler has in simulation; nothing for others. Raises ConfigError."""
    if router != "caraserve":
        return []
    return [_KERNEL, *caraserve_settings(router, [_KERNEL], profile, slo_s)]


def router_args(router: str, profile: Profile, slo_s: float, folder: Path) -> list[str]:
    """The same of a real one."""
    if router != "caraserve":
        return []
    path = folder / "profile.json"
    save_profile(profile, path)
    return [
        "--router-set",
        f"{router}.{'='.join(_KERNEL)}",
        "--slo-tpot",
        repr(slo_s),
        "--profile",
        str(path),
    ]


def simulate(
    stream: Stream, facts: Facts, router: str, settings: Sequence[tuple[str, str]], replicas: int,
    costs: Sequence[FittedCosts], slo_s: float,
) -> tuple[Row, list[tuple[float, tuple[int, ...]]]]:  # fmt: skip
    """The same numbers as of a real run, and working sets."""
    members = [
        Member(facts.policy, costs[place % len(costs)], facts.adapter_pages) for place in range(replicas)
    ]
    config = dataclasses.replace(facts.router, policy=router, settings=tuple(settings))
    with solving() as solve:
        stream = dataclasses.replace(stream, ranks=facts.ranks)
        cluster = VirtualCluster(stream, members, config, is_warm=False, solve=solve)
        cluster.run()
    found = summarize_cluster(cluster, slo_s)
    outcomes = cluster.front.outcomes
    tokens = sum(outcome.num_tokens for outcome in outcomes)
    by_replica = [
        sum(outcome.num_tokens for outcome in cluster.front.served.get(place, ()))
        for place in range(replicas)
    ]
    names = ("ttft_mean_ms", "tpot_mean_ms", "output_tokens_per_s", "slo_attainment")
    row = {
        **{name: found[name] for name in names},
        "latency_ms_token": 1e3 * sum(each.end_s - each.handed_s for each in outcomes) / tokens,
        "shares": [each / tokens for each in by_replica],
    }
    return row, cluster.working_sets


def of_sets(sets: Sequence[tuple[float, tuple[int, ...]]], duration_s: float, most: int) -> Row:
    """Punica's: how long replicas had requests, and the share of that at 90 % of the largest batch or more."""
    sizes = [sizes for now, sizes in sets if now <= duration_s]
    busy = [size for each in sizes for size in each if size]
    return {
        "replica_seconds": len(busy) * duration_s / max(len(sizes), 1),
        "full_share": sum(size >= 0.9 * most for size in busy) / max(len(busy), 1),
    }


# ---------------------------------------------------------------- compared


def order(rows: Sequence[Row], metric: str) -> Row:
    """Routers by the metric, really and simulated; of pairs that the simulation tells apart the share that are
    really in the same order."""
    by = {row["router"]: (row["real"][metric], row["simulated"][metric]) for row in rows}
    pairs = [
        (one, other)
        for one, other in itertools.combinations(by, 2)
        if abs(by[one][1] - by[other][1]) > CLOSE * max(by[one][1], by[other][1])
    ]
    agreeing = sum((by[one][0] < by[other][0]) == (by[one][1] < by[other][1]) for one, other in pairs)
    return {
        "metric": metric,
        "real": sorted(by, key=lambda name: by[name][0]),
        "simulated": sorted(by, key=lambda name: by[name][1]),
        "pairs_told_apart": len(pairs),
        "agreeing": agreeing,
    }


def beside(real: Row, simulated: Row) -> Row:
    """By how much the simulation is off, as shares; of replicas' shares the largest difference."""
    off = {name: simulated[name] / real[name] - 1 for name in COMPARED}
    pairs = zip(simulated["shares"], real["shares"], strict=True)
    shares = [abs(one / other - 1) for one, other in pairs if other]
    return {**off, "share": max(shares), "is_within": max(*map(abs, off.values()), *shares) <= ASKED}


def rounded(row: Row) -> Row:
    """For the record."""
    return {
        name: [round(each, 4) for each in value] if isinstance(value, list) else
        round(value, 4) if isinstance(value, float) else value
        for name, value in row.items()
    }  # fmt: skip


def run_part(report: RunReport, name: str, found: Sequence[Profile], duration_s: float, seed: int) -> None:
    """Serve and simulate the part's stream under each router; a row as each is done."""
    part = PARTS[name]
    costs = [fit_profile(profile) for profile in found]
    slo_s = SLO_TIMES * merged_step_s(costs[0])
    facts = facts_of(part.replicas, part.args)
    most = facts.policy.max_num_seqs
    rate = part.load * peak_per_s(costs, part.stream(20.0, 100.0, seed), min(_ROWS, most))
    stream = part.stream(rate, duration_s, seed)
    report.say(f"{name}: {len(stream.requests)} requests at {rate:.2f}/s")
    rows = []
    for router in part.routers:
        settings = router_settings(router, found[0], slo_s)
        with tempfile.TemporaryDirectory() as folder:
            args = router_args(router, found[0], slo_s, Path(folder))
            served: ServedStream = serve(stream, part.replicas, ("--router", router, *args, *part.args))
        simulated, sets = simulate(stream, facts, router, settings, part.replicas, costs, slo_s)
        real = numbers(served, slo_s)
        real |= of_sets(served.working_sets, duration_s, most)
        simulated |= of_sets(sets, duration_s, most)
        row = {
            "router": router, "rate_per_s": round(rate, 3), "requests": len(stream.requests),
            "real": rounded(real), "simulated": rounded(simulated), "off": rounded(beside(real, simulated)),
        }  # fmt: skip
        rows.append(row)
        report.note(name, row)
    report.values.setdefault("orders", {})[name] = order(rows, part.metric)
    report.say(f"{name}: {report.values['orders'][name]}")
    report.save()


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = run_parser(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="names with commas between")
    parser.add_argument("--duration", type=float, default=40.0, metavar="S", help="of each stream")
    parser.add_argument(
        "--profile", help="a shipped profile or a file, for all cores, instead of measuring them"
    )
    parser.add_argument("--profile-budget", type=float, default=25.0, metavar="S")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    names = args.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    duration_s, budget_s = (4.0, 2.0) if args.toy else (args.duration, args.profile_budget)
    report = RunReport(args, args.seed, "cpu", cores=len(cores()), duration_s=duration_s)
    if args.profile is not None:
        found = [find_profile(args.profile)] * len(cores())
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = profiles(Path(folder), 64, budget_s)
        report.say("profiled")
    for name in names:
        run_part(report, name, found, duration_s, args.seed)
    report.save()


if __name__ == "__main__":
    main()
