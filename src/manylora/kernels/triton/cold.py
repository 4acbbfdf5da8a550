"""Triton kernels for cold starts: waits on the device, and copies that say on the device what has landed.

The waits are for what another stream copies, or for CPU threads; owns their bound in time, which later work of
their stream reads. The copies bring pages from pinned host memory, group of layers by group of layers, all by one
launch. A copy engine wants a call of the driver for each group, and one for each word; so the thread that makes
them, and the step loop's beside it, wait for each other. Does not know what is awaited or copied.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from manylora.kernels.ops import BRING_PROGRAMS, HEAD, MOST_WORDS, PER_GROUP
from manylora.kernels.triton.launch import power_of_two

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


_BLOCK, _WARPS = 2048, 4


@triton.jit
def bring_groups_kernel(
    target,
    source,
    table,
    scratch,
    words,
    done,
    HEAD: tl.constexpr,
    PER_GROUP: tl.constexpr,
    MOST_WORDS: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """See ``bring_groups``. All int64 but ``done``, int32: how many programs have ended a group; zeros before and
    after. ``scratch`` [programs, MOST_WORDS]: the table as each program keeps it, near."""
    program = tl.program_id(0).to(tl.int64)
    num_programs = tl.num_programs(0)
    near = scratch + program * MOST_WORDS
    places = tl.arange(0, MOST_WORDS)
    length = tl.load(table)
    tl.store(near + places, tl.load(table + places, mask=places < length, other=0))
    tl.debug_barrier()
    num_pages = tl.load(near + 1)
    num_groups = tl.load(near + 2)
    number = tl.load(near + 3)
    pages = near + HEAD + PER_GROUP * num_groups
    group = num_groups * 0
    while group < num_groups:
        described = near + HEAD + PER_GROUP * group
        first = tl.load(described)
        size = tl.load(described + 1)
        blocks = (size + BLOCK - 1) // BLOCK
        block = program
        while block < num_pages * blocks:
            page = block // blocks
            inside = (block - page * blocks) * BLOCK + tl.arange(0, BLOCK)
            to = tl.load(pages + page) + first
            of = tl.load(pages + num_pages + page) + first
            moved = tl.load(source + of + inside, mask=inside < size, other=0)
            tl.store(target + to + inside, moved, mask=inside < size)
            block += num_programs
        # What all threads of the program wrote is there before it is counted, and all that is counted before the
        # group's word says so.
        tl.debug_barrier()
        if tl.atomic_add(done + group, 1, sem="acq_rel") == num_programs - 1:
            tl.store(done + group, 0)
            tl.atomic_xchg(words + group * STRIDE, number, sem="release")
        group += 1


def bring_groups(
    target: torch.Tensor,
    source: torch.Tensor,
    table: torch.Tensor,
    scratch: torch.Tensor,
    words: torch.Tensor,
    done: torch.Tensor,
) -> None:
    """Launch it: computes ``Ops.bring_groups``."""
    bring_groups_kernel[(BRING_PROGRAMS,)](
        target, source, table, scratch, words, done,
        HEAD=HEAD, PER_GROUP=PER_GROUP, MOST_WORDS=MOST_WORDS, STRIDE=words.stride(0), BLOCK=_BLOCK,
        num_warps=_WARPS,
    )  # fmt: skip
