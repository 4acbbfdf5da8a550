"""What all parts of ``--tune`` share: which of several ways is taken, by a kernel's time or by whole layers'."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from manylora.kernels.ops import Ops
from manylora.kernels.triton.decode_table import DecodeTable
from manylora.kernels.triton.lora import LoraKernels
from manylora.kernels.triton.operations import TritonOps
from manylora.kernels.triton.products import Products, products_on
from manylora_lab.bench.kernels.layers import LayerCase, LayerRig
from manylora_lab.bench.kernels.measuring import Bench
from manylora_lab.bench.kernels.rig import KernelRig

CONTEXT, QUICK_CONTEXT = 512, 32
"""Of the rows of whole layers."""
W = TypeVar("W")


def fastest(found: Sequence[Mapping[W, float]]) -> W | None:
    """The way that takes least over all of these cases together; None where none ran in each of them."""
    everywhere = [way for way in found[0] if all(way in one for one in found)] if found else []
    return min(everywhere, key=lambda way: sum(one[way] for one in found), default=None)


def text_of(sizes: Any) -> str:
    """The fields in their order."""
    return " ".join(map(str, dataclasses.astuple(sizes)))


def ops_with(
    rig: KernelRig, decoding: DecodeTable | None = None, lora: LoraKernels | None = None
) -> TritonOps:
    """The operations as they are served on the device, but with these sizes."""
    products = products_on(rig.device) if rig.is_cuda else Products({}, rig.multiprocessors)
    return TritonOps(products=products, decoding=decoding, lora=lora)


class WholeLayers:
    """Layers without adapters in decoding steps of so many rows: a kernel's best may cost others more."""

    def __init__(self, bench: Bench, batches: Sequence[int]) -> None:
        self._bench = bench
        context = QUICK_CONTEXT if bench.is_small else CONTEXT
        self._cases = {batch: LayerCase(context, (1,) * batch) for batch in batches}
        rig = bench.rig
        self._rig = LayerRig(rig.shape, str(rig.device), 0, rig.layers, list(self._cases.values()))

    def seconds(self, batch: int, ways: Mapping[str, Ops]) -> dict[str, float]:
        """Of a layer by each of these operations, in turn; nothing once the budget is spent."""
        if self._bench.is_spent:
            return {}
        steps = [self._rig.step(self._cases[batch], ops) for ops in ways.values()]
        found = dict(zip(ways, self._rig.seconds(steps, self._bench.repeats), strict=True))
        for way, time in found.items():
            self._bench.rows.append({"kernel": "layer", "batch": batch, "way": way, "us": time * 1e6})
            print(f"layer, batch {batch}, {way}: {time * 1e6:.2f} us", flush=True)
        return found
