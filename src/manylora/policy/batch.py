"""What runs in the next step: tokens per sequence within one budget, decodes and prompt chunks alike.

Every decoding sequence gets its token; what is left of the budget goes to prompt chunks, oldest first, then
to admissions, in the order that ``admission`` sets. Does not know what a page is.
"""

from __future__ import annotations

from collections.abc import Callable

from manylora.config import PolicyConfig
from manylora.policy.admission import Admission
from manylora.policy.queues import RUNNING, Scheduled, Sequence, WaitingQueue
from manylora.policy.reservations import Growth, Reservations

Note = Callable[[Sequence, float], None]
"""Told of a sequence, and of the time."""


def compose(
    config: PolicyConfig,
    held: Reservations,
    waiting: WaitingQueue,
    admission: Admission,
    now: float,
    note_admission: Note,
    refuse: Note,
) -> list[Scheduled]:
    """The rows of the next step; reserves what they need. Empty when nothing can run now.

    ``refuse`` ends the request of a sequence for which it is too late.
    """
    held.begin_step()
    rows, budget = _continue_running(config, held)
    if budget > 0 and len(held.holders) < config.max_num_seqs:
        for sequence in admission.begin_round(now):
            refuse(sequence, now)
        if len(waiting):
            num_before = len(held.holders)
            rows += _admit(config, held, waiting, budget, now, note_admission)
            admission.end_round(len(held.holders) - num_before)
    return rows


def _continue_running(config: PolicyConfig, held: Reservations) -> tuple[list[Scheduled], int]:
    """Rows of the holders, and the budget that is left."""
    page_tokens = config.page_tokens
    rows: list[Scheduled] = []
    unusual: list[tuple[int, int]] = []  # rows of more than one token or page, by place, with what remains
    num_longer = 0
    for sequence in held.holders:
        if sequence.stage is not RUNNING or (sequence.num_coming and sequence.must_wait):
            continue
        num_scheduled = sequence.num_scheduled
        remaining = len(sequence.tokens) + sequence.num_coming - num_scheduled
        if remaining > 1:
            num_longer += 1
            unusual.append((len(rows), remaining))
        elif num_scheduled >= len(sequence.pages) * page_tokens:
            unusual.append((len(rows), 1))
        rows.append((sequence, 1, 1 + sequence.num_unborn_forks))
    budget = config.max_batch_tokens - (len(rows) - num_longer)
    return _settle(rows, unusual, budget, held) if unusual else (rows, budget)


def _settle(
    rows: list[Scheduled], unusual: list[tuple[int, int]], budget: int, held: Reservations
) -> tuple[list[Scheduled], int]:
    """Cut prompt chunks to the budget and make room for who needs another page. Who finds none has no row, nor who
    is preempted for it: one that is newer, so never among earlier rows."""
    preemptions = held.num_preemptions
    for place, remaining in unusual:
        sequence = rows[place][0]
        if sequence.stage is not RUNNING:
            continue
        num_tokens = 1 if remaining == 1 else min(remaining, budget)
        # It may find no room, or none before a copy has ended; it keeps what it has and tries again.
        if num_tokens == 0 or held.grow(sequence, num_tokens) is not Growth.DONE:
            rows[place] = (sequence, 0, 0)
            continue
        if remaining > 1:
            budget -= num_tokens
        num_samples = 1 + sequence.num_unborn_forks if num_tokens == remaining else 0
        rows[place] = (sequence, num_tokens, num_samples)
    # Whoever was just preempted must not take the pages straight back from the one it made room for.
    if held.num_preemptions > preemptions:
        budget = 0
    return [row for row in rows if row[1] and row[0].stage is RUNNING], budget


def _admit(
    config: PolicyConfig,
    held: Reservations,
    waiting: WaitingQueue,
    budget: int,
    now: float,
    note_admission: Note,
) -> list[Scheduled]:
    """Admit one after the other; the first that cannot reserve stops those behind it (design §4)."""
    rows: list[Scheduled] = []
    while budget > 0 and len(held.holders) < config.max_num_seqs:
        sequence = waiting.first()
        # Whoever was preempted with a row in flight comes back when that has ended.
        if sequence is None or held.is_in_flight(sequence):
            break
        if not held.admit(sequence, budget, now):
            held.make_room_for_queue(budget)
            break
        note_admission(sequence, now)
        # One that waits for its adapter keeps its reservation and is passed by others.
        if sequence.stage is RUNNING:
            remaining = sequence.num_remaining
            num_tokens = min(remaining, budget)
            budget -= num_tokens
            num_samples = 1 + sequence.num_unborn_forks if num_tokens == remaining else 0
            rows.append((sequence, num_tokens, num_samples))
    return rows
