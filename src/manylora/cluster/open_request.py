"""An open request of a front end: its account, and where it runs now."""

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
"""A sample's first token, and every so many, are reported to the router; after a death an attempt's first
ones, too, since a request that runs alone has a replica to itself as long as it may be to blame."""


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
        """Begin another attempt; give the request for its replica."""
        self.replica, self.epoch = assign.replica, epoch
        self._failures, self._deaths = assign.failures, assign.deaths
        self._released.clear()
        self._began = self.ledger.positions
        self.recomputes = self.ledger.attempt > 0
        request = self.ledger.begin(assign.attempt)
        # What follows in its body may go to another replica.
        return dataclasses.replace(request, version=self.version, more=False)

    def take(self, delta: Delta) -> Delta | None:
        """Account for a delta of the present attempt; give it as the client sees it."""
        if delta.finish_reason == RELEASED:
            self._released.add(delta.sample)
        out = self.ledger.take(delta)
        if out is None:
            return None
        if self._has_reported:  # a first delta's figures were sent already
            return out._replace(timing=Timing(out.timing.spread_s))
        self._has_reported = True
        return out

    @property
    def is_released(self) -> bool:
        """Whether its replica has released all samples that have not ended."""
        return bool(self._released) and self._released.issuperset(self.ledger.open_samples)

    def progress(self, sample: int) -> Progress | None:
        """Report the sample's tokens to the router, if there is news for it."""
        position, reported = self.ledger.positions[sample], self._reported[sample]
        cleared = self._began[sample] + CLEARED_TOKENS
        is_cleared = self._deaths > 0 and reported < cleared <= position
        is_far = position // PROGRESS_TOKENS > reported // PROGRESS_TOKENS
        if position == reported or (reported and not is_far and not is_cleared):
            return None
        self._reported[sample] = position
        return Progress(self.asked.id, sample, position)
