"""Which implementation of the operations serves a device."""

from __future__ import annotations

import torch

from manylora.kernels.ops import Ops


def ops_for(device: torch.device) -> Ops:
    """The operations to serve with on the device; Triton is imported only where it is wanted."""
    if device.type == "cpu":
        from manylora.kernels.cpu import CpuOps

        return CpuOps()
    if device.type == "cuda":
        from manylora.kernels.triton.operations import TritonOps

        return TritonOps()
    raise ValueError(f"no kernels for device type {device.type!r}: use cpu or cuda")
