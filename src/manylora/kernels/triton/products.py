"""Matrix products with the base model's weights: the library's, or for few tokens ours, by a stored table.

Owns: the table's format (``kernels/tuned/linear.json``), the choice per (tokens, in, out), and the launch.
Nothing is tried out at run time; ``manylora bench kernels --tune linear`` measures and writes the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn import functional

from manylora.kernels.triton.counters import LaunchCounters
from manylora.kernels.triton.linear import linear_kernel
from manylora.kernels.triton.plans import power_of_two
from manylora.kernels.weight import Weight

_log = logging.getLogger(__name__)

TABLE = Path(__file__).parents[1] / "tuned" / "linear.json"
BUCKETS = (16, 32, 64, 128)
"""Largest numbers of tokens that one choice is for; past the last the library serves."""

OTHER_LIBRARY = "cublaslt"
"""torch's name of the library that serves where a row of the table says so, and not otherwise."""

Shape = tuple[int, int, int]
"""(bucket of tokens, in_features, out_features)."""


@dataclasses.dataclass(frozen=True)
class LinearConfig:
    """Launch sizes of ``linear_kernel``; ``programs`` are those of one multiprocessor."""

    block_n: int
    block_k: int
    programs: int
    warps: int
    stages: int
    weights_first: bool = True
    described: bool = False
    rows_described: bool = False


def bucket_of(num_tokens: int) -> int | None:
    """The bucket that so many tokens fall into."""
    return next((bucket for bucket in BUCKETS if num_tokens <= bucket), None)


Choice = LinearConfig | None
"""Ours, or None: the other library."""


def stored_choices(device_name: str, path: Path = TABLE) -> dict[Shape, Choice]:
    """What was measured to beat the library on devices of this name, in 16-bit types; empty for others.

    The file: ``{device name: [{"tokens", "in", "out", and LinearConfig's fields}, ...]}``; rows without
    ``block_n`` are the other library's.
    """
    rows = json.loads(path.read_text()).get(device_name, []) if path.is_file() else []
    return {(row["tokens"], row["in"], row["out"]): _stored_choice(row) for row in rows}


def _stored_choice(row: Mapping[str, Any]) -> Choice:
    names = [field.name for field in dataclasses.fields(LinearConfig)]
    return LinearConfig(**{name: row[name] for name in names if name in row}) if "block_n" in row else None


@contextlib.contextmanager
def other_library() -> Iterator[None]:
    """Products by torch are ``OTHER_LIBRARY``'s meanwhile."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(OTHER_LIBRARY)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def products_on(device: torch.device) -> Products:
    """The products of a CUDA device, by what was measured on devices of its name."""
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
    """Linear layers on one device. Calls must be ordered on the device: they share counters."""

    def __init__(self, choices: Mapping[Shape, Choice], multiprocessors: int) -> None:
        self._choices = dict(choices)
        self._multiprocessors = multiprocessors
        self._counters = LaunchCounters()

    def __call__(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """x ``[T, in]`` times weight ``[out, in]`` transposed, plus bias ``[out]``: ``[T, out]``.

        The first call on a device takes memory for the counters, so it must not be under capture.
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
        """The shape to look up in the table; None where it does not apply."""
        if not self._choices or x.dtype.itemsize != 2 or x.dim() != 2 or x.stride(1) != 1:
            return None
        bucket = bucket_of(x.shape[0])
        if bucket is None or x.shape[0] == 0 or not matrix.is_contiguous():
            return None
        return bucket, matrix.shape[1], matrix.shape[0]

    def run(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, config: LinearConfig
    ) -> torch.Tensor:
        """The same by our kernel, in any dtype; at least one token and at most the last bucket's."""
        matrix = weight.data
        (num_tokens, inputs), outputs = x.shape, matrix.shape[0]
        block_m = max(16, power_of_two(num_tokens))
        tile_steps = triton.cdiv(inputs, config.block_k)
        tiles = triton.cdiv(outputs, config.block_n)
        share = triton.cdiv(tiles * tile_steps, config.programs * self._multiprocessors)
        programs = triton.cdiv(tiles * tile_steps, share)
        out = torch.empty((num_tokens, outputs), dtype=x.dtype, device=x.device)
        arrivals = self._counters.take(tiles, x.device)
        partial = arrivals.view(torch.float32)  # of the right type, where nothing is summed up
        if share % tile_steps:  # else no tile has several programs
            planes = (2 * programs, config.block_n * block_m)
            partial = torch.empty(planes, dtype=torch.float32, device=x.device)
        linear_kernel[(programs,)](
            _described(x, block_m, config.block_k) if config.rows_described else x,
            _described(matrix, config.block_n, config.block_k) if config.described else matrix,
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
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=config.warps,
            num_stages=config.stages,
        )
        return out


def _described(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [rows, columns])
