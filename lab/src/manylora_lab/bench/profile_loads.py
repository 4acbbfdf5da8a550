"""Loads under which a profile watches the engine, and what its log of steps comes to.

A load is a number of clients that converse for a while, each its next turn after the reply. Loads differ in all
that a step's time may depend on, over doublings; none is like any workload. Equal limits give equal loads.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence

from manylora.config.declaring import ConfigError
from manylora_lab.bench.step_log import LoggedStep, LoggedTransfer
from manylora_lab.bench.targets import EngineTarget, TargetRequest
from manylora_lab.pricing.costs import IDLE_S, StepWork
from manylora_lab.pricing.profile import OverheadPoint, StepPoint, TransferPoint
from manylora_lab.pricing.ranks import RankedStep, RankLines, fit_rank_lines

_REPLY = 24
_LONG_REPLY = 96
"""Of few clients. Where steps are short, a prompt leaves its mark on those after it, on a CPU for the weights that
it drove out of the caches; replies must be long enough for steps without."""
_FEW = 4
_TURNS, _MANY_TURNS = 3, 8
_SHORT_TURNS = (2, 8)
"""Of many turns the longest, in ``_SHORTEST``s: a few new tokens after a history are most of a chat's prompts.
Many clients, which take longest, do the second only."""
_MOST_CROWDED = 1024
"""Tokens of each client of too small a pool."""
_SHORTEST = 16
_MOST_TOKENS = 65536
"""The most tokens of one load's prompts."""
_VOCABULARY = range(3, 250)

