"""A request that a front end has taken and not answered to its end: its account, and where it runs now."""

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
"""The router is told of a sample's first token, and of every so many; and of the first ones of an attempt after a
death, since a request that runs alone has a replica to itself as long as it may be to blame."""


class OpenRequest:
    """``asked``: as the server gave it; ``ledger``: what the client has; ``version``: the adapter's, chosen once.

    ``replica``, ``epoch``: where the present attempt is, None while the router has not said.
    """

    def __init__(
        self,
        asked: GenerationRequest,
        ledger: Ledger,
        version: AdapterId,
        prefix: tuple[int, ...],
        max_tokens: int,
    ) -> None:
        """``max_tokens``: of each sample, where the request itself leaves that to the context and the pool."""
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
        """What a router is to know of it now."""
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
        """The same where a replica has it."""
        assert self.replica is not None
        return Held(self.as_asked(), self.replica, self.epoch)

    def as_withdrawn(self) -> Withdrawn:
        """What it is to know when the replica has released all that is open."""
        return Withdrawn(self.asked.id, self.ledger.attempt, self.ledger.positions)

    def as_ended(self) -> Ended:
        """What it is to know when all samples have ended."""
        asked, replies = self.asked, self.ledger.tokens
        blocks = [
            block
            for reply in replies
            for block in reply_hashes(self.version, asked.cache_scope, asked.prompt, reply, self._prefix)
        ]
        return Ended(asked.id, sum(map(len, replies)) // len(replies), tuple(blocks))

    def assign(self, assign: Assign, epoch: int) -> GenerationRequest:
        """Another attempt begins: what its replica is to be sent."""
        self.replica, self.epoch = assign.replica, epoch
        self._failures, self._deaths = assign.failures, assign.deaths
        self._released.clear()
        self._began = self.ledger.positions
        self.recomputes = self.ledger.attempt > 0
        request = self.ledger.begin(assign.attempt)
        # What follows in its body may go to another replica.
        return dataclasses.replace(request, version=self.version, more=False)

    def take(self, delta: Delta) -> Delta | None:
        """Account for a delta of the present attempt; as the client is to see it."""
        if delta.finish_reason == RELEASED:
            self._released.add(delta.sample)
        out = self.ledger.take(delta)
        if out is None:
            return None
        if self._has_reported:  # what a first delta brings was said already
            return out._replace(timing=Timing(out.timing.spread_s))
        self._has_reported = True
        return out

    @property
    def is_released(self) -> bool:
        """Whether its replica has let all of it go that has not ended."""
        return bool(self._released) and self._released.issuperset(self.ledger.open_samples)

    def progress(self, sample: int) -> Progress | None:
        """What the router is to know of the sample's tokens, if anything new."""
        position, reported = self.ledger.positions[sample], self._reported[sample]
        cleared = self._began[sample] + CLEARED_TOKENS
        is_cleared = self._deaths > 0 and reported < cleared <= position
        is_far = position // PROGRESS_TOKENS > reported // PROGRESS_TOKENS
        if position == reported or (reported and not is_far and not is_cleared):
            return None
        self._reported[sample] = position
        return Progress(self.asked.id, sample, position)
