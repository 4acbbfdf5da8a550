"""S-LoRA's own baselines (§7.1) as engines beside ours, on this device: tokens a second by the number of adapters.

From the repository's root:

    python -m manylora_lab.benchmarks.s_lora_engines --device cuda --shape llama-2-7b --out s_lora_engines.json

``s-lora-bmm`` copies the adapters of a step into contiguous memory, padded to one rank, and multiplies by
``torch.bmm`` (``bench.padded_lora``); ``s-lora-no-unify-mem`` has a part of the pages for adapters and the rest
for KV (``--cache-policy static-lru``); ``manylora, no graphs`` is for the first, whose steps cannot be captured.
All adapters have one rank, so padding costs ``s-lora-bmm`` nothing here but for runs of unlike length. Requests
come in a closed loop of 32 at once, each adapter as often as any other; the systems take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from manylora.pricing.shapes import ModelShape, shape_named
from manylora_lab.bench.closed_loop import BatchGate, LoopRequest, dummy_loop
from manylora_lab.bench.dummies import DEMO
from manylora_lab.bench.padded_lora import pad_adapters
from manylora_lab.bench.provenance import Provenance, add_flags

RANK = 16
ADAPTERS = (5, 20, 100, 200)


class _System(NamedTuple):
    options: dict[str, Any]
    is_padded: bool = False


SYSTEMS = {
    "manylora": _System({}),
    "manylora, no graphs": _System({"cuda_graphs": "off"}),
    "s-lora-bmm": _System({"cuda_graphs": "off"}, is_padded=True),
    "s-lora-no-unify-mem": _System({"cache_policy": "static-lru"}),
}


class Sizes(NamedTuple):
    """Of every run: requests, their tokens, and how many are served at a time."""

    requests: int = 200
    prompt_tokens: int = 128
    output_tokens: int = 64
    at_once: int = 32


def measure(
    shape: ModelShape, device: str, num_adapters: int, repeats: int, sizes: Sizes
) -> dict[str, dict[str, Any]]:
    """By system: tokens per second, the median and all; the first run of each is not counted."""
    requests = [
        LoopRequest(number % num_adapters, sizes.prompt_tokens, sizes.output_tokens)
        for number in range(sizes.requests)
    ]
    rates: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for _ in range(repeats):
        for name, system in SYSTEMS.items():
            with dummy_loop(
                shape, device, RANK, num_adapters, sizes.at_once, sizes.prompt_tokens + sizes.output_tokens + 2,
                options=system.options, change=pad_adapters if system.is_padded else lambda worker: None,
            ) as loop:  # fmt: skip
                loop.warm_up([LoopRequest(number, sizes.prompt_tokens, 2) for number in range(num_adapters)])
                gate = BatchGate([request.adapter or 0 for request in requests], sizes.at_once, True)
                found = loop.run(requests, gate)
            rates[name].append(found.output_tokens / found.duration_s)
    return {
        name: {"tokens_per_s": statistics.median(of_runs), "all": of_runs} for name, of_runs in rates.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--shape", default="demo", help="of the model (default: demo), such as llama-2-7b")
    parser.add_argument("--adapters", type=int, nargs="+", default=list(ADAPTERS), metavar="N")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", required=True, metavar="FILE")
    add_flags(parser)
    args = parser.parse_args()
    recording = Provenance.of(args, 0)
    shape = DEMO if args.shape == "demo" else shape_named(args.shape)
    sizes = Sizes()
    report = {
        "settings": {"device": args.device, "shape": shape.name, "rank": RANK, **sizes._asdict()},
        "rows": [
            {"adapters": number, "systems": measure(shape, args.device, number, args.repeats, sizes)}
            for number in args.adapters
        ],
        "provenance": recording.provenance(),
    }
    Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["rows"], indent=1))


if __name__ == "__main__":
    main()
