"""Which implementation of the operations serves a device."""

from __future__ import annotations

import importlib.util

import torch

from manylora.kernels.ops import Ops


def ops_for(device: torch.device, *, compiled: bool = False) -> Ops:
    """The operations to serve with on the device; Triton and Numba are imported only where they are wanted.

    ``compiled``: on a CPU, loops over the pool in float32 that run on one thread each, where Numba is there.
    """
    if device.type == "cpu":
        from manylora.kernels.cpu import CpuOps

        if compiled and importlib.util.find_spec("numba") is not None:
            from manylora.kernels.cpu_compiled import CompiledOps

            return CompiledOps()

        return CpuOps()
    if device.type == "cuda":
        from manylora.kernels.triton.operations import TritonOps
        from manylora.kernels.triton.products import products_on

        return TritonOps(products=products_on(device))
    raise ValueError(f"no kernels for device type {device.type!r}: use cpu or cuda")
