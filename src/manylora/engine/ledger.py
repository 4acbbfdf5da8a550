"""A request's account across several engines that serve it, one after the other.

Owns the tokens that the client has, the samples that have ended, the seed, and the number of attempts. A token
that was taken is never replaced. Does not know which engine is next, nor text.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable

from manylora.engine.client import RELEASED, Delta, GenerationRequest


class Ledger:
    """The account of one request from its acceptance. Attempts are numbered from 0."""

    def __init__(
        self, request: GenerationRequest, clock: Callable[[], float], seed: int | None = None
    ) -> None:
        """``clock``: seconds, any origin, never decreasing. ``seed``: for a request without one; None: draw it
        here, once."""
        params = request.params
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbits(63) if seed is None else seed)
        self._request = dataclasses.replace(request, params=params)
        self._clock = clock
        self._accepted_s = clock() - request.waited_s
        self._tokens = [list(tokens) for tokens in request.resume] or [[] for _ in range(params.n)]
        self._closed = set(request.closed)
        self.attempt = request.attempt - 1
        """The number of the last attempt."""

    @property
    def has_ended(self) -> bool:
        """Whether all samples have ended."""
        return len(self._closed) == self._request.params.n

    @property
    def open_samples(self) -> tuple[int, ...]:
        """The samples that have not ended."""
        return tuple(sample for sample in range(self._request.params.n) if sample not in self._closed)

    @property
    def waited_s(self) -> float:
        """The time since its acceptance."""
        return self._clock() - self._accepted_s

    @property
    def positions(self) -> tuple[int, ...]:
        """The number of tokens of each sample."""
        return tuple(len(tokens) for tokens in self._tokens)

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of each sample."""
        return tuple(map(tuple, self._tokens))

    def begin(self, attempt: int | None = None) -> GenerationRequest:
        """Begin the next attempt; return the request with all its tokens so far, for an engine.

        ``attempt``: its number, where others number attempts.
        """
        self.attempt = self.attempt + 1 if attempt is None else attempt
        resume, closed = self.tokens if any(self._tokens) else (), tuple(sorted(self._closed))
        return dataclasses.replace(
            self._request, resume=resume, closed=closed, waited_s=self.waited_s, attempt=self.attempt
        )

    def may_take(self, delta: Delta) -> bool:
        """Return whether the delta is of the present attempt and follows the client's tokens."""
        goes_on = not delta.tokens or delta.start == len(self._tokens[delta.sample])
        return delta.attempt == self.attempt and goes_on

    def take(self, delta: Delta) -> Delta | None:
        """Account for a delta of the present attempt; return it for the client, or None if it has no news."""
        if delta.sample in self._closed:
            return None  # it was ended meanwhile
        self._tokens[delta.sample].extend(delta.tokens)
        if delta.finish_reason == RELEASED:
            return delta._replace(finish_reason=None) if delta.tokens else None
        if delta.finish_reason is not None:
            is_refusal = delta.error is not None and delta.error.status < 500
            self._closed.update(range(self._request.params.n) if is_refusal else [delta.sample])
        return delta

    def close(self, sample: int) -> None:
        """Close a sample that the client wants no more of."""
        self._closed.add(sample)
