"""Computes products with the base model's weights, by the library or, for some shapes, by our kernel.

Owns the format of the table of choices (``kernels/tuned/linear.json``), the choice for each (tokens, in,
out), our kernel and its launch. The kernel's time goes into reading weights, of which every program reads an
equal share. Nothing is tried out at run time; ``manylora bench kernels --tune linear`` measures and writes
the table.

Our kernel cuts the product into tiles of BLOCK_N output columns, and each tile into steps of BLOCK_K. All
tokens are in one tile, so weights are read once. A program takes an equal run of the steps of all tiles,
across tiles' ends (Stream-K, Osama et al. 2023), so that no multiprocessor idles in a last wave. The program
that finishes last adds up a tile that several share, in the order of the steps, so results do not depend on
timing. The shares' float32 sums are in ``partial``. ``arrivals`` counts the programs that have finished, and
is zero afterwards.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from manylora.kernels.ops import Weight
from manylora.kernels.triton.launch import LaunchCounters, ceil_div, power_of_two, precision


@triton.jit(do_not_specialize=["num_tokens", "share"])
def linear_kernel(
    x,
    weight,
    bias,
    out,
    partial,
    arrivals,
    num_tokens,
    out_features,
    in_features,
    share,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    DESCRIBED: tl.constexpr,
    ROWS_DESCRIBED: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute ``out`` [T, N] = ``x`` [T, K] times ``weight`` [N, K] transposed, plus ``bias`` [N] if BIASED.

    The grid is (programs,). ``share``: steps of one program. WEIGHTS_FIRST: weights are the left operand, so
    that few tokens do not waste the tensor cores' rows. DESCRIBED: ``weight`` is a tensor descriptor of
    blocks [BLOCK_N, BLOCK_K]. ROWS_DESCRIBED: ``x`` is a tensor descriptor of blocks [BLOCK_M, BLOCK_K].
    ``partial`` float32 [2 * programs, BLOCK_N * BLOCK_M] is used only where a tile has several programs.
    """
    program = tl.program_id(0)
    tile_steps = tl.cdiv(in_features, BLOCK_K)
    tiles = tl.cdiv(out_features, BLOCK_N)
    begin = program * share
    end = tl.minimum(begin + share, tiles * tile_steps)
    if begin >= end:
        return
    m = tl.arange(0, BLOCK_M)
    k_inside = tl.arange(0, BLOCK_K)
    for tile in range(begin // tile_steps, (end - 1) // tile_steps + 1):
        first_step = tl.maximum(begin - tile * tile_steps, 0)
        last_step = tl.minimum(end - tile * tile_steps, tile_steps)
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        n_ok = n < out_features
        total = tl.zeros((BLOCK_N, BLOCK_M) if WEIGHTS_FIRST else (BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.range(first_step, last_step, num_stages=STAGES):
            k = step * BLOCK_K + k_inside
            if DESCRIBED:
                w = weight.load([tile * BLOCK_N, step * BLOCK_K])
            else:
                w_ok = n_ok[:, None] if EVEN_K else n_ok[:, None] & (k < in_features)[None, :]
                rows_and_steps = n.to(tl.int64)[:, None] * in_features + k[None, :]
                w = tl.load(weight + rows_and_steps, mask=w_ok, other=0.0, eviction_policy="evict_first")
            x_ok = (m < num_tokens)[:, None]
            if not EVEN_K:
                x_ok &= (k < in_features)[None, :]
            if ROWS_DESCRIBED:
                rows = x.load([0, step * BLOCK_K])
            else:
                rows = tl.load(
                    x + m[:, None] * x_stride + k[None, :], mask=x_ok, other=0.0, eviction_policy="evict_last"
                )
            if WEIGHTS_FIRST:
                total = tl.dot(w, tl.trans(rows), total, input_precision=PRECISION)
            else:
                total = tl.dot(rows, tl.trans(w), total, input_precision=PRECISION)

        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        if not WEIGHTS_FIRST:
            place = tl.trans(place)
        first = tile * tile_steps // share
        last = (tile * tile_steps + tile_steps - 1) // share
        finished = first == last
        if not finished:
            # A program may end one shared tile and begin another. Its second place is for the tile it begins.
            mine = 2 * program + (program == first).to(tl.int32)
            tl.store(partial + mine.to(tl.int64) * (BLOCK_N * BLOCK_M) + place, total)
            # The sums of all threads must be in memory before one thread counts this program as finished.
            tl.debug_barrier()
            finished = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == last - first
            if finished:
                total = tl.zeros_like(total)
                for other in range(first, last + 1):
                    theirs = 2 * other + (other == first).to(tl.int32)
                    begins = partial + theirs.to(tl.int64) * (BLOCK_N * BLOCK_M)
                    total += tl.load(begins + place, cache_modifier=".cg")
                tl.store(arrivals + tile, 0)
        if finished:
            _store(total, bias, out, m, n, n_ok, num_tokens, out_features, BIASED, WEIGHTS_FIRST)


@triton.jit
def _store(
    total, bias, out, m, n, n_ok, num_tokens, out_features, BIASED: tl.constexpr, WEIGHTS_FIRST: tl.constexpr
):
    if WEIGHTS_FIRST:
        total = tl.trans(total)
    if BIASED:
        total += tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)[None, :]
    place = m.to(tl.int64)[:, None] * out_features + n[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(m < num_tokens)[:, None] & n_ok[None, :])


_log = logging.getLogger(__name__)

TABLE = Path(__file__).parents[1] / "tuned" / "linear.json"
BUCKETS = (16, 32, 64, 128)
"""The largest number of tokens in each bucket, which has one choice. Above the last, the library serves."""

OTHER_LIBRARY = "cublaslt"
"""torch's name of the library that serves only where a row of the table says so."""

Shape = tuple[int, int, int]
"""(bucket of tokens, in_features, out_features)."""


@dataclasses.dataclass(frozen=True)
class LinearConfig:
    """The launch sizes of ``linear_kernel``; ``programs`` is the number for each multiprocessor."""

    block_n: int
    block_k: int
    programs: int
    warps: int
    stages: int
    weights_first: bool = True
    described: bool = False
    rows_described: bool = False


def bucket_of(num_tokens: int) -> int | None:
    """Return the bucket for ``num_tokens`` tokens; None above the last bucket."""
    return next((bucket for bucket in BUCKETS if num_tokens <= bucket), None)


Choice = LinearConfig | None
"""Our kernel's sizes, or None for the other library."""


def stored_choices(device_name: str, path: Path = TABLE) -> dict[Shape, Choice]:
    """Return the choices that beat the library on devices of this name, in 16-bit types; empty for others.

    The file is ``{device name: [{"tokens", "in", "out", and LinearConfig's fields}, ...]}``. Rows without
    ``block_n`` choose the other library.
    """
    rows = json.loads(path.read_text()).get(device_name, []) if path.is_file() else []
    configs = (msgspec.convert(row, LinearConfig) if "block_n" in row else None for row in rows)
    return dict(zip([(row["tokens"], row["in"], row["out"]) for row in rows], configs))


@contextlib.contextmanager
def other_library() -> Iterator[None]:
    """Make torch use ``OTHER_LIBRARY`` for its products inside the context."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(OTHER_LIBRARY)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def products_on(device: torch.device) -> Products:
    """Return the products of a CUDA device, with the choices measured on devices of its name."""
    properties = torch.get_device_module(device).get_device_properties(device)
    choices = stored_choices(properties.name)
    if choices:
        ours = sum(choice is not None for choice in choices.values())
        _log.info(
            "products of at most %d tokens: %d shapes by our kernel, %d by %s, others by the library",
            BUCKETS[-1],
            ours,
            len(choices) - ours,
            OTHER_LIBRARY,
        )
    else:
        _log.info("products: the library's, for nothing was measured on %s", properties.name)
    return Products(choices, properties.multi_processor_count)


class Products:
    """Linear layers on one device. Calls must be ordered on the device, because they share counters."""

    def __init__(self, choices: Mapping[Shape, Choice], multiprocessors: int) -> None:
        self._choices = dict(choices)
        self._multiprocessors = multiprocessors
        self._counters = LaunchCounters()

    def __call__(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x ``[T, in]`` times weight ``[out, in]`` transposed, plus bias ``[out]``, as ``[T, out]``.

        The first call of our kernel allocates counters, so it must not be under capture.
        """
        shape = self._shape(x, weight.data)
        if shape not in self._choices:
            return functional.linear(x, weight.data, bias)
        config = self._choices[shape]
        if config is not None:
            return self.run(x, weight, bias, config)
        with other_library():
            return functional.linear(x, weight.data, bias)

    def _shape(self, x: torch.Tensor, matrix: torch.Tensor) -> Shape | None:
        """Return the shape to look up in the table; None where the table does not apply."""
        if not self._choices or x.dtype.itemsize != 2 or x.dim() != 2 or x.stride(1) != 1:
            return None
        bucket = bucket_of(x.shape[0])
        if bucket is None or x.shape[0] == 0 or not matrix.is_contiguous():
            return None
        return bucket, matrix.shape[1], matrix.shape[0]

    def run(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, config: LinearConfig
    ) -> torch.Tensor:
        """Compute the product by our kernel, in any dtype, for 1 to ``BUCKETS[-1]`` tokens."""
        matrix = weight.data
        (num_tokens, inputs), outputs = x.shape, matrix.shape[0]
        block_m = max(16, power_of_two(num_tokens))
        tile_steps = ceil_div(inputs, config.block_k)
        tiles = ceil_div(outputs, config.block_n)
        share = ceil_div(tiles * tile_steps, config.programs * self._multiprocessors)
        programs = ceil_div(tiles * tile_steps, share)
        out = torch.empty((num_tokens, outputs), dtype=x.dtype, device=x.device)
        arrivals = self._counters.take(tiles, x.device)
        partial = arrivals.view(torch.float32)  # unused, but of the right type
        if share % tile_steps:  # otherwise no tile has several programs
            planes = (2 * programs, config.block_n * block_m)
            partial = torch.empty(planes, dtype=torch.float32, device=x.device)
        described = TensorDescriptor.from_tensor
        linear_kernel[(programs,)](
            described(x, [block_m, config.block_k]) if config.rows_described else x,
            described(matrix, [config.block_n, config.block_k]) if config.described else matrix,
            out if bias is None else bias,
            out,
            partial,
            arrivals,
            num_tokens,
            outputs,
            inputs,
            share,
            x.stride(0),
            BLOCK_M=block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            STAGES=config.stages,
            BIASED=bias is not None,
            WEIGHTS_FIRST=config.weights_first,
            DESCRIBED=config.described,
            ROWS_DESCRIBED=config.rows_described,
            EVEN_K=inputs % config.block_k == 0,
            PRECISION=precision(x.dtype),
            num_warps=config.warps,
            num_stages=config.stages,
        )
        return out
