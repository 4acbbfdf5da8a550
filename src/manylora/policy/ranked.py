"""The queue where requests have priorities, clients are served alike, or few adapters run at once.

Whatever it is asked for takes O(log n) a sequence, for n that wait (``lines``).
"""

from __future__ import annotations

from manylora.config import QueueConfig
from manylora.policy.ageing import Ageing
from manylora.policy.fair import FairShares
from manylora.policy.lines import LinePlace, Ranks
from manylora.policy.queues import Rank, WaitingQueue
from manylora.policy.sequences import Sequence
from manylora.types import AdapterId, SequenceId


def waiting_queue(config: QueueConfig, knows_adapters: bool = False) -> WaitingQueue:
    """The queue for these settings; where what it knows beyond arrival is not asked for, it costs nothing."""
    if knows_adapters or config.is_fair or config.has_priorities or config.adapter_limit is not None:
        return RankedQueue(config, knows_adapters)
    return WaitingQueue()


class RankedQueue(WaitingQueue):
    """In line by priority; then those that return before those that still wait for the first time; of these the
    client is next that was served least (``fair``); then the oldest or the newest comes.

    ``knows_adapters``: whether it knows which is the first of each adapter, as it does where these are limited.
    """

    def __init__(self, config: QueueConfig, knows_adapters: bool = False) -> None:
        super().__init__()
        self.adapter_limit = config.adapter_limit
        self.knows_adapters = knows_adapters or self.adapter_limit is not None
        self.shares = FairShares(config) if config.is_fair else None
        self._age_s, self._floor = config.priority_age_s, config.priority_floor
        self._ageing = Ageing()
        self._all = Ranks(self.shares)
        self._of_adapter: dict[AdapterId, Ranks] = {}
        self._places: dict[SequenceId, LinePlace] = {}

    # ------------------------------------------------------------ coming and going

    def arrive(self, sequence: Sequence) -> None:
        """See WaitingQueue."""
        super().arrive(sequence)
        self._join(sequence, is_new=True)

    def put_back(self, sequence: Sequence) -> None:
        """See WaitingQueue."""
        super().put_back(sequence)
        self._join(sequence, is_new=False)

    def _join(self, sequence: Sequence, is_new: bool) -> None:
        client = 0
        if self.shares is not None:
            self.shares.joined(sequence)
            client = self.shares.client_of(sequence) if is_new else 0
        level = sequence.state.request.priority
        self._enter(sequence, LinePlace(level, is_new, client))
        if self._age_s is not None and level > self._floor:
            self._ageing.add(sequence, sequence.state.arrived_s + self._age_s)

    def admit(self, sequence: Sequence, num_cached: int) -> None:
        """See WaitingQueue."""
        if self.shares is not None:
            self.shares.admitted(sequence, num_cached)
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """See WaitingQueue."""
        super().remove(sequence)
        self._leave(sequence)
        if self.shares is not None:
            self.shares.left(sequence)
        self._ageing.drop(sequence)

    def _enter(self, sequence: Sequence, place: LinePlace) -> None:
        self._places[sequence.id] = place
        self._all.add(sequence, place)
        if self.knows_adapters:
            ranks = self._of_adapter.get(sequence.adapter)
            if ranks is None:
                ranks = self._of_adapter[sequence.adapter] = Ranks(self.shares)
            ranks.add(sequence, place)

    def _leave(self, sequence: Sequence) -> LinePlace:
        place = self._places.pop(sequence.id)
        self._all.drop(sequence, place)
        if self.knows_adapters:
            ranks = self._of_adapter[sequence.adapter]
            ranks.drop(sequence, place)
            if not ranks:
                del self._of_adapter[sequence.adapter]
        return place

    def forget(self, adapter: AdapterId) -> None:
        """See WaitingQueue."""
        if self.shares is not None:
            self.shares.forget(adapter)

    def age(self, now: float) -> None:
        """See WaitingQueue."""
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
        """See WaitingQueue."""
        return self._all.first(self.is_newest_first)

    def first_of(self, adapter: AdapterId) -> Sequence | None:
        """The first in line among those of one adapter, where the queue ``knows_adapters``."""
        assert self.knows_adapters
        ranks = self._of_adapter.get(adapter)
        return None if ranks is None else ranks.first(self.is_newest_first)

    def first_beside(self, sequence: Sequence, adapter: AdapterId) -> Sequence | None:
        """The first among those of an adapter that differ from the sequence in nothing but when they came, where
        the queue ``knows_adapters``."""
        assert self.knows_adapters
        ranks = self._of_adapter.get(adapter)
        return None if ranks is None else ranks.first_at(self._places[sequence.id], self.is_newest_first)

    def rank(self, sequence: Sequence) -> Rank:
        """See WaitingQueue."""
        level, is_new, client = self._places[sequence.id]
        counter = self.shares.counter(client) if self.shares is not None and is_new else 0
        return (level, is_new, counter, client, *self._rank_among_equals(sequence, is_new))

    def leading(self, count: int) -> list[Sequence]:
        """See WaitingQueue."""
        if self.shares is None and self._all.num_levels <= 1:
            return super().leading(count)
        taken: list[tuple[Sequence, LinePlace, int]] = []
        while len(taken) < count and (sequence := self.first()) is not None:
            place = self._leave(sequence)
            ahead = 0 if self.shares is None else self.shares.charge_ahead(sequence)
            taken.append((sequence, place, ahead))
        if self.shares is not None:
            for sequence, _, ahead in taken:
                self.shares.give_back(sequence, ahead)
            for client in {self.shares.client_of(sequence) for sequence, _, _ in taken}:
                self._all.counter_fell(client)
        for sequence, place, _ in taken:
            self._enter(sequence, place)
        return [sequence for sequence, _, _ in taken]
