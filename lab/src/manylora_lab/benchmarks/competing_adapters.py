"""Cache policies on one GPU where large adapters and KV compete: the order of FastLibra's paper, really served.

The regime of the first load of ``reproduce fastlibra-seeds``: chatbot over 500 adapters of rank 64, 128 or 256 on
all seven projections, Llama-2-7B's shape with dummy weights, a pool of the paper's card. The GPU is not the
paper's, so the rate is another, and the time is short: no adapter was asked for before, and first uses are read
from a store. Every policy has a worker of its own, every seed a new engine on it; requests that arrive in the
first ``--settle`` seconds are served and do not count. All policies get the same. From the repository's root:

    python -m manylora_lab.benchmarks.competing_adapters --time-budget 500 --out competing.json

``--toy`` does it at the demo's size on a CPU. What does not fit into ``--time-budget`` seconds is left out and
named.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manylora.config import CACHE_POLICIES
from manylora.warmup.random_adapters import write_random_adapters
from manylora_lab.bench.replay import ReplaySettings
from manylora_lab.bench.serve import MeasuredReplay, measure
from manylora_lab.benchmarks.engine_rig import POSITIONS, EngineRig
from manylora_lab.benchmarks.run_report import Row, RunReport, run_parser
from manylora_lab.workloads.scenarios import scenario
from manylora_lab.workloads.stream import Stream

POLICIES = ("fastlibra", "static-lru", "s-lora", "manylora", "lru-ahead")
RANKS, TOY_RANKS = (64, 128, 256), (4, 8, 16)
NUM_ADAPTERS, TOY_ADAPTERS = 500, 12
DEVICE_POOL, TOY_POOL = "45GiB", "20MiB"
"""Of the paper's card, 64 GiB, what 90 % leave beside the weights."""
COUNTERS = (
    "adapter_hits_device", "adapter_hits_host", "adapter_misses", "adapter_evictions", "history_evictions",
    "preemptions", "kv_hit_tokens_device", "kv_hit_tokens_host", "prefix_queries_tokens", "pages_swapped_in",
    "pages_swapped_out",
)  # fmt: skip


def stream_of(seed: int, rate: float, seconds: float, is_toy: bool) -> Stream:
    """What is asked for; the same under every policy."""
    ranks, count = (TOY_RANKS, TOY_ADAPTERS) if is_toy else (RANKS, NUM_ADAPTERS)
    drawn = f"random({','.join(map(str, ranks))})"
    return scenario("chatbot", rate, count, seconds, seed, ranks=drawn)


def counted(found: MeasuredReplay, settle_s: float) -> Row:
    """Of the requests that arrived later: times to the first token, and what the policy did meanwhile."""
    results = [result for result in found.results if result.arrival_s >= settle_s]
    ttfts = sorted(1e3 * result.ttft_s for result in results if result.error is None)
    return {
        "requests": len(results), "failed": len(results) - len(ttfts), "ttft_mean_ms": statistics.fmean(ttfts),
        "ttft_p50_ms": statistics.median(ttfts), "ttft_p99_ms": ttfts[int(0.99 * (len(ttfts) - 1))],
        "tpot_mean_ms": 1e3 * statistics.fmean(r.tpot_s for r in results if r.tpot_s is not None),
        "counters": {name: found.engine.get(name, 0) for name in COUNTERS},
    }  # fmt: skip


async def serve(rig: EngineRig, paths: dict[int, str], stream: Stream, seed: int) -> MeasuredReplay:
    """With a new engine. ``paths``: of adapters by rank."""
    target = rig.open({f"adapter-{number}": paths[rank] for number, rank in enumerate(stream.ranks)})
    try:
        return await measure(target, stream, ReplaySettings(seed, rig.info.vocab_size))
    finally:
        await target.close()


async def fill_store(rig: EngineRig, paths: dict[int, str]) -> None:
    """Ask for one of each rank, until the store has them."""
    target = rig.open({f"rank-{rank}": path for rank, path in paths.items()})
    for rank in paths:
        await target.generate(rig.call(8, 2, f"rank-{rank}"))
    for _ in range(100):
        if len(list(Path(rig.settings["adapter_store"]).glob("*.packed"))) == len(paths):
            break
        await asyncio.sleep(0.1)
    await target.close()


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = run_parser(__doc__, time_budget=550.0)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=CACHE_POLICIES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rate", type=float, default=5.0, help="turns a second")
    parser.add_argument("--seconds", type=float, default=16.0, help="of arrivals")
    parser.add_argument("--settle", type=float, default=4.0, metavar="S", help="of which these do not count")
    parser.add_argument("--host-pool", default="64GiB")
    args = parser.parse_args(argv)
    report = RunReport(args, "of the requests: in each run")
    report.values["settings"] = {
        "rate": args.rate, "seconds": args.seconds, "settle_s": args.settle, "host_pool": args.host_pool,
        "device_pool": TOY_POOL if args.toy else DEVICE_POOL, "ranks": TOY_RANKS if args.toy else RANKS,
        "adapters": TOY_ADAPTERS if args.toy else NUM_ADAPTERS,
    }  # fmt: skip
    sizes = {"device_pool": DEVICE_POOL, "host_pool": args.host_pool}
    toy: dict[str, Any] = {"device_pool": TOY_POOL, "max_model_len": POSITIONS} if args.toy else {}
    ranks, paths = TOY_RANKS if args.toy else RANKS, dict[int, str]()
    with tempfile.TemporaryDirectory() as files:
        for policy in args.policies:
            if not report.has(45.0, policy):
                continue
            store = Path(files) / policy
            store.mkdir(mode=0o700)
            with EngineRig.of(
                "llama-2-7b", args.toy, sizes, cache_policy=policy, adapter_store=str(store), **toy
            ) as rig:
                if not paths:
                    written = write_random_adapters(
                        Path(files) / "adapters", rig.config, rig.settings["dtype"], ranks, len(ranks)
                    )
                    paths = dict(zip(ranks, map(str, written), strict=True))
                asyncio.run(fill_store(rig, paths))
                rig.wait_pinned()  # for half a minute requests would run beside it, of the first seed alone
                for seed in args.seeds:
                    if not report.has(1.6 * args.seconds + 8.0, f"{policy}, seed {seed}"):
                        continue
                    found = asyncio.run(
                        serve(rig, paths, stream_of(seed, args.rate, args.seconds, args.toy), seed)
                    )
                    report.note("runs", {"policy": policy, "seed": seed, **counted(found, args.settle)})
    report.save()
    print(json.dumps({"runs": report.values.get("runs"), "left_out": report.values["left_out"]}))


if __name__ == "__main__":
    main()
