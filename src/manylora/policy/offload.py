"""Whether KV that leaves the device is copied to the host. Owns what earlier copies brought back.

Decides by numbers alone; what leaves, and how, is ``residency``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from manylora.policy.cost import Rates
from manylora.policy.tree import Node

_PRIOR_PAGES = 128
"""Offloaded pages that count as having come back once, before any was seen."""
_MEMORY_PAGES = 8192
"""After so many offloaded pages both counts are halved: what was asked for long ago says little."""
_WRITE_SHARE = 0.05
"""The share of a write's time that it costs a step that runs on beside it (1 to 3 % slower on an H200)."""
_TRIAL_S = 1.0
_TRIALS_EVERY = 16
"""In one second of so many KV is offloaded whatever is believed, or the policy would not notice that cached KV is
asked for again."""


class OffloadRule(Protocol):
    """Whether KV is copied to the host, and back."""

    def is_copy_cheaper(self, kv: Sequence[Node]) -> bool:
        """Whether bringing these pages from the host holds up less than computing them."""

    def pays(self, node: Node, now: float) -> bool:
        """Whether to write a page of KV to the host."""

    def offloaded(self) -> None:
        """A page was written to the host."""

    def came_back(self, num_pages: int) -> None:
        """Requests asked for pages that only the host had."""


class AlwaysOffload:
    """Copies always pay."""

    def is_copy_cheaper(self, kv: Sequence[Node]) -> bool:
        """See OffloadRule."""
        return True

    def pays(self, node: Node, now: float) -> bool:
        """See OffloadRule."""
        return True

    def offloaded(self) -> None:
        """See OffloadRule."""

    def came_back(self, num_pages: int) -> None:
        """See OffloadRule."""


class NeverOffload(AlwaysOffload):
    """KV that leaves the device is dropped; the host never has any."""

    def pays(self, node: Node, now: float) -> bool:
        """See OffloadRule."""
        return False


class OffloadWhereItPays:
    """An offloaded page's value is that of having it back, times how often offloaded pages came back so far."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._offloaded = 0.0
        self._came_back = 0.0

    def is_copy_cheaper(self, kv: Sequence[Node]) -> bool:
        """See OffloadRule."""
        return not kv or self._rates.weigh_copying([node.depth.bit_length() for node in kv]) >= 0

    def pays(self, node: Node, now: float) -> bool:
        """See OffloadRule."""
        rates = self._rates
        saved_s = rates.weigh_copying((node.depth.bit_length(),))
        if saved_s < 0:
            return False
        if int(now / _TRIAL_S) % _TRIALS_EVERY == 0:
            return True
        returns = (self._came_back + _PRIOR_PAGES) / (self._offloaded + _PRIOR_PAGES)
        return returns * saved_s >= _WRITE_SHARE * rates.held_up * rates.page_out_s

    def offloaded(self) -> None:
        """See OffloadRule."""
        self._offloaded += 1
        if self._offloaded > _MEMORY_PAGES:
            self._offloaded /= 2
            self._came_back /= 2

    def came_back(self, num_pages: int) -> None:
        """See OffloadRule."""
        self._came_back += num_pages
