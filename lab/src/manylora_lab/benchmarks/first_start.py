"""First starts: seconds from a process's begin to its first answers, on a machine that has compiled nothing.

A process each: with empty caches of compiled kernels; again, with what that one has left; and with empty caches
that take over what ``manylora warmup --export`` has written. In each 64 tokens of the base and of an adapter of
rank 16 are answered by one token, then a prompt of 700 by eight, whose tokens are compared. From the repository's
root:

    python -m manylora_lab.benchmarks.first_start --out start.json --commit "$(git rev-parse --short HEAD)"

``--toy``: the demo model's size on a CPU, where nothing is compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manylora.models.config import read_model_config
from manylora.pricing.shapes import SHAPES
from manylora.warmup.random_adapters import write_random_adapters
from manylora_lab.bench.dummies import DEMO, write_model
from manylora_lab.benchmarks.engine_rig import ON_CPU, ON_GPU
from manylora_lab.benchmarks.run_report import RunReport, run_parser

_CHILD = """
import json, logging, sys, time
values = json.loads(sys.argv[1])
logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s", stream=sys.stderr)
from manylora import LLM, SamplingParams
with LLM(values.pop("model"), adapters={"a": values.pop("adapter")}, **values) as llm:
    print(json.dumps(["ready", time.time()]), flush=True)
    for kind, length, count, adapter in (
        ("base", 64, 1, None), ("adapter", 64, 1, "a"), ("long", values["max_model_len"] // 6, 8, "a"),
    ):
        prompt = [3 + (7 * place) % 100 for place in range(length)]
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        (found,) = llm.generate([prompt], params, adapter=[adapter])
        print(json.dumps([kind, time.time(), list(found.outputs[0].token_ids)]), flush=True)
"""


def caches(folder: Path) -> dict[str, str]:
    """The environment of a process whose compilers keep theirs here."""
    return {
        **os.environ,
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "FLASHINFER_WORKSPACE_BASE": str(folder),
    }


def started(settings: dict[str, Any], folder: Path) -> tuple[dict[str, float], dict[str, list[int]]]:
    """Seconds to each moment, and the tokens. Raises RuntimeError."""
    moments: dict[str, float] = {}
    tokens: dict[str, list[int]] = {}
    began_s = time.time()
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, json.dumps(settings)],
        stdout=subprocess.PIPE,
        text=True,
        env=caches(folder),
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            what, at_s, *rest = json.loads(line)
            moments[f"{what}_s"] = round(at_s - began_s, 2)
            if rest:
                tokens[what] = rest[0]
    if child.returncode or "long_s" not in moments:
        raise RuntimeError(f"the engine has ended with {child.returncode}")
    return moments, tokens


def carried(folder: Path, other: Path, file: Path) -> float:
    """Seconds of an export of one folder's caches and an import into the other's."""
    began_s = time.monotonic()
    for option, place in (("--export", folder), ("--import", other)):
        command = [sys.executable, "-m", "manylora", "warmup", option, str(file)]
        subprocess.run(command, env=caches(place), check=True)
    return time.monotonic() - began_s


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = run_parser(__doc__, time_budget=300.0)
    parser.add_argument("--shape", default="llama-2-7b")
    args = parser.parse_args(argv)
    report = RunReport(args, "0 of the weights")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shape = DEMO if args.toy else SHAPES[args.shape]
        model = write_model(folder / "model", shape, 4096)
        settings: dict[str, Any] = {**(ON_CPU if args.toy else ON_GPU), "model": str(model), "host_pool": 0}
        if not args.toy:
            settings |= {"device_pool": "30GiB"}
        config = read_model_config(model)
        (adapter,) = write_random_adapters(folder / "adapters", config, str(settings["dtype"]), (16,), 1)
        settings["adapter"] = str(adapter)
        first: dict[str, list[int]] | None = None
        for kind, place in (("nothing compiled", "a"), ("again", "a"), ("imported", "b")):
            if not report.has(100.0 if kind == "nothing compiled" else 30.0, kind):
                continue
            row: dict[str, Any] = {"kind": kind}
            if kind == "imported":
                row["carried_s"] = carried(folder / "a", folder / "b", folder / "kernels.tgz")
                row["bytes"] = (folder / "kernels.tgz").stat().st_size
            moments, tokens = started(settings, folder / place)
            first = first or tokens
            report.note("starts", {**row, **moments, "same_tokens": tokens == first})
    report.save()
    print("START " + json.dumps(report.values.get("starts")))


if __name__ == "__main__":
    main()
