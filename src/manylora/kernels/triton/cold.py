"""Waits and copies on the device for cold starts, by Triton kernels.

A wait is for another stream's copies or for CPU threads. The module owns the time limit of the waits, and
records for later work of their stream whether it was exceeded. A copy brings pages from pinned host memory,
one group of layers after the other, in a single launch, and marks on the device which groups have landed. A
copy engine would need one driver call for each group and one for each mark. The thread that makes these calls
and the step loop's thread would then wait for each other. The module does not know what is awaited or copied.
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
"""Nanoseconds that one look at memory takes, roughly, in Triton's interpreter, which has no clock."""


@triton.jit
def _now(looks, HAS_CLOCK: tl.constexpr, LOOK_NS: tl.constexpr):
    """Return nanoseconds since some fixed moment. Without a clock, each look counts as ``LOOK_NS``."""
    if HAS_CLOCK:
        return globaltimer()
    return looks * LOOK_NS


@triton.jit
def pass_gate_kernel(
    landed, wanted, told, FIRST: tl.constexpr, HAS_CLOCK: tl.constexpr, LOOK_NS: tl.constexpr
):
    """Wait until ``landed`` [1] is at least ``wanted[1]``, or the step's gates have used up their time.

    ``wanted[0]`` is the number of nanoseconds that all gates of a step may wait together.
    ``told`` [2] accumulates over a step's gates: the nanoseconds waited, and 1 where a gate timed out. The
    FIRST gate of a step resets it. All tensors are int64. One program."""
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
    """Launch ``pass_gate_kernel``, as ``Ops.pass_gate``."""
    pass_gate_kernel[(1,)](
        landed, wanted, told, FIRST=is_first, HAS_CLOCK=landed.is_cuda, LOOK_NS=_LOOK_NS, num_warps=1
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
    """Wait until each of COUNT ``words``, STRIDE apart, is at least its number in ``wanted[1:]``.

    The wait ends early once the step has waited ``wanted[0]`` nanoseconds in all. ``told``: as in
    ``pass_gate_kernel``. All tensors are int64. SIZE: COUNT, rounded up to a power of two. One program."""
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
    """Launch ``await_words_kernel``, as ``Ops.await_words``. ``words`` int64 ``[COUNT, STRIDE]``, pinned."""
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
    """Copy pages from ``source`` to ``target``, group by group, as ``Ops.bring_groups`` specifies.

    ``done`` int32 counts the programs that have finished each group; it is zero before and after. ``scratch``
    [programs, MOST_WORDS] holds each program's own copy of ``table`` in device memory. All but ``done`` are
    int64.
    """
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
        # The barrier completes the writes of all the program's threads before the program is counted. The
        # last program to be counted writes the group's word, after all programs' writes.
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
    """Launch ``bring_groups_kernel``, as ``Ops.bring_groups``."""
    bring_groups_kernel[(BRING_PROGRAMS,)](
        target, source, table, scratch, words, done,
        HEAD=HEAD, PER_GROUP=PER_GROUP, MOST_WORDS=MOST_WORDS, STRIDE=words.stride(0), BLOCK=_BLOCK,
        num_warps=_WARPS,
    )  # fmt: skip
