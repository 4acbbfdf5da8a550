"""The next product's weights on their way into the L2 cache before it begins.

A decoding step's time is the reading of weights, and while small kernels run between two products, while one
product drains and the next one fills its pipelines, nothing is read. So kernels in between ask for what the next
product reads first; asking takes no registers, and nobody waits for it. Owns the order of products, which is
learnt as they pass; how much of which is asked for, and by whom (``kernels/tuned/ahead.json``, measured by
``benchmarks/h200_ops_layers.py``); and the kernels' side of it. Results do not depend on any of this.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
import triton
import triton.language as tl

from manylora.kernels.triton.dependent import ask_for
from manylora.kernels.triton.products import Products, Shape, bucket_of

TABLE = Path(__file__).parents[1] / "tuned" / "ahead.json"

Place = Literal["small", "attention", "beside"]
"""Who asks: the first of the small kernels after the product before (norm, rope, activation); decoding attention,
as it ends; or a kernel of its own beside whatever follows the product before."""

Ask = tuple[torch.Tensor, int, int, int, int, int]
"""What kernels are told: a weight ``[out, in]``, how many runs of its elements to ask for, rows of a tile,
elements from one beginning to the next (through all tiles), ``in``, and elements of a run. Numbers are multiples
of 16, so that a kernel is compiled once."""

LINE = 64
"""Elements of 16 bits in a line of the cache, in which runs are measured."""

_LANES = tl.constexpr(256)


Key = tuple[bool, Shape]
"""Whether the product before has adapters, whose kernels run between the two; and the product."""


@dataclasses.dataclass(frozen=True)
class Early:
    """Of one product's weights so many bytes are asked for, at this place."""

    place: Place
    num_bytes: int


def stored_asks(device_name: str, path: Path = TABLE) -> dict[Key, Early]:
    """What was measured to be worth it on devices of this name, in 16-bit types; empty for others.

    The file: ``{device name: [{"adapted", "tokens", "in", "out", "place", "num_bytes"}, ...]}``.
    """
    rows = json.loads(path.read_text()).get(device_name, []) if path.is_file() else []
    return {
        (row["adapted"], (row["tokens"], row["in"], row["out"])): Early(row["place"], row["num_bytes"])
        for row in rows
    }


class WeightsAhead:
    """The order of products on one device, and what to ask for between them. For one thread and stream."""

    def __init__(self, products: Products, choices: Mapping[Key, Early] | None = None) -> None:
        self._products = products
        self._choices = dict(choices or {})
        # By a weight's address. The first of all follows none: what a step asks for, it uses.
        self._next: dict[int, torch.Tensor | None] = {}
        self._last: int | None = None
        self._is_adapted = False
        self._side: torch.Stream | None = None
        self._is_beside = False

    def begin(self, weight: torch.Tensor, is_adapted: bool) -> None:
        """The next product is this weight's, with adapters or without."""
        if not self._choices:
            return
        address = weight.data_ptr()
        if address not in self._next:
            if not self._next:
                ask_kernel[(1,)](_nothing(weight))  # compiles it, which a capture may not
            self._next[address] = None
            if self._last is not None:
                self._next[self._last] = weight
        self._last, self._is_adapted = address, is_adapted
        if self._is_beside:
            torch.get_device_module(weight.device).current_stream().wait_stream(self._side)
            self._is_beside = False

    def ask(self, place: Place, x: torch.Tensor) -> Ask | None:
        """What a kernel at this place is to ask for, on the way of ``x`` ``[T, ...]``.

        None only where it never is anything: so kernels are compiled the first time, before the order is known.
        """
        bucket = bucket_of(x.shape[0])
        if not self._choices or bucket is None:
            return None
        weight = None if self._last is None else self._next[self._last]
        if weight is None:
            return _nothing(x)
        early = self._choices.get((self._is_adapted, (bucket, weight.shape[1], weight.shape[0])))
        if early is None or early.place != place:
            return _nothing(x)
        return self._ask(weight, bucket, early.num_bytes)

    def ask_beside(self, x: torch.Tensor) -> None:
        """Ask on a second stream, beside what follows on this one until the next product."""
        ask = self.ask("beside", x)
        if not asking(ask, 1):
            return
        module = torch.get_device_module(x.device)
        if self._side is None:
            self._side = module.Stream(x.device)
        self._side.wait_stream(module.current_stream())
        with module.stream(self._side):
            ask_kernel[(self.askers,)](ask)
        self._is_beside = True

    @property
    def askers(self) -> int:
        """Programs that share the asking."""
        return self._products.multiprocessors

    def _ask(self, weight: torch.Tensor, num_tokens: int, num_bytes: int) -> Ask:
        outputs, inputs = weight.shape
        is_whole = inputs % 16 == 0 and outputs % 16 == 0 and weight.data_ptr() % 16 == 0
        if not is_whole or not weight.is_contiguous() or weight.element_size() != 2:
            return _nothing(weight)
        tile_rows, distance = self._products.beginnings(num_tokens, inputs, outputs)
        runs = -(-outputs * inputs // (tile_rows * distance)) * tile_rows
        run = min(num_bytes // (2 * runs) // LINE * LINE, distance, inputs)
        return weight, runs, tile_rows, distance, inputs, run


def _nothing(x: torch.Tensor) -> Ask:
    return x, 0, 16, 16, 16, 0


def asking(ask: Ask | None, askers: int) -> int:
    """Programs that a launch has more for this."""
    return 0 if ask is None or ask[1] == 0 or ask[5] == 0 else askers


@triton.jit
def run_of(item, runs, tile_rows, distance, inputs, run):
    """Where this run of a weight's elements begins, and its length: 0 past the last one."""
    column = item // tile_rows * distance
    row = column // inputs * tile_rows + item % tile_rows
    inside = column % inputs
    length = tl.where(item < runs, tl.minimum(run, inputs - inside), 0)
    return row.to(tl.int64) * inputs + inside, length


@triton.jit
def ask_ahead(ask, asker, askers):
    """The share of program ``asker`` of ``askers``."""
    if ask is not None:
        weight, runs, tile_rows, distance, inputs, run = ask
        lane = tl.arange(0, _LANES)
        # A warp's lanes ask one after the other: neighbours in a share belong to different warps.
        lane = lane % 32 * (_LANES // 32) + lane // 32
        item_bytes: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        for first in range(0, tl.cdiv(runs, askers), _LANES):
            item = (first + lane) * askers + asker
            place, length = run_of(item, runs, tile_rows, distance, inputs, run)
            ask_for(weight + place, length * item_bytes)


@triton.jit
def ask_past(ask, rows):
    """How far this program is past the ``rows`` (of the grid's first axis) that work: if it is, it has asked."""
    past = tl.program_id(0) - rows
    if past >= 0:
        blocks = tl.num_programs(1)
        ask_ahead(ask, past * blocks + tl.program_id(1), (tl.num_programs(0) - rows) * blocks)
    return past


@triton.jit
def ask_kernel(ask):
    """Grid (askers,)."""
    ask_ahead(ask, tl.program_id(0), tl.num_programs(0))
