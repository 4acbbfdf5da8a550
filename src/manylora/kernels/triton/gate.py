"""Triton kernels that wait on the device: until what another stream copies has landed, until CPU threads are done.

Owns the bound of these waits in time. Does not know what is awaited; later work of their stream reads it.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from manylora.kernels.triton.plans import power_of_two

_LOOK_NS = 100_000
"""About what a look takes in Triton's interpreter, which has no clock."""


@triton.jit
def _now(looks, HAS_CLOCK: tl.constexpr, LOOK_NS: tl.constexpr):
    """Nanoseconds from any moment; without a clock each look counts for ``LOOK_NS``."""
    if HAS_CLOCK:
        return globaltimer()
    return looks * LOOK_NS


@triton.jit
def pass_gate_kernel(
    landed,
    wanted,
    told,
    FIRST: tl.constexpr,
    HAS_CLOCK: tl.constexpr,
    LOOK_NS: tl.constexpr,
):
    """Ends once ``landed`` [1] is at least ``wanted[1]``, or the step's gates have been shut for ``wanted[0]``
    nanoseconds in all. ``told``: for how many they were, and whether that was too long; the FIRST gate of a step
    begins it anew. All int64. One program."""
    left = tl.load(wanted)
    number = tl.load(wanted + 1)
    spent = left * 0
    was_late = left * 0
    if not FIRST:
        spent = tl.load(told)
        was_late = tl.load(told + 1)
    seen = tl.load(landed, volatile=True)
    shut = left * 0
    if seen < number:
        looks = left * 0
        began = _now(looks, HAS_CLOCK, LOOK_NS)
        while (seen < number) & (spent + shut < left):
            looks += 1
            seen = tl.load(landed, volatile=True)
            shut = _now(looks, HAS_CLOCK, LOOK_NS) - began
    is_late = (seen < number).to(tl.int64)
    tl.store(told, spent + shut)
    tl.store(told + 1, was_late | is_late)


def pass_gate(landed: torch.Tensor, wanted: torch.Tensor, told: torch.Tensor, is_first: bool) -> None:
    """Launch it."""
    pass_gate_kernel[(1,)](
        landed,
        wanted,
        told,
        FIRST=is_first,
        HAS_CLOCK=landed.is_cuda,
        LOOK_NS=_LOOK_NS,
        num_warps=1,
    )


@triton.jit
def await_words_kernel(
    words,
    wanted,
    told,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    HAS_CLOCK: tl.constexpr,
    LOOK_NS: tl.constexpr,
):
    """Ends once COUNT of ``words``, STRIDE apart, are at least ``wanted[1:]``, or the step has waited for
    ``wanted[0]`` nanoseconds in all. ``told``: as above. All int64. SIZE: COUNT, rounded up. One program."""
    offsets = tl.arange(0, SIZE)
    is_word = offsets < COUNT
    left = tl.load(wanted)
    numbers = tl.load(wanted + 1 + offsets, mask=is_word, other=0)
    spent = left * 0
    was_late = left * 0
    if not FIRST:
        spent = tl.load(told)
        was_late = tl.load(told + 1)
    seen = tl.load(words + offsets * STRIDE, mask=is_word, other=0, volatile=True)
    behind = tl.sum((seen < numbers).to(tl.int64), axis=0)
    shut = left * 0
    if behind > 0:
        looks = left * 0
        began = _now(looks, HAS_CLOCK, LOOK_NS)
        while (behind > 0) & (spent + shut < left):
            looks += 1
            seen = tl.load(words + offsets * STRIDE, mask=is_word, other=0, volatile=True)
            behind = tl.sum((seen < numbers).to(tl.int64), axis=0)
            shut = _now(looks, HAS_CLOCK, LOOK_NS) - began
    tl.store(told, spent + shut)
    tl.store(told + 1, was_late | (behind > 0).to(tl.int64))


def await_words(words: torch.Tensor, wanted: torch.Tensor, told: torch.Tensor, is_first: bool) -> None:
    """Launch it. ``words`` int64 ``[COUNT, STRIDE]``, pinned."""
    count = len(words)
    await_words_kernel[(1,)](
        words,
        wanted,
        told,
        COUNT=count,
        SIZE=power_of_two(count),
        STRIDE=words.stride(0),
        FIRST=is_first,
        HAS_CLOCK=told.is_cuda,
        LOOK_NS=_LOOK_NS,
        num_warps=1,
    )
