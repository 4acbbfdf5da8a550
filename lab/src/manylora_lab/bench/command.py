"""``manylora bench``: its parsers, and what they run on use."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from manylora.flags import ALL_FLAGS, add_flag, settings_of
from manylora_lab.bench import clairvoyant_command, simulate_command
from manylora_lab.bench.kernels.command import add_parser as add_kernels_parser
from manylora_lab.bench.options import Option, add_options, add_workload, stream_of

_SERVE_EXAMPLES = """\
examples:
  manylora bench serve --workload chatbot --rate 2 --adapters 20 --duration 300 --url http://localhost:8000
      a running server, manylora's or another with OpenAI's API, whose adapters are adapter-0, adapter-1, ...
  manylora bench serve --workload 'synthetic:popularity=zipf(1)' --rate 8 --duration 60 --url localhost:8000 \\
       --goodput ttft:500 tpot:50 --out result.json --plot result.png
  manylora bench serve --trace-file chat_5rps.jsonl.gz --model ./llama --load-format dummy \\
       --adapter-dir ./adapters --device-pool 12GB --warm-adapters
      an engine in this process; takes the engine's settings of manylora serve

workloads: manylora workload list; what one is like: manylora workload describe
"""

_OFFLINE_EXAMPLES = """\
examples:
  manylora bench offline --workload 'synthetic:prompt=512,output=128' --rate 10 --duration 30 --all-at-once \\
       --model ./llama --load-format dummy --adapter-dir ./adapters
      300 requests, handed over at once
"""

_CALLS: tuple[Option, ...] = (
    ("--vocab-size", int, "N", "draw tokens that the workload does not name below N (default: 1000)"),
    (
        "--adapter-name",
        str,
        "NAMES",
        "of the workload's adapter {} (default: adapter-{}), or all: german,french",
    ),
)
_REPORT: tuple[Option, ...] = (
    ("--out", Path, "FILE", "write the report and every request's times as JSON"),
    ("--plot", Path, "FILE", "draw times to the first token, between tokens, and requests over time"),
)
# --seed is the workload's here: requests are greedy.
_ENGINE = [flag for flag in ALL_FLAGS if not flag.is_http and flag.name != "seed"]
_CLIENT: tuple[Option, ...] = (
    ("--url", str, "URL", "a running OpenAI-compatible server"),
    ("--api-key", str, "KEY", "for the server"),
    ("--client-processes", int, "N", "that send requests to it (default: by rate); 0: none but this"),
)


def add_parser(commands: Any) -> None:
    """Adds ``manylora bench`` to the command line's subparsers."""
    bench = commands.add_parser("bench", help="measure a server or an engine")
    kinds = bench.add_subparsers(required=True, metavar="KIND")
    serve = kinds.add_parser(
        "serve",
        help="replay a workload and report times to the first token, between tokens, and what was reused",
        description="Replay a workload, greedily and with exact lengths, and report. Exits 1 where a request "
        "failed or the server was lost; what was measured until then is kept.",
        epilog=_SERVE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    server = serve.add_argument_group("a running server")
    add_options(server, _CLIENT)
    server.add_argument(
        "--prompts", choices=("tokens", "text", "chat"), default="tokens",
        help="text: words, for servers that take no token ids; chat: words, as messages to /v1/chat/completions "
        "(default: tokens)",
    )  # fmt: skip
    _add_common(serve)
    serve.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="count requests within ttft:500 tpot:50 e2el:5000, say",
    )
    serve.set_defaults(run=_serve)
    offline = kinds.add_parser(
        "offline",
        help="throughput of an engine in this process",
        description="Hand a workload's requests to an engine in this process, all at once unless --rate is "
        "given, and report the throughput until the last has ended. A turn waits for the reply before it.",
        epilog=_OFFLINE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_common(offline)
    offline.add_argument(
        "--all-at-once", action="store_true", help="all at once although --rate, with which they were drawn"
    )
    offline.set_defaults(run=_offline)
    simulate_command.add_parser(kinds)
    clairvoyant_command.add_parser(kinds)
    add_kernels_parser(kinds)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_options(add_workload(parser), _CALLS)
    add_options(parser, _REPORT)
    parser.add_argument("--warm-adapters", action="store_true", help="request every adapter once before")
    parser.add_argument(
        "--skip-too-long", action="store_true", help="leave out turns that are longer than what is served"
    )
    parser.add_argument("--progress", action="store_true", help="a line on stderr every two seconds")
    engine = parser.add_argument_group("an engine in this process, with the settings of manylora serve")
    engine.add_argument("--model", metavar="MODEL", help="a local folder, or a hub id")
    for flag in _ENGINE:
        add_flag(engine, flag)


def _serve(args: argparse.Namespace) -> int:
    from manylora_lab.bench.serve import check, run
    from manylora_lab.bench.summary import Objective

    settings = dataclasses.replace(
        _settings(args),
        url=args.url,
        api_key=args.api_key,
        client_processes=args.client_processes,
        objective=None if args.goodput is None else Objective.parse(args.goodput),
    )
    check(settings)
    return run(settings, stream_of(args))


def _offline(args: argparse.Namespace) -> int:
    from manylora_lab.bench.serve import check, run
    from manylora_lab.workloads.stream import StreamRequest

    settings = dataclasses.replace(_settings(args), is_offline=True)
    check(settings)
    stream = stream_of(args)
    if args.rate is None or args.all_at_once:

        def at_once(request: StreamRequest) -> StreamRequest:
            return dataclasses.replace(request, arrival_s=0.0)

        stream = dataclasses.replace(stream, requests=tuple(map(at_once, stream.requests)))
    return run(settings, stream)


_NOTED = (
    "workload", "format", "rate", "adapters", "duration", "popularity", "ranks", "skip_bad_lines", "rate_scale",
    "length_scale", "limit", "all_at_once", "client_processes",
)  # fmt: skip
"""What the report says of the workload and how it was sent, where it was asked for."""


def _settings(args: argparse.Namespace) -> Any:
    """All but what ``bench serve`` alone knows."""
    from manylora_lab.bench.replay import ReplaySettings, show_on_stderr
    from manylora_lab.bench.serve import BenchSettings

    names = ("model", *(flag.name for flag in _ENGINE))
    notes = {name: getattr(args, name, None) for name in _NOTED}
    notes = {name: value for name, value in notes.items() if value is not None and value is not False}
    if args.trace_file is not None:
        notes["trace_file"] = Path(args.trace_file).name
    return BenchSettings(
        replay=ReplaySettings(
            seed=args.seed or 0,
            vocab_size=1000 if args.vocab_size is None else args.vocab_size,
            adapter_name=args.adapter_name or "adapter-{}",
            kind=getattr(args, "prompts", "tokens"),
            show=show_on_stderr if args.progress else None,
        ),
        engine=settings_of(args, names),
        is_warm=args.warm_adapters,
        skip_too_long=args.skip_too_long,
        notes=notes,
        out=args.out,
        plot=args.plot,
    )
