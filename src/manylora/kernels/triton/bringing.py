"""A Triton kernel that copies pages from pinned host memory, group of layers by group of layers, and says on the
device what has landed: all of a copy by one launch.

A copy engine wants a call of the driver for each group, and one for each word; so the thread that makes them, and
the step loop's beside it, wait for each other. Does not know what is copied, nor what waits for the words.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from manylora.kernels.bring_table import HEAD, MOST_WORDS, NUM_PROGRAMS, PER_GROUP

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
    """Launch it: copy pages of ``source``, pinned, to ``target``, both int64 and flat.

    ``table``, pinned too: see ``bring_table``. ``words`` int64 [G], of any stride: a group's is written once it
    and all before it have landed. ``scratch`` int64 [NUM_PROGRAMS, MOST_WORDS]; ``done`` int32 [G], zeros.
    """
    bring_groups_kernel[(NUM_PROGRAMS,)](
        target, source, table, scratch, words, done,
        HEAD=HEAD, PER_GROUP=PER_GROUP, MOST_WORDS=MOST_WORDS, STRIDE=words.stride(0), BLOCK=_BLOCK,
        num_warps=_WARPS,
    )  # fmt: skip
