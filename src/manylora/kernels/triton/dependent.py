"""Programmatic dependent launch: a kernel begins while the one before it on the stream still runs.

A kernel so launched calls ``begin_dependent`` in every program, before it reads what other kernels write and
before it writes anything. It lets the next one begin too, so that a chain of such kernels has no gaps for
launches; what it waits for is the end of the kernel before it, whose own wait was for the one before that.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin_dependent():
    """Let the next kernel of the stream begin, and wait for the end of the one before."""
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def ask_for(places, size):
    """Start to fetch ``size`` bytes, whole multiples of 16, from each of these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [places.to(tl.int64, bitcast=True), tl.full(places.shape, size, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def launch_options(dependent: bool) -> dict[str, bool]:
    """The options of a kernel with a constant DEPENDENT: that, and the launch's own."""
    return {"DEPENDENT": True, "launch_pdl": True} if dependent else {"DEPENDENT": False}


def can_depend(device: torch.device) -> bool:
    """Whether the device has dependent launches: NVIDIA's do from compute capability 9.0 on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return bool(torch.get_device_module(device).get_device_capability(device) >= (9, 0))
