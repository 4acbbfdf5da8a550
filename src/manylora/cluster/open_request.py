"""Keeps an open request of a front end: its account, and its present replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from manylora.engine.client import RELEASED, Delta, GenerationRequest, Timing
from manylora.engine.ledger import Ledger
from manylora.protocol.hashing import reply_hashes
from manylora.protocol.routing import Asked, Assign, Ended, Held, Progress, ReplicaId, Withdrawn
from manylora.router.queue import CLEARED_TOKENS
from manylora.types import AdapterId

PROGRESS_TOKENS = 32
"""The number of a sample's tokens after which it is reported to the router again.

A sample's first token is reported, too. After a death, the first tokens of an attempt are reported as well:
while a request may be to blame, it runs alone on a replica.
"""


class OpenRequest:
    """An open request. ``asked``: as the server gave it; ``ledger``: the tokens that the client has;
    ``version``: the adapter's version, chosen once.

    ``replica``, ``epoch``: the place of the present attempt; ``replica`` is None while the router has not
    assigned it.
    """

    def __init__(
        self,
        asked: GenerationRequest,
        ledger: Ledger,
        version: AdapterId,
        prefix: tuple[int, ...],
        max_tokens: int,
    ) -> None:
        """Start without a replica. ``max_tokens``: the most tokens of each sample, also where the request
        leaves that to the context and the pool."""
        self.asked = asked
        self.ledger = ledger
        self.version = version
        self.replica: ReplicaId | None = None
        self.epoch = 0
        self.recomputes = False
        self._prefix = prefix
        self._max_tokens = max_tokens
        self._failures = 0
        self._deaths = 0
        self._released: set[int] = set()
        self._has_reported = False
        self._reported = [0] * asked.params.n
        self._began: Sequence[int] = self._reported

    def as_asked(self) -> Asked:
        """Describe the request for a router that has to place it."""
        params, ledger = self.asked.params, self.ledger
        positions = ledger.positions if any(ledger.positions) else ()
        return Asked(
            self.asked.id,
            self.version,
            len(self.asked.prompt),
            self._max_tokens,
            self._prefix,
            params.n,
            max(ledger.attempt, 0),
            positions,
            ledger.waited_s,
            self._failures,
            self._deaths,
        )

    def as_held(self) -> Held:
        """Describe the request for a router while a replica has it."""
        assert self.replica is not None
        return Held(self.as_asked(), self.replica, self.epoch)

    def as_withdrawn(self) -> Withdrawn:
        """Report that the replica has released all open samples."""
        return Withdrawn(self.asked.id, self.ledger.attempt, self.ledger.positions)

    def as_ended(self) -> Ended:
        """Report that all samples have ended."""
        asked, replies = self.asked, self.ledger.tokens
        blocks = [
            block
            for reply in replies
            for block in reply_hashes(self.version, asked.cache_scope, asked.prompt, reply, self._prefix)
        ]
        return Ended(asked.id, sum(map(len, replies)) // len(replies), tuple(blocks))

    def assign(self, assign: Assign, epoch: int) -> GenerationRequest:
        """Begin another attempt, and return the request for its replica."""
        self.replica, self.epoch = assign.replica, epoch
        self._failures, self._deaths = assign.failures, assign.deaths
        self._released.clear()
        self._began = self.ledger.positions
        self.recomputes = self.ledger.attempt > 0
        request = self.ledger.begin(assign.attempt)
        # The later requests of its body may go to another replica.
        return dataclasses.replace(request, version=self.version, more=False)

    def take(self, delta: Delta) -> Delta | None:
        """Account for a delta of the present attempt, and return it as the client is to see it. Returns None
        where there is nothing to send."""
        if delta.finish_reason == RELEASED:
            self._released.add(delta.sample)
        out = self.ledger.take(delta)
        if out is None:
            return None
        if self._has_reported:  # the times of a first delta were sent already
            return out._replace(timing=Timing(out.timing.spread_s))
        self._has_reported = True
        return out

    @property
    def is_released(self) -> bool:
        """Whether its replica has released all samples that have not ended."""
        return bool(self._released) and self._released.issuperset(self.ledger.open_samples)

    def progress(self, sample: int) -> Progress | None:
        """Return the sample's progress for the router, or None where there is no news for it."""
        position, reported = self.ledger.positions[sample], self._reported[sample]
        cleared = self._began[sample] + CLEARED_TOKENS
        is_cleared = self._deaths > 0 and reported < cleared <= position
        is_far = position // PROGRESS_TOKENS > reported // PROGRESS_TOKENS
        if position == reported or (reported and not is_far and not is_cleared):
            return None
        self._reported[sample] = position
        return Progress(self.asked.id, sample, position)
