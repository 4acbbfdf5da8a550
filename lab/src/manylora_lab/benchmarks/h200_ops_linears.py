"""The products' part of ``h200_ops``: libraries against ours, alone and after a norm, and the table that follows.

In serving a product follows a small kernel, behind whose end a dependent launch may hide its beginning; so choices
are made by the time of a norm and the product together. Weights come from memory, not from the cache.
"""

# mypy: disallow-untyped-calls=False
# torch's streams and events have no annotations.

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from manylora.kernels.triton.operations import TritonOps
from manylora.kernels.triton.products import (
    Choice,
    LinearConfig,
    Products,
    Shape,
    bucket_of,
    other_library,
)
from manylora.kernels.weight import Weight
from manylora_lab.bench import rounding
from manylora_lab.benchmarks.h200_ops_timing import cold_time, relative_error

DTYPE = torch.bfloat16
BATCHES = (1, 8, 16, 32, 64, 128)
LINEARS = {
    "7b.qkv": (4096, 12288),
    "7b.gate_up": (4096, 22016),
    "7b.down": (11008, 4096),
    "7b.head": (4096, 32000),
    "8b.qkv": (4096, 6144),
    "both.o": (4096, 4096),
    "8b.gate_up": (4096, 28672),
    "8b.down": (14336, 4096),
    "8b.head": (4096, 128256),
}
"""in_features, out_features."""

COLD_BYTES = 400 * 2**20
WORTH = 0.97
"""Another than the library is chosen where it takes less than this share of its time."""

SHAPES = {
    16: [
        (32, 128, 3, 4, 4, False, False, False),
        (64, 128, 3, 4, 3, True, False, False),
        (64, 128, 2, 4, 4, True, False, False),
        (64, 256, 1, 4, 4, True, False, False),
        (64, 256, 1, 4, 4, True, True, False),
        (64, 128, 2, 4, 5, True, True, True),
    ],
    32: [
        (32, 128, 3, 4, 4, False, False, False),
        (64, 128, 2, 4, 4, True, False, False),
        (64, 256, 1, 4, 4, True, False, False),
        (64, 256, 1, 4, 4, True, True, True),
        (128, 128, 1, 4, 5, True, False, False),
    ],
    64: [
        (64, 128, 2, 4, 3, True, True, False),
        (64, 128, 2, 4, 3, True, True, True),
        (128, 128, 1, 4, 4, True, False, False),
        (128, 128, 1, 8, 4, True, True, True),
        (128, 64, 2, 4, 4, True, True, True),
        (256, 64, 1, 8, 5, True, True, True),
    ],
    128: [
        (128, 64, 1, 8, 6, True, True, True),
        (128, 64, 1, 4, 6, True, True, True),
        (128, 128, 1, 8, 3, True, True, True),
        (256, 64, 1, 8, 4, True, True, True),
        (64, 64, 2, 4, 4, True, True, True),
        (128, 64, 1, 8, 6, False, True, True),
    ],
}
"""``LinearConfig``s by tokens, without ``ahead``; shared memory of 227 KB a multiprocessor bounds them."""

AHEAD: tuple[int | None, ...] = (None, 0, 2, 4)


def configs(block_m: int) -> list[LinearConfig]:
    """What is tried for so many tokens."""
    return [LinearConfig(*shape, ahead) for shape in SHAPES[block_m] for ahead in AHEAD]


def compile_linear(block_m: int, config: LinearConfig) -> None:
    """Run the kernel once on little data."""
    x = torch.zeros(block_m, 4096, dtype=DTYPE, device="cuda")
    weight = torch.zeros(2048, 4096, dtype=DTYPE, device="cuda")
    Products({}, 132).run(x, Weight(weight), None, config)


