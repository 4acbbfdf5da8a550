"""The queue of waiting sequences. Owns their order: priority, then fairness among clients, then arrival.

Fairness is by virtual token counters (Sheng et al., OSDI '24): a counter is service over the client's share, in
integers.
"""

from __future__ import annotations

import bisect
import collections
import heapq
import itertools
from collections.abc import Callable
from typing import NamedTuple

from manylora.config.queueing import QueueConfig, as_share
from manylora.policy.sequences import Sequence, by_arrival
from manylora.reports import ClientUse
from manylora.types import AdapterId, SequenceId

HeapRank = tuple[float, int]

_SLACK = 16


class Ranking:
    """A heap of numbers by rank, the smallest first; each change takes O(log n). A number that was dropped, or
    has a new rank, leaves the heap when it reaches the top, or when half of the heap is stale."""

    def __init__(self) -> None:
        self._ranks: dict[int, HeapRank] = {}
        self._heap: list[tuple[float, int, int]] = []

    def put(self, number: int, rank: HeapRank) -> None:
        """Add a number, or change its rank."""
        if self._ranks.get(number) != rank:
            self._ranks[number] = rank
            heapq.heappush(self._heap, (*rank, number))
            self._shrink()

    def __contains__(self, number: int) -> bool:
        return number in self._ranks

    def rank(self, number: int) -> HeapRank:
        """Return the rank of a number that was put."""
        return self._ranks[number]

    def drop(self, number: int) -> None:
        del self._ranks[number]
        self._shrink()

    def _shrink(self) -> None:
        if len(self._heap) > 2 * len(self._ranks) + _SLACK:
            self._heap = [(*rank, number) for number, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def least(self) -> int | None:
        """Return the number of the smallest rank, or None."""
        heap = self._heap
        while heap:
            first, second, number = heap[0]
            if self._ranks.get(number) == (first, second):
                return number
            heapq.heappop(heap)
        return None

    def least_by(self, rank_of: Callable[[int], HeapRank]) -> int | None:
        """Return the smallest by ``rank_of``, whose ranks are never below those that were put."""
        while (number := self.least()) is not None:
            self.put(number, rank_of(number))
            if self.least() == number:
                return number
        return None


class FairShares:
    """Counters by client: an adapter, or the place of an API key.

    A client that comes back is lifted to the least counter among clients with waiting requests. If there is
    none, it is lifted to the counter of the client that left the queue last. So no client gains by having been
    away. A charge stays, whatever becomes of the request.
    """

    def __init__(self, config: QueueConfig) -> None:
        self._by_key = config.fair_by == "key"
        self._of_input, self._of_output, self._of_cached = config.weights
        self._scale = config.share_scale
        self._units: dict[int, int] = {}  # of a counter, for one of service
        self.counters: dict[int, int] = {}
        self._service: dict[int, int] = {}  # weighted tokens, since the client's first request
        self.num_waiting = collections.Counter[int]()
        """Sequences, by client."""
        self._waiting = Ranking()  # clients with waiting sequences, by what their counters were
        self._left_last: int | None = None
        self._floor = 0  # the counter of the client that left last, where it is forgotten

    def client_of(self, sequence: Sequence) -> int:
        return sequence.state.request.client if self._by_key else sequence.adapter

    def counter_of(self, sequence: Sequence) -> int:
        """Return the counter of the sequence's client."""
        return self.counters[self.client_of(sequence)]

    def uses(self) -> tuple[ClientUse, ...]:
        """Return the service of each client."""
        return tuple(
            ClientUse(client, service, self.counters[client] / self._scale)
            for client, service in self._service.items()
        )

    # ------------------------------------------------------------ the queue

    def joined(self, sequence: Sequence) -> None:
        """Count a sequence that joins the queue, and lift its client."""
        client = self.client_of(sequence)
        if client not in self.counters:
            share = as_share(sequence.state.request.share)
            self._units[client] = self._scale * share.denominator // share.numerator
            self.counters[client] = self._service[client] = 0
        if not self.num_waiting[client]:
            first = self._waiting.least_by(lambda client: (self.counters[client], client))  # they only grow
            before = self._left_last if first is None else first
            least = self._floor if before is None else self.counters[before]
            self.counters[client] = max(self.counters[client], least)
            self._waiting.put(client, (self.counters[client], client))
        self.num_waiting[client] += 1

    def left(self, sequence: Sequence) -> None:
        """Count a sequence that leaves the queue."""
        client = self.client_of(sequence)
        self.num_waiting[client] -= 1
        if not self.num_waiting[client]:
            del self.num_waiting[client]
            self._waiting.drop(client)
            self._left_last = client

    def forget(self, client: int) -> None:
        """Drop an adapter's account; no request of it is left."""
        if self._by_key or client not in self.counters:
            return
        if client == self._left_last:
            self._left_last, self._floor = None, self.counters[client]
        del self.counters[client], self._service[client], self._units[client]

    # ------------------------------------------------------------ service

    def admitted(self, sequence: Sequence, num_cached: int) -> None:
        """Charge for the prompt, of which ``num_cached`` tokens come from the cache.

        Computing it again after a preemption costs nothing.
        """
        if not sequence.state.admitted:
            num_computed = sequence.num_prompt - num_cached
            self._charge(sequence, num_computed * self._of_input + num_cached * self._of_cached)

    def drew(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge for generated tokens."""
        self._charge(sequence, num_tokens * self._of_output)

    def _charge(self, sequence: Sequence, service: int) -> None:
        client = self.client_of(sequence)
        self._service[client] += service
        self.counters[client] += service * self._units[client]

    def charge_ahead(self, sequence: Sequence) -> int:
        """Raise the client's counter as if the sequence were admitted with nothing cached.

        Return the raise, which the caller takes off again before any other call.
        """
        client = self.client_of(sequence)
        service = 0 if sequence.state.admitted else sequence.num_prompt * self._of_input
        ahead = service * self._units[client]
        self.counters[client] += ahead
        return ahead


Rank = tuple[int, bool, int, int, float, int]
"""The sort key of a waiting sequence: level, is new, its client's counter, client, arrival."""


class Place(NamedTuple):
    """The part of the order before arrival; the smallest place is first. Sequences of one place form a line.

    ``level``: the priority, less the levels gained by waiting. ``is_new``: it was never admitted.
    ``client``: 0 unless the queue is fair and the sequence is new.
    """

    level: int
    is_new: bool
    client: int


class Ranks:
    """The lines by place. Among the new sequences of a level, the client with the smallest counter is next."""

    def __init__(self, shares: FairShares | None) -> None:
        self._shares = shares
        self.lines: dict[Place, collections.deque[Sequence]] = {}
        """Each by arrival. Most come and go at an end, at no cost; a change inside moves a part of the line."""
        self._levels = Ranking()
        self._num_by_level = collections.Counter[int]()
        self._clients: dict[int, Ranking] = {}  # by level, clients with new sequences

    def add(self, sequence: Sequence, place: Place) -> None:
        line = self.lines.setdefault(place, collections.deque())
        if line and sequence.order < line[-1].order:
            bisect.insort(line, sequence, key=by_arrival)
        else:
            line.append(sequence)
        level = place.level
        if place.is_new:
            if level not in self._clients:
                self._clients[level] = Ranking()
            self._clients[level].put(place.client, self._rank(place.client))
        if not self._num_by_level[level]:
            self._levels.put(level, (level, 0))
        self._num_by_level[level] += 1

    def drop(self, sequence: Sequence, place: Place) -> None:
        line = self.lines[place]
        if line[0] is sequence:
            line.popleft()
        elif line[-1] is sequence:
            line.pop()
        else:
            del line[bisect.bisect_left(line, sequence.order, key=by_arrival)]
        if not line:
            del self.lines[place]
            if place.is_new:
                self._clients[place.level].drop(place.client)
        self._num_by_level[place.level] -= 1
        if not self._num_by_level[place.level]:
            del self._num_by_level[place.level]
            self._levels.drop(place.level)
            self._clients.pop(place.level, None)

    def counter_fell(self, client: int) -> None:
        """Rank a client anew after its counter fell: no rank may be above its counter."""
        for ranking in self._clients.values():
            if client in ranking:
                ranking.put(client, self._rank(client))

    def first(self, newest: bool) -> Sequence | None:
        """Return the first sequence of all."""
        level = self._levels.least()
        if level is None:
            return None
        returned = self.lines.get(Place(level, False, 0))
        if returned is not None:
            return returned[0]
        # Counters only grow, unless ``counter_fell`` is called: no client is ranked by more than its counter.
        client = self._clients[level].least_by(self._rank)
        assert client is not None, "a level without returned sequences has new ones"
        return self.first_at(Place(level, True, client), newest)

    def first_at(self, place: Place, newest: bool) -> Sequence | None:
        """Return the first sequence of one place."""
        line = self.lines.get(place)
        return None if line is None else line[-1 if newest and place.is_new else 0]

    def _rank(self, client: int) -> tuple[int, int]:
        return 0 if self._shares is None else self._shares.counters[client], client


class WaitingQueue:
    """The waiting sequences by priority. Within a level, returned sequences (preempted, or forks without room)
    come before new ones. Among new ones the client that was served least is next, if the queue is fair; then
    the oldest or, while ``is_newest_first``, the newest."""

    def __init__(self, config: QueueConfig = QueueConfig()) -> None:  # frozen
        self.adapter_limit = config.adapter_limit
        self.is_newest_first = False
        self.shares = FairShares(config) if config.is_fair else None
        """The service of clients, if the queue is fair to them."""
        self.num_by_adapter = collections.Counter[AdapterId]()
        """Waiting sequences by adapter; no zeros."""
        self.num_tokens = 0
        """Tokens of the waiting sequences when they joined."""
        self.num_arrived = 0
        """Sequences that were never admitted."""
        self._age_s, self._floor = config.priority_age_s, config.priority_floor
        self._sizes: dict[SequenceId, int] = {}
        self._all = Ranks(self.shares)
        self._of_adapter: dict[AdapterId, Ranks] = {}
        self._places: dict[SequenceId, Place] = {}
        self._due = Ranking()  # when each sequence gains its next level
        self._ageing: dict[SequenceId, Sequence] = {}

    def __len__(self) -> int:
        return len(self._places)

    # ------------------------------------------------------------ joining and leaving

    def arrive(self, sequence: Sequence) -> None:
        """Add a new request's sequence, by its arrival: it may have waited at another replica before."""
        self._join(sequence, is_new=True)

    def put_back(self, sequence: Sequence) -> None:
        """Add a sequence of a request that was admitted before."""
        sequence.wait_again()
        self._join(sequence, is_new=False)

    def admit(self, sequence: Sequence, num_cached: int) -> None:
        """Remove a sequence to be served, and charge its client; ``num_cached``: its tokens in the cache."""
        if self.shares is not None:
            self.shares.admitted(sequence, num_cached)
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out; the caller then changes its stage."""
        self.num_arrived -= self._leave(sequence).is_new
        self.num_tokens -= self._sizes.pop(sequence.id)
        self.num_by_adapter[sequence.adapter] -= 1
        if not self.num_by_adapter[sequence.adapter]:
            del self.num_by_adapter[sequence.adapter]
        if self.shares is not None:
            self.shares.left(sequence)
        if self._ageing.pop(sequence.id, None) is not None:
            self._due.drop(sequence.id)

    def forget(self, adapter: AdapterId) -> None:
        """Drop the account of an adapter that is gone with all its requests."""
        if self.shares is not None:
            self.shares.forget(adapter)

    def age(self, now: float) -> None:
        """Raise the level of sequences that have waited long enough; O(log n) each."""
        while (number := self._due.least()) is not None and self._due.rank(number)[0] <= now:
            self._due.drop(number)
            sequence = self._ageing.pop(number)
            priority, waited_s = sequence.state.request.priority, now - sequence.state.arrived_s
            assert self._age_s is not None
            place = self._leave(sequence)
            # A sequence that is due gains at least one level, however numbers were rounded.
            level = min(max(priority - int(waited_s / self._age_s), self._floor), place.level - 1)
            self._enter(sequence, place._replace(level=level))
            self._await_next_level(sequence, level)

    def _join(self, sequence: Sequence, is_new: bool) -> None:
        self.num_by_adapter[sequence.adapter] += 1
        self._sizes[sequence.id] = len(sequence.tokens)
        self.num_tokens += len(sequence.tokens)
        self.num_arrived += is_new
        client = 0
        if self.shares is not None:
            self.shares.joined(sequence)
            client = self.shares.client_of(sequence) if is_new else 0
        level = sequence.state.request.priority
        self._enter(sequence, Place(level, is_new, client))
        self._await_next_level(sequence, level)

    def _await_next_level(self, sequence: Sequence, level: int) -> None:
        if self._age_s is not None and level > self._floor:
            num_levels = sequence.state.request.priority - level + 1
            self._ageing[sequence.id] = sequence
            moment = sequence.state.arrived_s + num_levels * self._age_s
            self._due.put(sequence.id, (moment, sequence.id))

    def _enter(self, sequence: Sequence, place: Place) -> None:
        self._places[sequence.id] = place
        self._all.add(sequence, place)
        if sequence.adapter not in self._of_adapter:
            self._of_adapter[sequence.adapter] = Ranks(self.shares)
        self._of_adapter[sequence.adapter].add(sequence, place)

    def _leave(self, sequence: Sequence) -> Place:
        place = self._places.pop(sequence.id)
        self._all.drop(sequence, place)
        ranks = self._of_adapter[sequence.adapter]
        ranks.drop(sequence, place)
        if not ranks.lines:
            del self._of_adapter[sequence.adapter]
        return place

    # ------------------------------------------------------------ order

    def first(self) -> Sequence | None:
        """Return the sequence that is next."""
        return self._all.first(self.is_newest_first)

    def first_of(self, adapter: AdapterId, beside: Sequence | None = None) -> Sequence | None:
        """Return the first of the adapter's sequences. ``beside``: of those that differ from it in arrival
        alone."""
        ranks = self._of_adapter.get(adapter)
        if ranks is None:
            return None
        if beside is None:
            return ranks.first(self.is_newest_first)
        return ranks.first_at(self._places[beside.id], self.is_newest_first)

    def rank(self, sequence: Sequence) -> Rank:
        """Return the sort key of a waiting sequence; the smallest is next."""
        level, is_new, client = self._places[sequence.id]
        counter = self.shares.counters[client] if self.shares is not None and is_new else 0
        sign = -1 if self.is_newest_first and is_new else 1
        arrived_s, number = sequence.order
        return level, is_new, counter, client, sign * arrived_s, sign * number

    def leading(self, count: int) -> list[Sequence]:
        """Return the first ``count`` sequences in the order of admission, if no token is drawn meanwhile."""
        if self.shares is None:
            lines = (
                reversed(line) if self.is_newest_first and place.is_new else line
                for place, line in sorted(self._all.lines.items())
            )
            return list(itertools.islice(itertools.chain.from_iterable(lines), count))
        taken: list[tuple[Sequence, Place, int]] = []
        while len(taken) < count and (sequence := self.first()) is not None:
            taken.append((sequence, self._leave(sequence), self.shares.charge_ahead(sequence)))
        clients = [self.shares.client_of(sequence) for sequence, _, _ in taken]
        for client, (_, _, ahead) in zip(clients, taken):
            self.shares.counters[client] -= ahead
        for client in set(clients):
            self._all.counter_fell(client)
        for sequence, place, _ in taken:
            self._enter(sequence, place)
        return [sequence for sequence, _, _ in taken]

    def arrived_until(self, moment: float) -> list[Sequence]:
        """Return the sequences that arrived by ``moment`` and were never admitted, by arrival."""
        early: list[Sequence] = []
        for place, line in self._all.lines.items():
            if place.is_new:
                early += itertools.takewhile(lambda s: s.state.arrived_s <= moment, line)
        return sorted(early, key=by_arrival)
