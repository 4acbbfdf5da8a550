"""``manylora workload``: what workloads there are, and what one is like. Its parsers, and what they run on use."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from manylora.config.declaring import ConfigError

_EXAMPLES = """\
examples:
  manylora workload describe chatbot --rate 2 --adapters 100 --duration 1800 --plot chatbot.png
  manylora workload describe 'synthetic:arrivals=gamma(4),popularity=zipf(1),prompt=uniform(8,512),output=128'
  manylora workload describe trace.csv --format azure-llm --adapters 50 --popularity 'zipf(1)'

arrivals:    poisson, gamma(cv), even, at-once, ramp
popularity:  zipf(s), geometric(ratio), power(a), gaussian(sigma), uniform, round-robin, identical
lengths:     128, uniform(least,most), lognormal(mean,cv)
ranks:       16, random(32,64), cycle(64,32,16,8)
"""


def add_parser(commands: Any) -> None:
    """Adds ``workload list`` and ``workload describe`` to the command line's subparsers."""
    workload = commands.add_parser("workload", help="list workloads, or say what one is like")
    actions = workload.add_subparsers(required=True, metavar="ACTION")
    about = "names of workloads, and formats of files"
    listing = actions.add_parser("list", help=about, description=about.capitalize() + ".")
    listing.set_defaults(run=_list)
    describe = actions.add_parser(
        "describe",
        help="statistics of a workload, and a plot",
        description="Statistics of a workload: arrivals, lengths, reuse, popularity.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    describe.add_argument("name", metavar="NAME", help="a name from manylora workload list, or a file's path")
    for option, kind, metavar, help_text in (
        ("--rate", float, "X", "requests a second, in the mean"),
        ("--adapters", int, "N", "adapters that are served"),
        ("--duration", float, "SECONDS", "only so long"),
        ("--seed", int, "N", "of everything that is drawn (default: 0)"),
        ("--popularity", str, "TERM", "how requests fall to adapters, such as zipf(1)"),
        ("--ranks", str, "TERM", "the adapters' ranks, such as random(32,64)"),
        ("--format", str, "FORMAT", "of the file at NAME"),
        ("--plot", Path, "FILE", "draw a picture (.png, .svg, .pdf)"),
        ("--json", Path, "FILE", "write the statistics as JSON"),
    ):
        default = 0 if option == "--seed" else None
        describe.add_argument(option, type=kind, metavar=metavar, help=help_text, default=default)
    describe.add_argument(
        "--skip-bad-lines",
        action="store_true",
        help="leave out malformed lines of the file, and say how many",
    )
    describe.set_defaults(run=_describe)


def _list(args: argparse.Namespace) -> int:
    from manylora_lab.workloads.formats import FORMATS
    from manylora_lab.workloads.named import catalogue

    print("names:")
    for name, about in catalogue().items():
        print(f"  {name:<22}{about}")
    print("formats of files, for --format:")
    for name, file_format in FORMATS.items():
        print(f"  {name:<22}{file_format.about}")
    return 0


def _describe(args: argparse.Namespace) -> int:
    from manylora_lab.workloads.describe import describe, text
    from manylora_lab.workloads.named import named

    stream = named(
        args.name,
        rate=args.rate,
        num_adapters=args.adapters,
        duration_s=args.duration,
        seed=args.seed,
        popularity=args.popularity,
        ranks=args.ranks,
        file_format=args.format,
        skip_bad_lines=args.skip_bad_lines,
    )
    found = describe(stream)
    if args.json is not None:
        try:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {args.json}: {error.strerror}") from error
    if args.plot is not None:
        from manylora_lab.workloads.picture import draw

        draw(stream, args.plot)
    print(text(found))
    return 0
