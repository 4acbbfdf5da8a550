"""The products' table: cuBLAS, cublasLt or our kernel by product and bucket of tokens.

In serving a product follows a small kernel. So what is timed is a norm and the product together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from manylora.kernels.ops import Weight
from manylora.kernels.triton.operations import TritonOps
from manylora.kernels.triton.products import (
    BUCKETS,
    OTHER_LIBRARY,
    Choice,
    LinearConfig,
    Products,
    Shape,
    other_library,
)
from manylora_lab.bench.kernels.cases import EPS, ProductProblem, products
from manylora_lab.bench.kernels.choosing import WholeLayers, fastest, text_of
from manylora_lab.bench.kernels.measuring import Bench
from manylora_lab.bench.kernels.rig import KernelCase

LIBRARY = "cublas"
WORTH = 0.97
"""Another than the library is chosen where it takes less than this share of its time."""
QUICK_BUCKETS = BUCKETS[:2]

SHAPES = {
    16: (
        (32, 128, 3, 4, 4, False, False, False), (64, 128, 3, 4, 3, True, False, False),
        (64, 128, 2, 4, 4, True, False, False), (64, 256, 1, 4, 4, True, False, False),
        (64, 256, 1, 4, 4, True, True, False), (64, 128, 2, 4, 5, True, True, True),
    ),
    32: (
        (32, 128, 3, 4, 4, False, False, False), (64, 128, 2, 4, 4, True, False, False),
        (64, 256, 1, 4, 4, True, False, False), (64, 256, 1, 4, 4, True, True, True),
        (128, 128, 1, 4, 5, True, False, False),
    ),
    64: (
        (64, 128, 2, 4, 3, True, True, False), (64, 128, 2, 4, 3, True, True, True),
        (128, 128, 1, 4, 4, True, False, False), (128, 128, 1, 8, 4, True, True, True),
        (128, 64, 2, 4, 4, True, True, True), (256, 64, 1, 8, 5, True, True, True),
    ),
    128: (
        (128, 64, 1, 8, 6, True, True, True), (128, 64, 1, 4, 6, True, True, True),
        (128, 128, 1, 8, 3, True, True, True), (256, 64, 1, 8, 4, True, True, True),
        (64, 64, 2, 4, 4, True, True, True), (128, 64, 1, 8, 6, False, True, True),
    ),
}  # fmt: skip
"""``LinearConfig``s by tokens; shared memory of 227 KB a multiprocessor bounds them."""

Way = LinearConfig | str
Linear = Callable[[torch.Tensor, Weight], torch.Tensor]


def tune(bench: Bench, stored: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """This device's rows of the table: those of the shapes that were measured anew, the others as stored."""
    buckets = QUICK_BUCKETS if bench.is_small else BUCKETS
    bench.rig.reserve([], 0)
    chosen: dict[Shape, Choice] = {}
    measured = set()
    for name, product in products(bench.rig, buckets):
        found = bench.candidates(_ways(bench, name, product))
        shape = (len(product.x), product.inputs, product.outputs)
        if found:
            measured.add(shape)
            _choose(chosen, shape, found)
    ways = {LIBRARY: TritonOps(), "chosen": TritonOps(products=Products(chosen, bench.rig.multiprocessors))}
    layers = WholeLayers(bench, buckets)
    for batch in buckets:
        layers.seconds(batch, ways)
    kept = [row for row in stored or [] if (row["tokens"], row["in"], row["out"]) not in measured]
    rows = [
        {"tokens": tokens, "in": inputs, "out": outputs}
        | ({} if config is None else dataclasses.asdict(config))
        for (tokens, inputs, outputs), config in chosen.items()
    ]
    return sorted([*kept, *rows], key=lambda row: (row["tokens"], row["in"], row["out"]))


def _choose(choices: dict[Shape, Choice], shape: Shape, found: Mapping[Way, float]) -> None:
    """Note what is faster than the library, if anything is."""
    best = fastest([found])
    if best is None or found[best] >= WORTH * found[LIBRARY]:
        return
    choices[shape] = best if isinstance(best, LinearConfig) else None


def _ways(bench: Bench, name: str, product: ProductProblem) -> dict[Way, KernelCase]:
    rig, bucket = bench.rig, len(product.x)
    setting = {"product": name, "batch": bucket}
    found: dict[Way, KernelCase] = {LIBRARY: _after_norm(product, {**setting, "sizes": LIBRARY}, _library)}
    if rig.is_cuda:
        found[OTHER_LIBRARY] = _after_norm(product, {**setting, "sizes": OTHER_LIBRARY}, _other_library)
    configs = [LinearConfig(*shape) for shape in SHAPES[bucket]]
    for config in configs[:3] if bench.is_small else configs:
        linear = partial(Products({}, rig.multiprocessors).run, bias=None, config=config)
        found[config] = _after_norm(product, {**setting, "sizes": text_of(config)}, linear)
    return found


def _library(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    return functional.linear(x, weight.data)


def _other_library(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    with other_library():
        return functional.linear(x, weight.data)


def _after_norm(product: ProductProblem, setting: dict[str, Any], linear: Linear) -> KernelCase:
    """The product checked alone and timed behind a norm."""
    ops, norm = TritonOps(), torch.ones_like(product.x[0])

    def step() -> None:
        for matrix in product.matrices:
            linear(ops.rms_norm(product.x, norm, EPS), matrix)

    return dataclasses.replace(product.case(setting, linear), step=step)
