"""The queue that sequences wait in. Owns their order; decides nothing.

Whatever it is asked for takes O(log n) a sequence, for n that wait (``lines``).
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable

from manylora.config import QueueConfig
from manylora.policy.ageing import Ageing
from manylora.policy.fair import FairShares
from manylora.policy.lines import Place, Ranks
from manylora.policy.sequences import Sequence
from manylora.types import AdapterId, SequenceId

_USUAL = QueueConfig()


class WaitingQueue:
    """In line by priority; then those that return (preempted, or a fork that found no room) before all that still
    wait for the first time; of these the client is next that was served least (``fair``); then the oldest or the
    newest comes, as ``is_newest_first`` says at the moment. Those that return come in arrival order.

    ``knows_adapters``: whether it knows which is the first of each adapter, as it does where these are limited.
    """

    def __init__(self, config: QueueConfig = _USUAL, knows_adapters: bool = False) -> None:
        self.is_newest_first = False
        self.adapter_limit = config.adapter_limit
        self.knows_adapters = knows_adapters or self.adapter_limit is not None
        self.shares = FairShares(config) if config.is_fair else None
        self._age_s, self._floor = config.priority_age_s, config.priority_floor
        self._all = Ranks(self.shares)
        self._of_adapter: dict[AdapterId, Ranks] = {}
        self._places: dict[SequenceId, Place] = {}
        self._returned: dict[SequenceId, Sequence] = {}
        # In arrival order. Either end of it is found at once, whatever has left; of a dict it is not.
        self._arrived = collections.OrderedDict[SequenceId, Sequence]()
        self._ageing = Ageing()
        self.num_by_adapter = collections.Counter[AdapterId]()
        """How many wait for each adapter that any waits for."""

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_arrived(self) -> int:
        """Requests that wait and were never admitted."""
        return len(self._arrived)

    # ------------------------------------------------------------ coming and going

    def arrive(self, sequence: Sequence) -> None:
        """A sequence of a new request, later than all others."""
        self._arrived[sequence.id] = sequence
        self._join(sequence, is_new=True)

    def put_back(self, sequence: Sequence) -> None:
        """A sequence of a request that was admitted before."""
        sequence.wait_again()
        self._returned[sequence.id] = sequence
        self._join(sequence, is_new=False)

    def _join(self, sequence: Sequence, is_new: bool) -> None:
        self.num_by_adapter[sequence.adapter] += 1
        client = 0
        if self.shares is not None:
            self.shares.joined(sequence)
            client = self.shares.client_of(sequence) if is_new else 0
        level = sequence.state.request.priority
        self._enter(sequence, Place(level, is_new, client))
        if self._age_s is not None and level > self._floor:
            self._ageing.add(sequence, sequence.state.arrived_s + self._age_s)

    def admit(self, sequence: Sequence, num_cached: int) -> None:
        """It leaves the queue to be served; so many tokens of it are cached."""
        if self.shares is not None:
            self.shares.admitted(sequence, num_cached)
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out, wherever it stands; the caller then changes its stage."""
        self._leave(sequence)
        if self._arrived.pop(sequence.id, None) is None:
            del self._returned[sequence.id]
        if self.shares is not None:
            self.shares.left(sequence)
        self._ageing.drop(sequence)
        self.num_by_adapter[sequence.adapter] -= 1
        if not self.num_by_adapter[sequence.adapter]:
            del self.num_by_adapter[sequence.adapter]

    def _enter(self, sequence: Sequence, place: Place) -> None:
        self._places[sequence.id] = place
        self._all.add(sequence, place)
        if self.knows_adapters:
            lines = self._of_adapter.get(sequence.adapter)
            if lines is None:
                lines = self._of_adapter[sequence.adapter] = Ranks(self.shares)
            lines.add(sequence, place)

    def _leave(self, sequence: Sequence) -> Place:
        place = self._places.pop(sequence.id)
        self._all.drop(sequence, place)
        if self.knows_adapters:
            lines = self._of_adapter[sequence.adapter]
            lines.drop(sequence, place)
            if not lines:
                del self._of_adapter[sequence.adapter]
        return place

    def forget(self, adapter: AdapterId) -> None:
        """The adapter is gone, and all its requests."""
        if self.shares is not None:
            self.shares.forget(adapter)

    def age(self, now: float) -> None:
        """Those that have waited long enough for it go up to another priority; O(log n) for each."""
        if self._age_s is None:
            return
        while (sequence := self._ageing.take_due(now)) is not None:
            waited_s = now - sequence.state.arrived_s
            level = max(sequence.state.request.priority - int(waited_s / self._age_s), self._floor)
            place = self._leave(sequence)
            # Due, it has gone up by one at least, however numbers were rounded.
            level = min(level, place.level - 1)
            self._enter(sequence, place._replace(level=level))
            if level > self._floor:
                num_levels = sequence.state.request.priority - level + 1
                self._ageing.add(sequence, sequence.state.arrived_s + num_levels * self._age_s)

    # ------------------------------------------------------------ asked

    def first(self) -> Sequence | None:
        """The first in line."""
        return self._all.first(self.is_newest_first)

    def first_of(self, adapter: AdapterId) -> Sequence | None:
        """The first in line among those of one adapter, where the queue knows them by adapter."""
        lines = self._of_adapter.get(adapter)
        return None if lines is None else lines.first(self.is_newest_first)

    def first_beside(self, sequence: Sequence, adapter: AdapterId) -> Sequence | None:
        """The first among those of an adapter that differ from the sequence in nothing but when they came."""
        lines = self._of_adapter.get(adapter)
        return None if lines is None else lines.first_at(self._places[sequence.id], self.is_newest_first)

    def rank(self, sequence: Sequence) -> tuple[int, bool, int, int, int, int]:
        """What of several sequences that wait has the least is the first in line."""
        level, is_new, client = self._places[sequence.id]
        counter = self.shares.counter(client) if self.shares is not None and is_new else 0
        order, sample = sequence.order
        if self.is_newest_first and is_new:
            order, sample = -order, -sample
        return level, is_new, counter, client, order, sample

    def leading(self, count: int) -> list[Sequence]:
        """The first few in line, in the order in which they would be admitted if no token came meanwhile."""
        if self.shares is None and self._all.num_levels <= 1:
            return self._leading_by_arrival(count)
        taken: list[tuple[Sequence, Place, int]] = []
        while len(taken) < count and (sequence := self.first()) is not None:
            place = self._leave(sequence)
            ahead = 0 if self.shares is None else self.shares.charge_ahead(sequence)
            taken.append((sequence, place, ahead))
        if self.shares is not None:
            for sequence, _, ahead in taken:
                self.shares.give_back(sequence, ahead)
        for sequence, place, _ in taken:
            self._enter(sequence, place)
        return [sequence for sequence, _, _ in taken]

    def _leading_by_arrival(self, count: int) -> list[Sequence]:
        leading = self._in_order(self._returned.values())[:count]
        arrived = reversed(self._arrived.values()) if self.is_newest_first else self._arrived.values()
        leading.extend(itertools.islice(arrived, count - len(leading)))
        return leading

    def arrived_until(self, moment: float) -> list[Sequence]:
        """Those that came by then and were never admitted, in arrival order."""
        early = []
        for sequence in self._arrived.values():
            if sequence.state.arrived_s > moment:
                break
            early.append(sequence)
        return early

    def members(self) -> list[Sequence]:
        """All that wait: those that returned, then the others, each in arrival order."""
        return self._in_order(self._returned.values()) + list(self._arrived.values())

    @staticmethod
    def _in_order(sequences: Iterable[Sequence]) -> list[Sequence]:
        return sorted(sequences, key=lambda sequence: sequence.order)
