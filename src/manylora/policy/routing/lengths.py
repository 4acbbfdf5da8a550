"""How many tokens requests give, learnt from those that have ended."""

from __future__ import annotations

from manylora.types import AdapterId

_FIRST = 128.0
_KEEP = 0.9
"""How much of an adapter's estimate survives one request."""


class OutputLengths:
    """The mean of all, and for each adapter one in which late requests count most."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0
        self._adapters: dict[AdapterId, float] = {}

    @property
    def mean(self) -> float:
        """Of all that have ended; 128 before the first."""
        return self._sum / self._count if self._count else _FIRST

    def saw(self, adapter: AdapterId, num_tokens: int) -> None:
        """A request has ended after so many tokens of output."""
        self._sum += num_tokens
        self._count += 1
        old = self._adapters.get(adapter)
        self._adapters[adapter] = num_tokens if old is None else _KEEP * old + (1 - _KEEP) * num_tokens

    def forget(self, adapter: AdapterId) -> None:
        self._adapters.pop(adapter, None)

    def expected(self, adapter: AdapterId) -> float:
        """Tokens of one more request."""
        found = self._adapters.get(adapter)
        return self.mean if found is None else found

    def remaining(self, adapter: AdapterId, num_generated: float, max_tokens: int) -> float:
        """Tokens that a request has before it, at least 1."""
        expected = min(self.expected(adapter), max_tokens) - num_generated
        return expected if expected > 1 else 1.0
