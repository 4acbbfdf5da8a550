"""Profiles of several model shapes on one GPU, dummy weights, bfloat16, for the simulator's costs.

``manylora profile`` for one shape after another, each written as soon as it is there; a shape that does not fit
into the memory or into the time that is left is named and passed over. From the repository's root:

    python -m manylora_lab.benchmarks.h200_profile --folder profiles --commit "$(git rev-parse HEAD)" \\
        --time-budget 250

``--toy``: the same on a CPU with a tiny shape, in a few seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from manylora.config import ConfigError
from manylora.pricing.fit import fit_profile
from manylora.pricing.profile import save_profile
from manylora.pricing.shapes import SHAPES, ModelShape
from manylora_lab.bench.profile import ProfileSettings, describe, measure
from manylora_lab.benchmarks.h200 import write_model

TOY = ModelShape("toy", 2, 64, 4, 2, 16, 128, 256, itemsize=4)
ORDER = ("llama-2-7b", "llama-2-13b", "codellama-34b", "llama-3-8b")
LEAST_S, LEAST_S_PER_GB = 30.0, 1.0
"""About what a shape needs at least, by its weights: adapters, kernels to compile, one pass of its steps."""
POSITIONS = 4096
ENGINE: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "max_model_len": POSITIONS,
    "max_num_seqs": 128, "max_batch_tokens": 8192,
}  # fmt: skip
TOY_ENGINE: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "load_format": "dummy", "max_model_len": 128, "max_num_seqs": 8,
    "max_batch_tokens": 128, "device_pool": "8MiB", "host_pool": "4MiB",
}  # fmt: skip


class Clock:
    """One line on stdout for each part, with the time since the start."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self._what = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        """See ``bench.profile.Progress``."""
        if what != self._what or done == total:
            self._what = what
            self.say(f"{what} {done}/{total}")

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_s

    def say(self, text: str) -> None:
        print(f"{self.elapsed_s:6.1f} s  {text}", flush=True)


def config_of(shape: ModelShape) -> dict[str, Any]:
    """What ``write_model`` writes of it."""
    return {
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate, "vocab_size": shape.vocab,
        "max_position_embeddings": POSITIONS,
    }  # fmt: skip


def profile(shape: ModelShape, settings: ProfileSettings, clock: Clock) -> None:
    """Measure one shape and write it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / shape.name
        write_model(folder, config_of(shape))
        found = measure(
            dataclasses.replace(settings, engine={**settings.engine, "model": str(folder)}), clock
        )
    found.expect(model=shape)
    save_profile(found, settings.out)
    clock.say(f"written to {settings.out}\n{describe(found, fit_profile(found))}")


def main(argv: list[str] | None = None) -> int:
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
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    clock = Clock()
    shapes = [TOY] if args.toy else [SHAPES[name] for name in args.shapes]
    missing = []
    for shape in shapes:
        left_s = args.time_budget - clock.elapsed_s
        if left_s < LEAST_S + LEAST_S_PER_GB * shape.weight_bytes / 1e9 and not args.toy:
            clock.say(f"no time left for {shape.name}")
            missing.append(shape.name)
            continue
        clock.say(shape.name)
        settings = ProfileSettings(
            engine=TOY_ENGINE if args.toy else ENGINE,
            out=args.folder / f"{args.prefix}{shape.name}.json",
            name=shape.name,
            is_quick=args.toy,
            budget_s=min(args.steps_budget, left_s / 3),
            commit=args.commit,
        )
        try:
            profile(shape, settings, clock)
        except (ConfigError, RuntimeError) as error:  # RuntimeError: the device's memory, mostly
            clock.say(f"{shape.name} failed: {error}")
            missing.append(shape.name)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