@dataclasses.dataclass
class Linears:
    """What was measured. ``plain``, ``dependent``: choices without dependent launches, and with them."""

    floor_us: Callable[[float], float]
    deadline: float
    plain: dict[Shape, Choice] = dataclasses.field(default_factory=dict)
    dependent: dict[Shape, Choice] = dataclasses.field(default_factory=dict)
    failures: set[str] = dataclasses.field(default_factory=set)

    def measure(self) -> dict[str, Any]:
        """Per product and batch, microseconds; the largest products last. Stops at the deadline."""
        flat = torch.empty(1 << 30, dtype=DTYPE, device="cuda").normal_(std=0.02)
        rows: dict[str, Any] = {}
        for name, batch in sorted(
            itertools.product(LINEARS, BATCHES), key=lambda case: LINEARS[case[0]][1] * LINEARS[case[0]][0]
        ):
            if time.perf_counter() > self.deadline:
                self.failures.add(f"no time for {name} {batch}")
                continue
            rows[f"{name} {batch}"] = self._row(name, batch, flat)
        return {"rows": rows, "failures": sorted(self.failures)}

    def _row(self, name: str, batch: int, flat: torch.Tensor) -> dict[str, Any]:
        inputs, outputs = LINEARS[name]
        case = _Case(batch, inputs, outputs, flat)
        floor = self.floor_us(2 * inputs * outputs)
        cublas = case.microseconds(functional.linear, False)
        with other_library():
            lt = case.microseconds(functional.linear, False)
        found: list[tuple[tuple[float, float], LinearConfig]] = []
        block_m = bucket_of(batch)
        assert block_m is not None
        for config in configs(block_m):
            try:
                found.append((case.ours(config, 3), config))
            except Exception as error:
                self.failures.add(f"{block_m} {config}: {str(error)[:120]}")
        found.sort(key=lambda pair: pair[0][1])
        best = {}
        for kind in ("plain", "dependent"):
            some = [config for _, config in found if kind == "dependent" or config.ahead is None][:4]
            best[kind] = min(((case.ours(config, 9), config) for config in some), key=lambda pair: pair[0][1])
        if block_m == batch:
            shape = (block_m, inputs, outputs)
            for choices, kind in ((self.plain, "plain"), (self.dependent, "dependent")):
                (_, ours), config = best[kind]
                fastest = min(cublas[1], lt[1], ours)
                if fastest < WORTH * cublas[1]:
                    choices[shape] = config if ours == fastest else None
        row = {
            "floor": round(floor, 2),
            "cublas": cublas,
            "cublaslt": lt,
            "plain": [*best["plain"][0], dataclasses.astuple(best["plain"][1])],
            "dependent": [*best["dependent"][0], dataclasses.astuple(best["dependent"][1])],
            "top": [[*times, dataclasses.astuple(config)] for times, config in found[:6]],
        }
        shown = {key: value for key, value in row.items() if key != "top"}
        print(f"{name:<11} {batch:>3}  {json.dumps(shown, separators=(',', ':'))}", flush=True)
        return row


class _Case:
    """One product: its rows, and as many weight matrices, cut from ``flat``, as do not fit the cache."""

    def __init__(self, batch: int, inputs: int, outputs: int, flat: torch.Tensor) -> None:
        self.x = torch.randn(batch, inputs, device="cuda").to(DTYPE)
        self._norm = torch.ones(inputs, dtype=DTYPE, device="cuda")
        size = inputs * outputs
        count = max(1, min(flat.numel() // size, -(-COLD_BYTES // (2 * size))))
        self.weights = [flat[i * size : (i + 1) * size].view(outputs, inputs) for i in range(count)]
        self._products = Products({}, torch.cuda.get_device_properties(0).multi_processor_count)

    def microseconds(
        self, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dependent: bool, rounds: int = 9
    ) -> tuple[float, float]:
        """Alone, and with a norm before it."""
        ops = TritonOps(dependent=dependent)

        def after_norm(weight: torch.Tensor) -> None:
            product(ops.rms_norm(self.x, self._norm, 1e-5), weight)

        alone = cold_time(lambda weight: product(self.x, weight), self.weights, rounds)
        return round(alone * 1e6, 2), round(cold_time(after_norm, self.weights, rounds) * 1e6, 2)

    def ours(self, config: LinearConfig, rounds: int) -> tuple[float, float]:
        return self.microseconds(
            lambda x, weight: self._products.run(x, Weight(weight), None, config),
            config.ahead is not None,
            rounds,
        )


def errors(choices: Mapping[Shape, Choice]) -> dict[str, Any]:
    """The relative errors of our kernel against float32 products, and whether further runs give the same bits."""
    flat = torch.empty(1 << 27, dtype=DTYPE, device="cuda").normal_(std=0.02)
    rows = {}
    for (block_m, inputs, outputs), config in sorted(choices.items(), key=lambda item: item[0]):
        if config is None or inputs * outputs > flat.numel():
            continue
        case = _Case(block_m - 1, inputs, outputs, flat)
        weight = case.weights[0]
        products = Products({}, torch.cuda.get_device_properties(0).multi_processor_count)
        truth = functional.linear(case.x.float(), weight.float())
        outs = [products.run(case.x, Weight(weight), None, config) for _ in range(21)]
        library = relative_error(functional.linear(case.x, weight), truth)
        rows[f"{block_m} {inputs} {outputs}"] = {
            "ours": relative_error(outs[0], truth),
            "library": library,
            "of_bound": rounding.linear(case.x, weight, None).rounded(DTYPE).excess(outs[0]),
            "same_bits": all(torch.equal(out, outs[0]) for out in outs),
        }
    worst = max((row["ours"] / row["library"] for row in rows.values()), default=0)
    same = all(row["same_bits"] for row in rows.values())
    print(f"products: error over the library's at most {worst:.3f}, same bits: {same}", flush=True)
    return rows


def save_table(choices: Mapping[Shape, Choice], path: Path) -> None:
    """Replace this device's rows of ``kernels/tuned/linear.json``."""
    stored = json.loads(path.read_text()) if path.is_file() else {}
    stored[torch.cuda.get_device_name()] = [
        {"tokens": tokens, "in": inputs, "out": outputs}
        | ({} if config is None else dataclasses.asdict(config))
        for (tokens, inputs, outputs), config in sorted(choices.items(), key=lambda item: item[0])
    ]
    rows = ",\n".join(
        f'  "{name}": [\n' + ",\n".join(f"    {json.dumps(row)}" for row in found) + "\n  ]"
        for name, found in sorted(stored.items())
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + rows + "\n}\n")
