"""Engines that a request moves between at random moments, as an engine that a front end can ask."""

from __future__ import annotations

import collections
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import cast

from manylora.engine.client import Delta, EngineClient, GenerationRequest
from manylora.engine.ledger import Ledger
from manylora.engine.local import LocalEngine
from manylora.types import RequestId

MOST_DELTAS = 14
"""Between two moves of a request."""


class MovingEngines:
    """Part of an EngineClient: ``generate`` and ``abort``. ``moves``: by what a request had when it was let go."""

    def __init__(self, engines: Sequence[LocalEngine], seed: int, most_moves: int) -> None:
        self.engines = engines
        self.rng = random.Random(seed)
        self.most_moves = most_moves
        self.moves: collections.Counter[str] = collections.Counter()
        self._open: dict[RequestId, _Moving] = {}

    def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        self._open[request.id] = moving = _Moving(self, request)
        return moving

    def abort(self, request: RequestId, sample: int | None = None, reason: str = "abort") -> None:
        self._open[request].abort(sample, reason)

    def as_client(self) -> EngineClient:
        return cast(EngineClient, self)


class _Moving:
    def __init__(self, owner: MovingEngines, request: GenerationRequest) -> None:
        self._owner, self._rng = owner, owner.rng
        self._request = request
        self._ledger = Ledger(request, time.monotonic)
        self._at = self._rng.randrange(len(owner.engines))
        self._num_moves = self._rng.randint(1, owner.most_moves)
        self._begin()

    def _begin(self) -> None:
        self._deltas = self._owner.engines[self._at].generate(self._ledger.begin())
        self._num_left: int | None = None
        if self._num_moves > 0:
            self._num_left = self._rng.choice((0, 0, *range(MOST_DELTAS)))
            self._withdraw_if_due()

    def _withdraw_if_due(self) -> None:
        if self._num_left == 0:
            self._owner.engines[self._at]._driver.withdraw(self._request.id, self._ledger.attempt)
        if self._num_left is not None:
            self._num_left -= 1

    def __aiter__(self) -> _Moving:
        return self

    async def __anext__(self) -> Delta:
        while not self._ledger.has_ended:
            try:
                delta = await self._deltas.__anext__()
            except StopAsyncIteration:
                if not self._ledger.has_ended:
                    self._move()
                continue
            seen = self._ledger.take(delta)
            self._withdraw_if_due()
            if seen is not None:
                return seen
        raise StopAsyncIteration

    def _move(self) -> None:
        positions, most = self._ledger.positions, self._request.params.max_tokens
        assert most is not None
        where = "no token" if not any(positions) else "last token" if most - 1 in positions else "some tokens"
        self._owner.moves[where] += 1
        self._num_moves -= 1
        self._at = (self._at + 1) % len(self._owner.engines)
        self._begin()

    def abort(self, sample: int | None, reason: str) -> None:
        samples = range(self._request.params.n) if sample is None else [sample]
        for each in samples:
            self._ledger.close(each)
        self._owner.engines[self._at].abort(self._request.id, sample, reason)

    async def aclose(self) -> None:
        await cast(AsyncGenerator[Delta, None], self._deltas).aclose()
