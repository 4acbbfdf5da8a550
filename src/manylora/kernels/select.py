"""Which implementation of the operations serves a device."""

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
    """Where kernels are compiled when they are first launched: what compiles those of a start's steps ahead, side
    by side (``CompileAhead.rehearse``). Its processes end with the context."""
    if device.type != "cuda":
        yield None
        return
    from manylora.kernels.triton.ahead import CompileAhead

    ahead = CompileAhead()
    try:
        yield ahead.rehearse
    finally:
        ahead.close()


def ops_for(
    device: torch.device,
    *,
    attention: AttentionShape | None = None,
) -> Ops:
    """The operations to serve with on the device; Triton is imported only where it is wanted.

    ``attention``: the heads of the one model that will be served, for which the faster kernels are chosen on CUDA
    and compiled now; None: choices that hold for any.
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
