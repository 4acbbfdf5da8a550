"""``manylora profile``: its parser, and what it runs on use."""

from __future__ import annotations

import argparse
from typing import Any

from manylora.flags import SIZING, add_settings, settings_of

_ENGINE = (*SIZING, "pipeline_depth", "tensor_parallel_size", "lora_sharding", "cuda_graphs")
_EXAMPLES = """\
examples:
  manylora profile --model ./llama --out llama-here.json
  manylora profile --model ./demo/model --adapter-modules all --quick --out demo.json
      about a minute on a CPU; take one that does nothing else
  manylora profile --model ./folder-with-config.json --load-format dummy --name llama-2-7b --out 7b.json
      no weights are needed to know what they cost
  manylora profile --model ./llama --tensor-parallel-size 2 --out two.json
      an engine of two ranks; bench simulate --tensor-parallel-size 2 takes it

without --host-pool it has 256 MiB on a CPU and 2 GiB elsewhere, enough for what is copied here.
"""


def add_parser(commands: Any) -> None:
    """Adds ``manylora profile`` to the command line's subparsers."""
    profile = commands.add_parser(
        "profile",
        help="measure what steps, copies and reads take on this device, for the simulator",
        description="Measure what steps, copies between the tiers, adapter reads and the engine itself take "
        "on this device with this model, and write a profile for the simulator.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    profile.add_argument("--model", metavar="MODEL", required=True, help="a local folder, or a hub id")
    for option, metavar, help_text in (
        ("--out", "FILE", "write the profile here"),
        ("--name", "NAME", "the model's name in the profile (default: its folder's)"),
        ("--adapter-modules", "WHICH", "what the random adapters adapt: attention (default) or all"),
        ("--budget", "SECONDS", "time steps again while no more has passed (default: 100, quick 25)"),
        ("--commit", "TEXT", "noted in the profile"),
    ):
        profile.add_argument(option, metavar=metavar, help=help_text, required=option == "--out")
    profile.add_argument("--quick", action="store_true", help="a coarser grid, fewer repeats")
    profile.add_argument(
        "--merging", action="store_true", help="also what merging takes: two more starts of an engine"
    )
    engine = profile.add_argument_group("settings of the engine, as for manylora serve")
    add_settings(engine, _ENGINE)
    profile.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from manylora_lab.bench.profile import run, settings_from

    return run(settings_from(vars(args), settings_of(args, ("model", *_ENGINE))))
