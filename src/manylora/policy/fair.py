"""Virtual token counters (Sheng et al., OSDI '24): what each client was served, and which is next.

A counter is service over the client's share, in integers. Owns counters and what was served; does not know the
queue's order, nor how a sequence is preempted.
"""

from __future__ import annotations

import collections

from manylora.config import QueueConfig, as_share
from manylora.policy.ranking import Ranking
from manylora.policy.sequences import Sequence
from manylora.reports import ClientUse


class FairShares:
    """Counters by client: an adapter, or the place of an API key.

    A client that comes back is lifted: to the least counter among those that have requests waiting, or, where none
    has, to that of the client that left the queue last. So no client gains by having been away. What is charged
    stays charged, whatever becomes of the request.
    """

    def __init__(self, config: QueueConfig) -> None:
        self._by_key = config.fair_by == "key"
        self._of_input, self._of_output, self._of_cached = config.weights
        self._scale = config.share_scale
        self._units: dict[int, int] = {}  # of a counter, for one of service
        self._counters: dict[int, int] = {}
        self._service: dict[int, int] = {}  # weighted tokens, since the client's first request
        self.num_waiting = collections.Counter[int]()
        """Sequences, by client."""
        self._waiting = Ranking()  # clients with waiting sequences, by what their counters were
        self._left_last: int | None = None
        self._floor = 0  # the counter of the client that left last, where it is forgotten

    def client_of(self, sequence: Sequence) -> int:
        return sequence.state.request.client if self._by_key else sequence.adapter

    def counter(self, client: int) -> int:
        return self._counters[client]

    def counter_of(self, sequence: Sequence) -> int:
        """Of the sequence's client."""
        return self._counters[self.client_of(sequence)]

    def uses(self) -> tuple[ClientUse, ...]:
        """What each client was served."""
        return tuple(
            ClientUse(client, service, self._counters[client] / self._scale)
            for client, service in self._service.items()
        )

    # ------------------------------------------------------------ the queue

    def joined(self, sequence: Sequence) -> None:
        """It waits."""
        client = self.client_of(sequence)
        if client not in self._counters:
            share = as_share(sequence.state.request.share)
            self._units[client] = self._scale * share.denominator // share.numerator
            self._counters[client] = self._service[client] = 0
        if not self.num_waiting[client]:
            least = self._least_waiting()
            self._counters[client] = max(self._counters[client], self._last() if least is None else least)
            self._waiting.put(client, (self._counters[client], client))
        self.num_waiting[client] += 1

    def left(self, sequence: Sequence) -> None:
        """It waits no more."""
        client = self.client_of(sequence)
        self.num_waiting[client] -= 1
        if not self.num_waiting[client]:
            del self.num_waiting[client]
            self._waiting.drop(client)
            self._left_last = client

    def _last(self) -> int:
        return self._floor if self._left_last is None else self._counters[self._left_last]

    def _least_waiting(self) -> int | None:
        """The least counter among clients with waiting sequences; None where there are none."""
        client = self._waiting.least_by(lambda client: (self._counters[client], client))  # they only grow
        return None if client is None else self._counters[client]

    def forget(self, client: int) -> None:
        """The adapter is gone; no request of it is left."""
        if self._by_key or client not in self._counters:
            return
        if client == self._left_last:
            self._left_last, self._floor = None, self._counters[client]
        del self._counters[client], self._service[client], self._units[client]

    # ------------------------------------------------------------ service

    def admitted(self, sequence: Sequence, num_cached: int) -> None:
        """Its prompt is computed, of which so many tokens come from the cache. Computing it again after a
        preemption costs nothing."""
        if not sequence.state.admitted:
            self._charge(self.client_of(sequence), self._input_service(sequence, num_cached))

    def drew(self, sequence: Sequence, num_tokens: int) -> None:
        """Tokens were generated for its request."""
        self._charge(self.client_of(sequence), num_tokens * self._of_output)

    def _input_service(self, sequence: Sequence, num_cached: int) -> int:
        return (sequence.num_prompt - num_cached) * self._of_input + num_cached * self._of_cached

    def _charge(self, client: int, service: int) -> None:
        self._service[client] += service
        self._counters[client] += service * self._units[client]

    def charge_ahead(self, sequence: Sequence) -> int:
        """Raise its client's counter as if it were admitted with nothing cached; by how much, to be given back
        before anything else is asked."""
        client = self.client_of(sequence)
        ahead = 0 if sequence.state.admitted else self._input_service(sequence, 0) * self._units[client]
        self._counters[client] += ahead
        return ahead

    def give_back(self, sequence: Sequence, ahead: int) -> None:
        """See ``charge_ahead``."""
        self._counters[self.client_of(sequence)] -= ahead
