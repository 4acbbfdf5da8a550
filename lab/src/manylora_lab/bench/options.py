"""Options that commands share: which requests are made, and the stream that these name."""

from __future__ import annotations

import argparse
from typing import Any

from manylora.config.declaring import ConfigError

Option = tuple[str, type, str, str]
"""Its name, type, what stands for its value, and its help."""

_WORKLOAD: tuple[Option, ...] = (
    ("--workload", str, "NAME", "a name from manylora workload list, synthetic:..., or a file of --format"),
    ("--trace-file", str, "FILE", "instead: a chat trace, JSON lines of turns, perhaps gzipped"),
    ("--format", str, "FORMAT", "of the file"),
    ("--rate", float, "X", "requests a second, in the mean"),
    ("--adapters", int, "N", "how many the workload's requests fall to"),
    ("--duration", float, "SECONDS", "only so long"),
    ("--popularity", str, "TERM", "how requests fall to adapters, such as zipf(1)"),
    ("--ranks", str, "TERM", "of the adapters, for the report, such as random(32,64)"),
    ("--rate-scale", float, "X", "replay X times as fast (default: 1)"),
    ("--length-scale", float, "X", "prompts and replies X times as long (default: 1)"),
    ("--limit", int, "N", "only the first N requests"),
    ("--seed", int, "N", "of whatever is drawn, tokens too (default: 0)"),
)


def add_options(parser: argparse._ActionsContainer, options: tuple[Option, ...]) -> None:
    """Adds options without defaults."""
    for option, kind, metavar, help_text in options:
        parser.add_argument(option, type=kind, metavar=metavar, help=help_text)


def add_workload(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds what ``stream_of`` reads; returns the group."""
    workload = parser.add_argument_group("the workload")
    add_options(workload, _WORKLOAD)
    workload.add_argument(
        "--skip-bad-lines",
        action="store_true",
        help="leave out malformed lines of the file, and say how many",
    )
    return workload


def stream_of(args: argparse.Namespace) -> Any:
    """The stream, a ``workloads.stream.Stream``. Raises ConfigError."""
    from manylora_lab.workloads.named import named

    if (args.workload is None) == (args.trace_file is None):
        raise ConfigError("name either --workload, such as chatbot, or --trace-file")
    stream = named(
        args.workload or args.trace_file,
        rate=args.rate,
        num_adapters=args.adapters,
        duration_s=args.duration,
        seed=args.seed or 0,
        popularity=args.popularity,
        ranks=args.ranks,
        file_format=args.format or (None if args.trace_file is None else "chat"),
        skip_bad_lines=args.skip_bad_lines,
    )
    if args.rate_scale is not None:
        stream = stream.with_rate(args.rate_scale)
    if args.length_scale is not None:
        stream = stream.with_lengths(args.length_scale)
    return stream if args.limit is None else stream.first(args.limit)
