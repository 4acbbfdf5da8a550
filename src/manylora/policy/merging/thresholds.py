"""dLoRA's thresholds (Algorithm 2), tuned by what a period would have taken in either mode.

Owns alpha, beta and the period; does not know how long a step takes.
"""

from __future__ import annotations

import dataclasses

from manylora.config import MergeConfig
from manylora.types import AdapterId

LEAST_BETA, MOST_ALPHA = 0.05, 4.0
"""Between which both stay, but for what was set beyond; alpha stays above beta by a step at least. Our own: the
paper bounds neither."""


@dataclasses.dataclass(slots=True)
class _Period:
    """Steps of one mode while one adapter had the most requests: requests and seconds of the batch that merging
    gives, and of the one in arrival order."""

    is_merged: bool
    adapter: AdapterId
    num_steps: int = 0
    merge_requests: int = 0
    merge_s: float = 0.0
    fcfs_requests: int = 0
    fcfs_s: float = 0.0
    switch_s: float = 0.0


class Thresholds:
    """Merge where an adapter's requests are more than ``alpha`` of a batch; unmerge where fewer than ``beta``.

    An unmerged period tunes alpha, a merged one beta, as the paper says (the authors' code does the opposite):
    where the other mode would have served more requests a second, the switch to it included, the threshold on the
    way there comes nearer by ``dec``; else it goes away by the factor ``mul``.
    """

    def __init__(self, config: MergeConfig) -> None:
        self.alpha, self.beta = config.alpha, config.beta
        self._least_beta, self._most_alpha = min(LEAST_BETA, config.beta), max(MOST_ALPHA, config.alpha)
        self._dec, self._mul, self._window = config.dec, config.mul, config.window
        self._period: _Period | None = None

    def step(
        self,
        is_merged: bool,
        adapter: AdapterId,
        merge: tuple[int, float],
        fcfs: tuple[int, float],
        switch_s: float,
    ) -> None:
        """A step starts. ``merge``, ``fcfs``: requests and seconds of the batch of ``adapter`` merged, and of that
        in arrival order; ``switch_s``: what a switch to the other mode takes."""
        period = self._period
        if period is None or period.is_merged != is_merged or period.adapter != adapter:
            self._end()
            period = self._period = _Period(is_merged, adapter)
        period.num_steps += 1
        period.merge_requests += merge[0]
        period.merge_s += merge[1]
        period.fcfs_requests += fcfs[0]
        period.fcfs_s += fcfs[1]
        period.switch_s = switch_s
        if period.num_steps >= self._window:
            self._end()

    def _end(self) -> None:
        """A break point: judge the period, if there is one."""
        period, self._period = self._period, None
        if period is None or period.merge_s <= 0 or period.fcfs_s <= 0:
            return
        if period.is_merged:
            other = period.fcfs_requests / (period.fcfs_s + period.switch_s)
            pays = other > period.merge_requests / period.merge_s
            beta = self.beta + self._dec if pays else self.beta / self._mul
            self.beta = max(min(beta, self.alpha - self._dec), self._least_beta)
        else:
            other = period.merge_requests / (period.merge_s + period.switch_s)
            pays = other > period.fcfs_requests / period.fcfs_s
            alpha = self.alpha - self._dec if pays else self.alpha * self._mul
            self.alpha = min(max(alpha, self.beta + self._dec), self._most_alpha)
