"""``manylora bench simulate``: its parser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from manylora.aliases import add_removed
from manylora.config.declaring import ConfigError, parse_size
from manylora.flags import FLAGS, add_settings, convert, settings_of
from manylora_lab.bench.options import (
    Option,
    add_options,
    add_workload,
    stream_of,
)
from manylora_lab.sim.hardware import HARDWARE

_EXAMPLES = """\
examples:
  manylora bench simulate --workload chatbot --rate 4 --adapters 50 --duration 600 \\
       --profile h200-llama-2-7b --device-pool 40GB --policies manylora,fastlibra,lru
      ten minutes of chat on an H200, under three cache policies
  manylora profile --model ./llama --out here.json
  manylora bench simulate --workload 'synthetic:popularity=zipf(1)' --rate 20 --duration 300 \\
       --profile here.json --model ./llama --device-pool 12GB --policies all --out simulated.json
      your own machine and model
  manylora bench simulate --workload chatbot --rate 12 --adapters 200 --duration 300 --profile h200-llama-2-7b \\
       --device-pool 40GB --replicas 4 --router manylora,cache-aware,round-robin --slo-tpot 1.5x
      four of them behind a router
  manylora bench simulate --trace-file chat_5rps.jsonl.gz --hardware a10 --shape llama-2-7b
      hardware that is not at hand, by its data sheet