_ALIKE = 0.2
"""Steps whose numbers all differ by less than about this share count as one batch."""
_STALL = 4.0
"""Times the median of its like: a stall, not what a step takes."""
_HELD_OUT = 4
"""Every so many batches one is kept from the fit."""
_PAUSE_S = 0.1
"""Between requests that come alone: cold by then."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClientLoad:
    """``clients`` at once, each of ``turns`` turns. ``context``: tokens of a first prompt; ``reply``: of each
    reply on average; where there are several turns both vary. ``adapters`` go round the clients."""

    clients: int
    context: int
    adapters: int
    turns: int = 1
    reply: int = _REPLY


@dataclasses.dataclass(frozen=True, slots=True)
class EngineCapacity:
    """What an engine can take at once. ``num_tokens``: of KV beside the adapters."""

    max_seqs: int
    max_len: int
    num_tokens: int
    num_adapters: int


def make_loads(room: EngineCapacity, is_quick: bool) -> list[ClientLoad]:
    """All loads, shuffled, so that a machine that slows down bends no one direction."""
    found = []
    for clients in _doublings(1, room.max_seqs, 4 if is_quick else 2):
        each = min(room.max_len, min(room.num_tokens, _MOST_TOKENS) // clients)
        reply = max(1, min(_LONG_REPLY if clients <= _FEW else _REPLY, each // 4))
        longest = each - reply - 1
        if longest < 1:
            continue
        shortest = min(_SHORTEST, longest)
        middle = round((shortest * longest) ** 0.5)
        many = min(clients, room.num_adapters)
        kinds = [(shortest, 0), (shortest, many), (longest, 0), (longest, many), (longest, 1), (middle, 1)]
        found += [ClientLoad(clients, context, min(adapters, many), 1, reply) for context, adapters in kinds]
        # Several turns grow, and come while others decode.
        found += [
            ClientLoad(clients, max(1, context // _TURNS), many, _TURNS, reply)
            for context in (middle, longest)
        ]
        found.append(ClientLoad(clients, max(1, longest // _TURNS), 0, _TURNS, reply))
        most = each // _MANY_TURNS - _REPLY
        found += [
            ClientLoad(clients, min(times * _SHORTEST, most), many, _MANY_TURNS)
            for times in (_SHORT_TURNS if clients <= _FEW else _SHORT_TURNS[-1:])
            if most >= 1
        ]
    found = list(dict.fromkeys(found))
    random.Random(0).shuffle(found)
    return found


def busy_load(room: EngineCapacity) -> ClientLoad:
    """For ``read_under_load``: rows that decode, a quarter of the engine's most."""
    each = max(1, min(room.max_len, room.num_tokens) // 4)
    return ClientLoad(max(1, room.max_seqs // 4), min(_SHORTEST, each), 0, reply=min(_REPLY, each))


def crowded_load(room: EngineCapacity, host_tokens: int) -> ClientLoad:
    """Clients whose histories, in a pool of half their size, come and go between two tiers; ``host_tokens``: what
    the other one holds."""
    clients = min(_FEW, room.max_seqs)
    each = max(1, min(room.max_len, _MOST_CROWDED, host_tokens // (2 * clients)))
    reply = max(1, min(_REPLY, each // (2 * _MANY_TURNS)))
    context = max(1, each // _MANY_TURNS - reply)
    return ClientLoad(clients, context, min(clients, room.num_adapters), _MANY_TURNS, reply)


def _doublings(first: int, last: int, factor: int) -> list[int]:
    values = []
    while first < last:
        values.append(first)
        first *= factor
    return [*values, last]


# ---------------------------------------------------------------- under load


async def run_load(target: EngineTarget, load: ClientLoad, adapters: Sequence[str], seed: int) -> None:
    """Serves until every client has had its turns; raises ConfigError where a request fails."""
    source = random.Random(seed)
    plans = [list(_turns(load, target.max_model_len or load.context, source)) for _ in range(load.clients)]
    names = [adapters[number % load.adapters] if load.adapters else None for number in range(load.clients)]
    await asyncio.gather(*(_converse(target, plan, name) for plan, name in zip(plans, names)))


async def read_under_load(target: EngineTarget, load: ClientLoad, adapters: Sequence[str], seed: int) -> None:
    """Ask for each adapter once, one after another, while the load's clients speak without adapters: an engine at
    work slows the reader, which shares its processor and its interpreter. Raises ConfigError."""
    source = random.Random(seed)
    is_over = False

    async def speak(prompt: tuple[int, ...]) -> None:
        while not is_over:
            await _converse(target, [(prompt, load.reply)], None)

    async def read() -> None:
        nonlocal is_over
        try:
            for adapter in adapters:
                await _converse(target, [(tuple(source.choices(_VOCABULARY, k=_SHORTEST)), 1)], adapter)
        finally:
            is_over = True

    prompts = [tuple(source.choices(_VOCABULARY, k=load.context)) for _ in range(load.clients)]
    await asyncio.gather(read(), *(speak(prompt) for prompt in prompts))


async def wake(
    target: EngineTarget, adapters: Sequence[str], lengths: Sequence[int], count: int, seed: int
) -> list[float]:
    """``count`` prompts that each find the engine idle, of lengths between these two, alike in their logarithms.
    Every other has an adapter. Returns when each had its token, on ``time.monotonic``. Raises ConfigError."""
    source = random.Random(seed)
    answered_s = []
    for number in range(count):
        await asyncio.sleep(_PAUSE_S)
        length = round(math.exp(source.uniform(*map(math.log, lengths))))
        prompt = tuple(source.choices(_VOCABULARY, k=length))
        adapter = adapters[number % len(adapters)] if number % 2 and adapters else None
        answered_s.append(await _converse(target, [(prompt, 1)], adapter))
    return answered_s


async def _converse(
    target: EngineTarget, turns: Iterable[tuple[tuple[int, ...], int]], adapter: str | None
) -> float:
    """Returns when the last reply began."""
    history: tuple[int, ...] = ()
    first_s = 0.0
    for new, num_reply in turns:
        prompt = (*history, *new)
        answer = await target.generate(TargetRequest(prompt, num_reply, adapter))
        if answer.error is not None:
            raise ConfigError(f"the engine could not run a prompt of {len(prompt)} tokens: {answer.error}")
        history, first_s = (*prompt, *answer.tokens), answer.first_s or first_s
    return first_s


def _turns(load: ClientLoad, most: int, source: random.Random) -> Iterator[tuple[tuple[int, ...], int]]:
    """What is said in each turn, and how long the reply is to be."""
    said = 0
    for turn in range(load.turns):
        num_new, num_reply = load.context, load.reply
        if load.turns > 1:
            num_new = max(
                1, round(load.context * (source.uniform(0.5, 1.5) if turn == 0 else source.random()))
            )
            num_reply = max(1, round(load.reply * source.uniform(0.2, 1.8)))
        said += num_new + num_reply
        if said >= most:
            return
        yield tuple(source.choices(_VOCABULARY, k=num_new)), num_reply


# ---------------------------------------------------------------- what was seen


def step_points(steps: Sequence[LoggedStep], is_cold: bool = False) -> list[StepPoint]:
    """Batches that are alike, each with the mean of its times; in an order that depends on nothing but them.

    Of steps after idling (``IDLE_S``) if ``is_cold``, none of them held out; else of the others.
    """
    groups: dict[tuple[int, ...], list[LoggedStep]] = {}
    for step in steps:
        if (step.idle_s >= IDLE_S) == is_cold:
            groups.setdefault(_kind(step.work), []).append(step)
    points = []
    for number, kind in enumerate(sorted(groups)):
        kept = _without_stalls(groups[kind])
        means = StepWork(*(round(statistics.fmean(values)) for values in zip(*(step.work for step in kept))))
        points.append(
            StepPoint(
                **means._asdict(),
                seconds=_rounded(statistics.fmean(step.took_s for step in kept)),
                is_held_out=number % _HELD_OUT == _HELD_OUT - 1 and not is_cold,
                num_steps=len(kept),
            )
        )
    return points


def rank_lines(steps: Sequence[LoggedStep]) -> RankLines | None:
    """Steps that come at once, by the ranks of their adapters where they only decode, and by their tokens where
    they only prefill."""
    warm = [step for step in steps if step.idle_s < IDLE_S]
    decodes = [
        RankedStep(*step.ranks, step.took_s)
        for step in warm
        if step.ranks[0] and not step.work.num_prefill_tokens
    ]
    points = [point for point in step_points(warm) if not point.num_decodes]
    prefills = [(point.num_prefill_tokens, point.seconds) for point in points]
    return fit_rank_lines(_without_outliers(decodes), prefills)


def _without_outliers(steps: Sequence[RankedStep]) -> list[RankedStep]:
    groups: dict[tuple[int, int], list[RankedStep]] = {}
    for step in steps:
        groups.setdefault((step.rank_sum, step.rank_padded), []).append(step)
    kept = []
    for alike in groups.values():
        most_s = _STALL * statistics.median(step.seconds for step in alike)
        kept += [step for step in alike if step.seconds <= most_s]
    return kept


def _kind(work: StepWork) -> tuple[int, ...]:
    """Equal for batches that are alike: every number to a few steps a doubling."""
    return tuple(_level(number) for number in work)


def _level(number: int) -> int:
    level, size = 0, 1.0
    while size <= number:
        size *= 1 + _ALIKE
        level += 1
    return level


def _without_stalls(steps: Sequence[LoggedStep]) -> list[LoggedStep]:
    most_s = _STALL * statistics.median(step.took_s for step in steps)
    return [step for step in steps if step.took_s <= most_s]


def read_points(reads: Sequence[LoggedTransfer], alone: Sequence[TransferPoint]) -> list[TransferPoint]:
    """Mean times of reads by their sizes, each way as in the engine where it read that way, else ``alone``."""
    groups: dict[tuple[bool, int], list[float]] = {}
    for read in reads:
        groups.setdefault((read.to_device, read.num_bytes), []).append(read.took_s)
    points = [TransferPoint(*kind, _rounded(statistics.fmean(took))) for kind, took in sorted(groups.items())]
    ways = {point.to_device for point in points}
    return points + [point for point in alone if point.to_device not in ways]


def overhead_points(steps: Sequence[LoggedStep]) -> list[OverheadPoint]:
    """Mean times before a step that follows at once, by doublings of its rows and of those taken up in it."""
    groups: dict[tuple[int, int], list[tuple[int, float, int]]] = {}
    for step in steps:
        if step.gap_s is not None:
            kind = step.num_rows.bit_length(), step.num_new.bit_length()
            groups.setdefault(kind, []).append((step.num_rows, step.gap_s, step.num_new))
    points = []
    for _, found in sorted(groups.items()):
        most_s = _STALL * statistics.median(gap_s for _, gap_s, _ in found)
        rows, gaps_s, new = zip(*(one for one in found if one[1] <= most_s))
        means = statistics.fmean(rows), statistics.fmean(gaps_s), statistics.fmean(new)
        points.append(OverheadPoint(round(means[0]), _rounded(means[1]), round(means[2])))
    return points


def answer_time_s(steps: Sequence[LoggedStep], answered_s: Sequence[float]) -> float:
    """The median from a step's end until the client of its only token had it; 0 for none.

    ``answered_s``: of each, in order, as ``wake`` returns them."""
    ends = [step.began_s + step.took_s for step in steps]
    waits = [
        moment - ends[after - 1] for moment in answered_s if (after := bisect.bisect_right(ends, moment))
    ]
    return _rounded(statistics.median(waits)) if waits else 0.0


def _rounded(seconds: float) -> float:
    return max(float(f"{seconds:.6g}"), 1e-9)
