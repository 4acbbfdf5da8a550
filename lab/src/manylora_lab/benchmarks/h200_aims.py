"""The workloads that vLLM 0.26 was measured with on one H200, on manylora: Llama-2-7B shape, dummy weights.

One engine's worker serves them all, in process, bfloat16, token ids in and out, greedy, ``ignore_eos``, with the
tail. Parts: ``offline`` (1,000 requests at once, by number of sequences and popularity), ``prefill`` (8 prompts of
2,000), ``first`` (the first token of a prompt of 64: adapter in the pool, in host memory, not read), ``chat``
(the shipped traces, one pool of 12.6 GiB), ``many`` (Distinct over 1,000 adapters; needs a host pool of
80 GiB), ``mixed`` (64 requests over 64 adapters of ranks 8 to 64, beside the bytes of a step), ``churn`` (adapters
that come and go under a pool for a third of them), ``conformance`` (chat, recorded and replayed, one and two steps
in flight), ``http`` (chat through a server), ``start`` (a process, until it is ready). ``--rates 10,20*0.7``: the
10/s trace, and the 20/s one stretched to 14/s. From the repository's root:

    python -m manylora_lab.benchmarks.h200_aims --out aims.json --commit "$(git rev-parse --short HEAD)"
    python -m manylora_lab.benchmarks.h200_aims --parts chat --rates 20 --rehearse --host-pool 48GiB \\
        --policies manylora,lru,static-lru,fastlibra,s-lora --time-budget 560 --out cache.json

The second compares cache policies: a worker for each, all its host memory pinned before the first request.
vLLM's figures and the byte floors of the same workloads stand beside (another machine of the kind). ``--toy``
does it all at the demo model's size on a CPU. What does not fit into ``--time-budget`` seconds is left out and
named.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from manylora.config.declaring import ConfigError
from manylora_lab.baselines import ALL_CACHE_POLICIES
from manylora_lab.benchmarks.chat_runs import chat, conformance, http, loads_from
from manylora_lab.benchmarks.engine_rig import EngineRig
from manylora_lab.benchmarks.first_runs import churn, first
from manylora_lab.benchmarks.offline_runs import OFFLINE_RUNS, many, mixed, offline, prefill, start
from manylora_lab.benchmarks.run_report import RunReport, ceilings, run_parser

ON_WORKER: dict[str, Callable[[EngineRig, RunReport], Coroutine[Any, Any, None]]] = {
    part.__name__: part for part in (offline, prefill, first, chat, many, mixed, churn, conformance)
}
IN_PROCESSES: dict[str, Callable[[EngineRig, RunReport], None]] = {"http": http, "start": start}
"""Parts with processes of their own, which need the device's memory."""
POPULARITIES = tuple(dict.fromkeys(popularity or "none" for _, popularity in OFFLINE_RUNS))
SHOWN = ("prefill", "first", "many", "conformance", "start", "left_out")


def tell_compilations() -> None:
    """Print when a kernel has been compiled, or taken from the compile cache: a step waited for it."""
    import triton

    def tell(**told: Any) -> None:
        print(f"        compiled {told['fn'].name} at {time.monotonic():.1f} s", flush=True)

    triton.knobs.runtime.jit_post_compile_hook = tell


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = run_parser(__doc__, time_budget=500.0)
    parser.add_argument("--parts", default="prefill,first,offline,chat")
    parser.add_argument("--shape", default="llama-2-7b")
    parser.add_argument("--rates", default="2,10,20", help="of chat, requests a second")
    parser.add_argument("--at-once", default="32,128", help="of offline, the number of sequences")
    parser.add_argument("--popularities", default=",".join(POPULARITIES), help="of offline")
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="of offline, many, first, mixed, chat and http"
    )
    parser.add_argument(
        "--churn-s", type=float, default=60.0, metavar="S", help="how long adapters come and go"
    )
    parser.add_argument(
        "--policies", default="manylora", help="of the cache; the parts run with each of them"
    )
    parser.add_argument("--rehearse", action="store_true", help="before chat, other prompts, unmeasured")
    parser.add_argument("--host-pool", default="24GiB")
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE, a setting of the engine")
    args = parser.parse_args(argv)
    parts, policies = args.parts.split(","), args.policies.split(",")
    for flag, chosen, known in (
        ("--parts", parts, (*ON_WORKER, *IN_PROCESSES)), ("--policies", policies, ALL_CACHE_POLICIES),
        ("--at-once", args.at_once.split(","), list(dict.fromkeys(str(run[0]) for run in OFFLINE_RUNS))),
        ("--popularities", args.popularities.split(","), POPULARITIES),
    ):  # fmt: skip
        if unknown := set(chosen) - set(known):
            parser.error(f"{flag}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    try:
        loads_from(args.rates)
    except ConfigError as error:
        parser.error(str(error))
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    report = RunReport(args, "0 of the chat's tokens; the other requests are stored")
    report.repeats = args.repeats
    report.values["ceilings"] = ceilings("cpu" if args.toy else "cuda")
    if not args.toy:
        tell_compilations()
    sizes = {"host_pool": args.host_pool}
    more = dict(one.split("=", 1) for one in args.set)
    for policy in policies:  # a worker each: a policy may have pages of its own size
        with EngineRig.of(args.shape, args.toy, sizes, cache_policy=policy, **more) as rig:
            report.values |= {"build_s": rig.build_s, "policy": dataclasses.asdict(rig.policy)}
            if any(part in ON_WORKER for part in parts):
                report.values["pinned_after_s"] = round(rig.wait_pinned(), 2)
            for part in parts:
                if part in ON_WORKER:
                    asyncio.run(ON_WORKER[part](rig, report))
            rig.close()
            for part in parts:
                if part in IN_PROCESSES:
                    IN_PROCESSES[part](rig, report)
    report.save()
    print("AIMS " + json.dumps({name: report.values.get(name) for name in SHOWN}))


if __name__ == "__main__":
    main()
