"""``manylora bench kernels``: its parser."""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path
from typing import Any

from manylora.config.declaring import ConfigError
from manylora_lab.bench.kernels.settings import KERNELS, TABLES, KernelSettings

_EXAMPLES = """\
examples:
  manylora bench kernels --quick --out kernels
      under a minute on a CPU: kernels/kernels.json and kernels/kernels.png
  manylora bench kernels --device cuda --shape llama-3-8b --only lora linear --out kernels
  TRITON_INTERPRET=1 manylora bench kernels --device cpu --ops triton --out kernels
      the GPU's kernels without a GPU: whether they are right, no times
  manylora bench kernels --tune linear --shape llama-3-8b --out tuned
      launch sizes on this GPU, tried in turn: tuned/linear.json, for src/manylora/kernels/tuned

kernels:
"""


def add_parser(kinds: Any) -> None:
    """Adds ``kernels`` to the subparsers of ``manylora bench``."""
    names = "".join(f"  {name:<18}{what}\n" for name, what in KERNELS.items())
    parser = kinds.add_parser(
        "kernels",
        help="check every kernel against plain torch, time it, and compare with its floor",
        description="Check every kernel against plain torch, time it, and compare with the floor of its bytes "
        "and operations at rates measured in the same run; LoRA as in Punica's Figures 7 and 9. Exits 1 where a "
        "result is wrong.",
        epilog=_EXAMPLES + names,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="write kernels.json and kernels.png here"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "float16", "bfloat16"), default="auto",
        help="auto: bfloat16 on CUDA, float32 on a CPU (default: auto)",
    )  # fmt: skip
    parser.add_argument(
        "--shape", metavar="NAME",
        help="of the model, such as llama-2-7b, llama-3-8b or demo (default: llama-2-7b on CUDA, demo on a CPU)",
    )  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", default=[], metavar="KERNEL", help="only these")
    which.add_argument(
        "--tune", choices=TABLES,
        help="instead: try launch sizes for the GPU, and write the table of the best and tune_*.json into DIR",
    )  # fmt: skip
    parser.add_argument(
        "--ops", choices=("auto", "cpu", "triton"), default="auto",
        help="which implementation on a CPU; triton is interpreted (default: what serves there)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases, fewer repeats")
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS", help="begin no case after so long"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if not args.budget > 0:
        raise ConfigError(f"--budget must be above 0, got {args.budget}")
    only = tuple(name for words in args.only for name in words.split(",") if name)
    settings = KernelSettings(
        args.out, args.device, args.dtype, args.shape, only, args.ops, args.quick, args.budget, args.tune
    )
    if settings.tune is not None:
        if importlib.util.find_spec("triton") is None:
            raise ConfigError("--tune needs Triton: pip install triton")
        from manylora_lab.bench.kernels import tune

        return tune.run(settings)
    from manylora_lab.bench.kernels.run import run

    return run(settings)
