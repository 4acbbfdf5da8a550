"""Chooses the implementation of the operations for a device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from manylora.kernels.flashinfer_attention import AttentionShape, serving_prompts
from manylora.kernels.ops import Ops


@contextlib.contextmanager
def compiling_ahead(
    device: torch.device,
) -> Iterator[Callable[[Sequence[Callable[[], object]], int], bool] | None]:
    """Yield ``CompileAhead.rehearse``, which compiles the kernels of a start's steps in several processes.

    The processes end with the context. Yields None for device types other than CUDA.
    """
    if device.type != "cuda":
        yield None
        return
    from manylora.kernels.triton.ahead import CompileAhead

    with contextlib.closing(CompileAhead()) as ahead:
        yield ahead.rehearse


def ops_for(device: torch.device, *, attention: AttentionShape | None = None) -> Ops:
    """Return the operations for the device. Triton is imported only for CUDA.

    ``attention``: the heads of the one model to serve. On CUDA, the fastest kernels are chosen for them, and
    FlashInfer's compilation starts now where it is among these. None: choices that work for any model. Raises
    ValueError for device types other than cpu and cuda.
    """
    if device.type == "cpu":
        from manylora.kernels.cpu import CpuOps

        return CpuOps()
    if device.type == "cuda":
        from manylora.kernels.triton.decode_table import stored_table
        from manylora.kernels.triton.operations import TritonOps
        from manylora.kernels.triton.products import products_on

        products = products_on(device)
        if attention is None:
            return TritonOps(products=products)
        name = torch.get_device_module(device).get_device_properties(device).name
        return TritonOps(
            products=products,
            decoding=stored_table(name, attention.heads // attention.kv_heads, attention.head_dim),
            prompts=serving_prompts(attention, device),
        )
    raise ValueError(f"no kernels for device type {device.type!r}: use cpu or cuda")
