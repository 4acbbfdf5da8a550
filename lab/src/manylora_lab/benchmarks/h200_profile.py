"""Profiles of several model shapes on one GPU, dummy weights, bfloat16, for the simulator's costs.

``manylora profile`` for one shape after another, each written as soon as it is there; a shape that does not fit
into the memory or into the time that is left is named and passed over. From the repository's root:

    python -m manylora_lab.benchmarks.h200_profile --folder profiles --commit "$(git rev-parse HEAD)" \\
        --time-budget 250

``--tensor-parallel-size``, ``--lora-sharding``: engines of several ranks, for ``bench simulate`` of as many.
``--toy``: the same on a CPU with a tiny shape, in a few seconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from manylora.config import LORA_SHARDINGS, ConfigError
from manylora.pricing.fit import fit_profile
from manylora.pricing.profile import save_profile
from manylora.pricing.shapes import SHAPES, ModelShape
from manylora_lab.bench.dummies import write_model
from manylora_lab.bench.profile import ProfileSettings, measure
from manylora_lab.bench.profile_report import ProgressBars, describe
from manylora_lab.benchmarks.engine_rig import ON_CPU, ON_GPU, POSITIONS

TOY = ModelShape("toy", 2, 64, 4, 2, 16, 128, 256, itemsize=4)
ORDER = ("llama-2-7b", "llama-2-13b", "codellama-34b", "llama-3-8b")
LEAST_S, LEAST_S_PER_GB = 30.0, 1.0
"""About what a shape needs at least, by its weights: adapters, kernels to compile, one pass of its steps."""
ENGINE = {name: value for name, value in ON_GPU.items() if not name.endswith("_pool")}
TOY_ENGINE = {**ON_CPU, "max_model_len": 128, "max_num_seqs": 8, "max_batch_tokens": 128}


def main(argv: Sequence[str] | None = None) -> int:
    """0 where every shape was profiled."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", required=True, type=Path, help="for NAME.json of each shape")
    parser.add_argument("--shapes", nargs="*", default=list(ORDER), choices=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--prefix", default="h200-", help="of the files' names")
    parser.add_argument("--time-budget", type=float, default=250.0, metavar="S")
    parser.add_argument(
        "--steps-budget", type=float, default=30.0, metavar="S", help="for watching a shape's engine"
    )
    parser.add_argument("--commit", default="unknown", help="noted in the profiles")
    parser.add_argument("--merging", action="store_true", help="also what merging takes")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument("--lora-sharding", default="auto", choices=("auto", *LORA_SHARDINGS))
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    missing = []
    for shape in [TOY] if args.toy else [SHAPES[name] for name in args.shapes]:
        left_s = args.time_budget - (time.monotonic() - began_s)
        if left_s < LEAST_S + LEAST_S_PER_GB * shape.weight_bytes / 1e9 and not args.toy:
            print(f"no time left for {shape.name}")
            missing.append(shape.name)
            continue
        print(shape.name)
        out = args.folder / f"{args.prefix}{shape.name}.json"
        try:
            with tempfile.TemporaryDirectory() as scratch:
                model = write_model(Path(scratch) / shape.name, shape, POSITIONS)
                engine = {
                    **(TOY_ENGINE if args.toy else ENGINE), "model": str(model),
                    "tensor_parallel_size": args.tensor_parallel_size, "lora_sharding": args.lora_sharding,
                }  # fmt: skip
                budget_s = min(args.steps_budget, left_s / 3)
                settings = ProfileSettings(
                    engine, out, shape.name, is_quick=args.toy, budget_s=budget_s, commit=args.commit,
                    with_merging=args.merging,
                )  # fmt: skip
                found = measure(settings, ProgressBars())
            found.expect(model=shape)
            save_profile(found, out)
            print(f"written to {out}\n{describe(found, fit_profile(found))}")
        except (ConfigError, RuntimeError) as error:  # RuntimeError: the device's memory, mostly
            print(f"{shape.name} failed: {error}")
            missing.append(shape.name)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
