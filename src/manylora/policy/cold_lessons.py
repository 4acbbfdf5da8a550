"""What cold starts took beside what was expected: what the CPU takes, and what forecasts have left out.

Owns running estimates; all that it learns arrives in events, so a replay learns the same. Numbers in, seconds out.
"""

from __future__ import annotations

from manylora.config import CpuRates

_FIRST_BESIDE = 0.5
"""About the share of a step in which the base's products run, beside which the CPU computes."""
_LEARN = 0.3
"""How much of a miss the next forecast makes good."""
_LEAST_SCALE = 0.01
_FORGET = 0.95
"""What is not tried is believed a little more each time, or it would never be tried again."""


class ColdLessons:
    """``beside``: the share of a step's own time that hides the CPU's."""

    def __init__(self, rates: CpuRates) -> None:
        self._rates = rates
        self.beside = _FIRST_BESIDE
        self._scale = 1.0  # what workers computed for, over what their rates say
        self._besides_scale = 1.0  # the same of handing over, at most 1
        self._num_served = 0
        self._beyond_s: dict[str, float] = {}

    def busy_s(self, num_tokens: int, adapter_bytes: int, num_workers: int) -> float:
        """How long the busiest of so many workers computes for the tokens of one adapter."""
        return self._scale * self._rates.busy_s(num_tokens, adapter_bytes, num_workers)

    def besides_s(self, num_tokens: int) -> float:
        """What a step with so many tokens on the CPU takes for handing them over."""
        return self._besides_scale * self._rates.besides_s(num_tokens)

    def served(self, num_tokens: int, expected_s: float, busy_s: float, own_s: float, stall_s: float) -> None:
        """Workers computed ``busy_s`` of a step where ``expected_s`` was expected; the step, which took ``own_s``
        itself, stood still for nothing but them."""
        weight = max(_LEARN, 1 / (self._num_served + 1))
        self._num_served += 1
        if expected_s > 0:
            seen = min(max(self._scale * busy_s / expected_s, _LEAST_SCALE), 1 / _LEAST_SCALE)
            self._scale += weight * (seen - self._scale)
        if own_s > 0:
            besides_s = self._seen_besides_s(num_tokens, weight, busy_s, own_s, stall_s)
            hidden_s = besides_s + busy_s - stall_s
            self.beside += weight * (min(max(hidden_s / own_s, 0.0), 1.0) - self.beside)

    def _seen_besides_s(
        self, num_tokens: int, weight: float, busy_s: float, own_s: float, stall_s: float
    ) -> float:
        """What handing over took, as far as a step tells: at most all but computing, and at least what the step
        stood still for longer than that. Rates that were measured beside other work may say more."""
        rates_s, besides_s = self._rates.besides_s(num_tokens), self.besides_s(num_tokens)
        most_s = stall_s + own_s - busy_s
        if most_s <= 0 or rates_s <= 0:
            return besides_s
        seen_s = min(max(besides_s, min(stall_s - busy_s, rates_s)), most_s)
        if seen_s != besides_s:
            self._besides_scale += weight * (max(seen_s / rates_s, _LEAST_SCALE) - self._besides_scale)
        return seen_s

    def beyond_s(self, mode: str) -> float:
        """How much later than the arithmetic says requests have lately had their answers that began so."""
        return self._beyond_s.get(mode, 0.0)

    def answered(self, mode: str, expected_s: float, took_s: float) -> None:
        """The step of a request that began so has ended; of a miss no more counts than was expected in all."""
        missed_s = min(max(took_s - expected_s, -expected_s), expected_s)
        for other in self._beyond_s:
            if other != mode:
                self._beyond_s[other] *= _FORGET
        self._beyond_s[mode] = self.beyond_s(mode) + _LEARN * missed_s
