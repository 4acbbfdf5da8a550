"""Which batches a profile measures: a grid along each of a step's numbers, and batches drawn at random.

Some of the random ones are held out from the fit. Knows no device; equal limits give equal batches.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from typing import Literal

_SHORTEST = 16
_MOST_PREFILLS = 4
_MOST_DRAWS = 200

_Kind = Literal["decode", "prefill", "both"]
_KINDS: tuple[_Kind, ...] = ("decode", "both", "decode", "prefill", "both")
"""The kinds of the random batches, in turn."""


@dataclasses.dataclass(frozen=True, slots=True)
class GridLimits:
    """What one batch may have. ``num_pages``: for KV; ``num_adapters``: resident ones, numbered from 0."""

    max_seqs: int
    max_tokens: int
    max_len: int
    num_pages: int
    page_tokens: int
    num_adapters: int


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """``contexts``: one decoding row each, with so many positions before it. ``prefills``: (positions before,
    tokens) of one row each. ``adapters`` go round the rows; without any all rows are the base model's."""

    contexts: tuple[int, ...] = ()
    prefills: tuple[tuple[int, int], ...] = ()
    adapters: tuple[int, ...] = ()
    is_held_out: bool = False

    @property
    def num_tokens(self) -> int:
        """The tokens that the step computes."""
        return len(self.contexts) + sum(tokens for _, tokens in self.prefills)

    def num_pages(self, page_tokens: int) -> int:
        """The pages of KV, where each row has its own."""
        ends = [context + 1 for context in self.contexts]
        ends += [start + tokens for start, tokens in self.prefills]
        return sum(-(-end // page_tokens) for end in ends)

    def fits(self, limits: GridLimits) -> bool:
        """Whether the engine could run it."""
        rows = len(self.contexts) + len(self.prefills)
        longest = max([context + 1 for context in self.contexts] + [sum(row) for row in self.prefills])
        return (
            rows <= limits.max_seqs
            and self.num_tokens <= limits.max_tokens
            and longest <= limits.max_len
            and self.num_pages(limits.page_tokens) <= limits.num_pages
            and len(self.adapters) <= min(rows, limits.num_adapters)
        )


def make_batches(limits: GridLimits, is_quick: bool) -> list[Batch]:
    """All batches, shuffled, so that a machine that slows down bends no one direction. Each is there once."""
    random_source = random.Random(0)
    grid = dict.fromkeys([*_decoding(limits, is_quick), *_prefilling(limits, is_quick)])
    seen = [batch for batch in grid if batch.fits(limits)]
    num_random = 24 if is_quick else 72
    for number in range(num_random):
        batch = _random_batch(_KINDS[number % len(_KINDS)], limits, random_source)
        seen.append(dataclasses.replace(batch, is_held_out=number % 2 == 0))
    random_source.shuffle(seen)
    return seen


def _steps(first: int, last: int, factor: int) -> list[int]:
    """first, first * factor, ... below last, and last."""
    values = []
    while first < last:
        values.append(first)
        first *= factor
    return [*values, last]


def _decoding(limits: GridLimits, is_quick: bool) -> Iterator[Batch]:
    for count in _steps(1, limits.max_seqs, 4 if is_quick else 2):
        for context in _steps(_SHORTEST, limits.max_len - 1, 16 if is_quick else 4):
            contexts = (context,) * count
            yield Batch(contexts)
            yield Batch(contexts, adapters=_some(1, limits))
            yield Batch(contexts, adapters=_some(count, limits))


def _prefilling(limits: GridLimits, is_quick: bool) -> Iterator[Batch]:
    longest = min(limits.max_len, limits.max_tokens)
    for tokens in _steps(_SHORTEST, longest, 4 if is_quick else 2):
        for start in (0, limits.max_len // 2):
            yield Batch(prefills=((start, tokens),))
            yield Batch(prefills=((start, tokens),), adapters=_some(1, limits))
        several = ((0, max(1, tokens // _MOST_PREFILLS)),) * _MOST_PREFILLS
        yield Batch(prefills=several)
        yield Batch(prefills=several, adapters=_some(_MOST_PREFILLS, limits))


def _some(count: int, limits: GridLimits) -> tuple[int, ...]:
    return tuple(range(min(count, limits.num_adapters)))


def _random_batch(kind: _Kind, limits: GridLimits, source: random.Random) -> Batch:
    """One of the kind, or one that decodes where the limits leave no room for it."""
    for _ in range(_MOST_DRAWS):
        batch = _draw(kind, limits, source)
        if batch.fits(limits):
            return batch
    return Batch((1,))


def _draw(kind: _Kind, limits: GridLimits, source: random.Random) -> Batch:
    contexts: tuple[int, ...] = ()
    prefills: list[tuple[int, int]] = []
    if kind != "prefill":
        count = _log_uniform(1, limits.max_seqs, source)
        typical = _log_uniform(1, limits.max_len - 1, source)
        contexts = tuple(source.randint(max(1, typical // 2), typical) for _ in range(count))
    if kind != "decode":
        for _ in range(source.randint(1, _MOST_PREFILLS)):
            tokens = _log_uniform(2, min(limits.max_len, limits.max_tokens), source)
            start = 0 if source.random() < 0.6 else source.randint(0, limits.max_len - tokens)
            prefills.append((start, tokens))
    most = min(len(contexts) + len(prefills), limits.num_adapters)
    chosen: list[int] = []
    if most and source.random() < 0.75:
        chosen = source.sample(range(limits.num_adapters), _log_uniform(1, most, source))
    return Batch(contexts, tuple(prefills), tuple(chosen))


def _log_uniform(least: int, most: int, source: random.Random) -> int:
    """Each doubling is as likely as the next."""
    return min(most, max(least, round(least * math.pow(most / least, source.random()))))