--limits: of KV and adapters what was not computed or read again, and the most that any policy could have kept.
cached, in the last line: the same requests with unlimited memory and all resident; a reference, not a bound.
"""

FLAG_NAMES = (
    "max_model_len", "max_num_seqs", "max_batch_tokens", "page_tokens", "device_pool", "host_pool",
    "cache_set", "admission", "slo_ttft", "pipeline_depth",
    "scheduling_policy", "priority_floor", "priority_age", "fairness", "fair_by", "fair_weights", "fair_share",
    "adapter_batch_limit", "merge_copy", "merge_minority",
    "merge_starve", "merge_alpha", "merge_beta", "merge_dec", "merge_mul", "merge_window",
    "max_prefills_per_step", "kept_share",
    "cold_start", "cold_start_stall", "cpu_lora_workers",
)  # fmt: skip
"""Settings of the engine that a simulation knows."""

_REMOVED = ("adapter_store", "adapter_store_size", "cache_adapter_share", "cache_tau", "cache_window")

_CARDS = ("tensor_parallel_size", "lora_sharding")
"""Those of them that say what is simulated, not how it is served."""

_COSTS: tuple[Option, ...] = (
    ("--profile", str, "NAME", "measured: a shipped profile, or a file that manylora profile wrote"),
    ("--model", str, "MODEL", "a local folder: refuse a profile of another model"),
    ("--device", str, "NAME", "cpu or cuda, of this machine: refuse a profile of another"),
    ("--hardware", str, "NAME", "assumed, instead: " + ", ".join(HARDWARE)),
    ("--shape", str, "NAME", "with --hardware: of the model, such as llama-2-7b (the default)"),
    (
        "--interconnect",
        str,
        "NAME",
        "with --hardware and several ranks: a profile whose ranks' exchanges it has",
    ),
    ("--cards", int, "N", "1, 2, 4 or 8 of them, ideally shared out (default: 1)"),
)


_CLUSTER: tuple[Option, ...] = (
    ("--replicas", int, "N", "so many of them; several profiles, or hardwares, with commas between go round"),
    (
        "--router",
        str,
        "NAMES",
        "routing policies to compare, such as manylora,punica, or all (default: manylora)",
    ),
    ("--router-help", str, "NAME", "name a routing policy's parameters, and end"),
    ("--slo-tpot", str, "TIME", "the objective between tokens: seconds, or 1.5x of a merged step"),
    ("--report-delay", float, "SECONDS", "how old a replica's report is on arrival (default: 0.05)"),
)


def add_parser(kinds: Any) -> None:
    """Adds ``simulate`` to the subparsers of ``manylora bench``."""
    parser = kinds.add_parser(
        "simulate",
        help="replay a workload through the engine's policy in virtual time, far faster than it would take",
        description="Replay a workload through the engine's own policy in virtual time, on a device that takes "
        "what a profile or a data sheet says, and report times to the first token, between tokens, and what was "
        "reused.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_workload(parser)
    add_options(parser.add_argument_group("the device"), _COSTS)
    parser.add_argument(
        "--policies", default="manylora", metavar="NAMES",
        help="cache policies, such as manylora,lru, or all (default: manylora); belady knows the workload, "
        "belady-seen that of adapters asked for before",
    )  # fmt: skip
    parser.add_argument(
        "--merge", default="unmerged", metavar="MODES",
        help="when adapters are merged, such as unmerged,dlora,manylora to compare (default: unmerged); settings "
        "of one mode are left out of the others",
    )  # fmt: skip
    parser.add_argument(
        "--cold", action="store_true", help="adapters were never asked for before (default: once each)"
    )
    add_removed(parser, _REMOVED)
    parser.add_argument(
        "--copy-limit", metavar="SIZE",
        help="most bytes a second that copies move in either direction, such as 8GB (default: as the device says)",
    )  # fmt: skip
    parser.add_argument(
        "--limits",
        action="store_true",
        help="the most that any policy could have kept beside each (some 10 %% slower)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    cluster = parser.add_argument_group("replicas and a router (docs/routing.md)")
    add_options(cluster, _CLUSTER)
    cluster.add_argument(
        "--router-set",
        action="append",
        metavar="ROUTER.KEY=VALUE",
        help="a parameter of one; may be repeated",
    )
    cluster.add_argument("--journals", type=Path, metavar="DIR", help="write the router's and each replica's")
    cluster.add_argument("--plot", type=Path, metavar="FILE", help="a picture of the routers")
    engine = parser.add_argument_group("settings of the engine, as for manylora serve on such a device")
    add_settings(engine, (*FLAG_NAMES, *_CARDS))
    parser.set_defaults(run=_simulate)


def _simulate(args: argparse.Namespace) -> int:
    from manylora.router.policies.policy import router_help
    from manylora_lab.bench.simulate import SimulateSettings, run
    from manylora_lab.bench.simulate_cluster import ClusterSettings, run_cluster
    from manylora_lab.sim.cluster import REPORT_DELAY_S

    if args.router_help is not None:
        print(router_help(args.router_help))
        return 0
    given = settings_of(args, (*FLAG_NAMES, *_CARDS, *_REMOVED))
    cards = {
        flag.name: convert(flag, given.pop(flag.name)) for flag in FLAGS if flag.name in given.keys() & _CARDS
    }
    settings = SimulateSettings(
        profile=args.profile,
        model=args.model,
        device=args.device,
        hardware=args.hardware,
        shape=args.shape,
        cards=1 if args.cards is None else args.cards,
        **cards,
        interconnect=args.interconnect,
        policies=args.policies,
        merge=args.merge,
        copy_limit=None if args.copy_limit is None else _rate(args.copy_limit),
        is_warm=not args.cold,
        with_limits=args.limits,
        engine=given,
        out=args.out,
    )
    if args.replicas is None:
        for name in ("router", "router_set", "slo_tpot", "report_delay", "journals", "plot"):
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} needs --replicas")
        return run(settings, lambda: stream_of(args))
    delay_s = REPORT_DELAY_S if args.report_delay is None else args.report_delay
    cluster = ClusterSettings(
        settings,
        args.replicas,
        routers="manylora" if args.router is None else args.router,
        router_set=args.router_set or (),
        slo_tpot=args.slo_tpot,
        report_delay_s=delay_s,
        journals=args.journals,
        plot=args.plot,
    )
    return run_cluster(cluster, lambda: stream_of(args))


def _rate(text: str) -> int:
    """Raises ConfigError."""
    try:
        rate = parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"--copy-limit: {error}") from None
    if rate < 1:
        raise ConfigError("--copy-limit must be at least 1")
    return rate
