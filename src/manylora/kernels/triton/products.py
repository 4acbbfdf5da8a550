"""Matrix products with the base model's weights: the library's, or for few tokens ours, by a stored table.

Owns: the table's format (``kernels/tuned/linear.json``), the choice per (tokens, in, out), and the launch.
Nothing is tried out at run time; ``benchmarks/h200_ops.py`` measures and writes the table.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn import functional

from manylora.kernels.triton.counters import Counters
from manylora.kernels.triton.linear import linear_kernel
from manylora.kernels.triton.plans import power_of_two

_log = logging.getLogger(__name__)

TABLE = Path(__file__).parents[1] / "tuned" / "linear.json"
BUCKETS = (16, 32, 64, 128)
"""Largest numbers of tokens that one choice is for; past the last the library serves."""

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


def bucket_of(num_tokens: int) -> int | None:
    """The bucket that so many tokens fall into."""
    return next((bucket for bucket in BUCKETS if num_tokens <= bucket), None)


def stored_choices(device_name: str, path: Path = TABLE) -> dict[Shape, LinearConfig]:
    """What was measured to beat the library on devices of this name, in 16-bit types; empty for others.

    The file: ``{device name: [{"tokens", "in", "out", and LinearConfig's fields}, ...]}``.
    """
    rows = json.loads(path.read_text()).get(device_name, []) if path.is_file() else []
    fields = [field.name for field in dataclasses.fields(LinearConfig)]
    return {
        (row["tokens"], row["in"], row["out"]): LinearConfig(**{name: row[name] for name in fields})
        for row in rows
    }


def products_on(device: torch.device) -> Products:
    """The products of a CUDA device, by what was measured on devices of its name."""
    properties = torch.get_device_module(device).get_device_properties(device)
    choices = stored_choices(properties.name)
    if choices:
        _log.info("products of at most %d tokens: %d shapes by our kernel", BUCKETS[-1], len(choices))
    else:
        _log.info("products: the library's, for nothing was measured on %s", properties.name)
    return Products(choices, properties.multi_processor_count)


class Products:
    """Linear layers on one device. Calls must be ordered on the device: they share counters."""

    def __init__(self, choices: Mapping[Shape, LinearConfig], multiprocessors: int) -> None:
        self._choices = dict(choices)
        self._multiprocessors = multiprocessors
        self._counters = Counters()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x ``[T, in]`` times weight ``[out, in]`` transposed, plus bias ``[out]``: ``[T, out]``.

        The first call on a device takes memory for the counters, so it must not be under capture.
        """
        config = self._choice(x, weight)
        if config is None:
            return functional.linear(x, weight, bias)
        return self.run(x, weight, bias, config)

    def _choice(self, x: torch.Tensor, weight: torch.Tensor) -> LinearConfig | None:
        if not self._choices or x.dtype.itemsize != 2 or x.dim() != 2 or x.stride(1) != 1:
            return None
        bucket = bucket_of(x.shape[0])
        if bucket is None or x.shape[0] == 0 or not weight.is_contiguous():
            return None
        return self._choices.get((bucket, weight.shape[1], weight.shape[0]))

    def run(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: LinearConfig
    ) -> torch.Tensor:
        """The same by our kernel, in any dtype; at least one token and at most the last bucket's."""
        (num_tokens, inputs), outputs = x.shape, weight.shape[0]
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
            x,
            _described(weight, config) if config.described else weight,
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
            EVEN_K=inputs % config.block_k == 0,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=config.warps,
            num_stages=config.stages,
        )
        return out


def _described(weight: torch.Tensor, config: LinearConfig) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k])
