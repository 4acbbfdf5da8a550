"""``manylora reproduce``: its parser, and what it runs on use."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal

from manylora.config.declaring import ConfigError


def add_parser(commands: Any) -> None:
    """Adds ``manylora reproduce`` to the command line's subparsers."""
    reproduce = commands.add_parser(
        "reproduce",
        help="redraw a table or figure of the papers, in simulation or on this device",
        description="Redraw a table or figure of the papers that manylora unifies: NAME.json, with the paper's "
        "figures beside ours, and a picture.",
    )
    reproduce.add_argument("name", nargs="?", metavar="NAME", help="such as fastlibra-fig11; see --list")
    reproduce.add_argument("--list", action="store_true", help="name all experiments")
    scale = reproduce.add_mutually_exclusive_group()
    scale.add_argument("--smoke", action="store_true", help="seconds: only whether it works")
    scale.add_argument("--quick", action="store_true", help="under two minutes: fewer cases, shorter runs")
    reproduce.add_argument(
        "--device", choices=("sim", "cpu", "cuda"), help="where (default: the experiment's)"
    )
    reproduce.add_argument(
        "--out", metavar="DIR", default=".", help="write NAME.json and NAME.png here (default: this folder)"
    )
    reproduce.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")
    reproduce.add_argument("--workers", type=int, default=0, help="processes (default: one a core)")
    reproduce.add_argument(
        "--hardware", metavar="NAME", help="of a simulated table: npu or h200 (default: npu)"
    )
    reproduce.add_argument(
        "--store",
        metavar="FILE",
        help="finished parts of a table or a long figure: a stopped run goes on from here",
    )
    reproduce.add_argument(
        "--report-only", action="store_true", help="report what the store has, run nothing"
    )
    reproduce.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from manylora_lab.reproduce.command import print_list, reproduce  # brings every experiment

    if args.list:
        print_list()
        return 0
    if args.name is None:
        raise ConfigError("reproduce needs a NAME; --list names the experiments")
    if args.workers < 0:
        raise ConfigError(f"--workers must be at least 0, got {args.workers}")
    scale: Literal["full", "quick", "smoke"] = "smoke" if args.smoke else "quick" if args.quick else "full"
    reproduce(
        args.name, Path(args.out), scale, args.device, args.seed, args.workers, hardware=args.hardware,
        store=Path(args.store) if args.store else None, is_run=not args.report_only,
    )  # fmt: skip
    return 0
