"""Whether KV that leaves the device is worth a copy on the host. Owns what earlier copies brought back.

Decides by numbers alone; what leaves, and how, is ``residency``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from manylora.policy.cost import Rates
from manylora.policy.tree import Node

_PRIOR_PAGES = 128
"""Saved pages that count as having come back once, before any was seen."""
_MEMORY_PAGES = 8192
"""After so many saved pages both counts are halved: what was asked for long ago says little."""
_WRITE_SHARE = 0.05
"""The share of a write's time that it costs a step that runs on beside it (1 to 3 % slower on an H200)."""
_TRIAL_S = 1.0
_TRIALS_EVERY = 16
"""One second of so many saves whatever is believed, or the policy would not notice that history is asked for
again."""


class Saving(Protocol):
    """Whether KV is copied to the host, and back."""

    def is_copy_cheaper(self, kv: Sequence[Node]) -> bool:
        """Whether bringing these pages from the host holds up less than computing them."""

    def pays(self, prefix_class: int, now: float) -> bool:
        """For one page after a prefix of this class (see Rates.page_prefill_s), whether to write it to the
        host."""

    def saved(self) -> None:
        """A page was written to the host."""

    def came_back(self, num_pages: int) -> None:
        """Requests asked for pages that only the host had."""


class AlwaysSave:
    """Copies always pay."""

    def is_copy_cheaper(self, kv: Sequence[Node]) -> bool:
        """See Saving."""
        return True

    def pays(self, prefix_class: int, now: float) -> bool:
        """See Saving."""
        return True

    def saved(self) -> None:
        """See Saving."""

    def came_back(self, num_pages: int) -> None:
        """See Saving."""


class SaveWhereItPays:
    """A page saved is worth what it is worth to have it back, times how often saved pages came back so far."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._saved = 0.0
        self._came_back = 0.0

    def is_copy_cheaper(self, kv: Sequence[Node]) -> bool:
        """See Saving."""
        return not kv or self._rates.weigh_copying([node.depth.bit_length() for node in kv]) >= 0

    def pays(self, prefix_class: int, now: float) -> bool:
        """See Saving."""
        rates = self._rates
        saved_s = rates.weigh_copying((prefix_class,))
        if saved_s < 0:
            return False
        if int(now / _TRIAL_S) % _TRIALS_EVERY == 0:
            return True
        returns = (self._came_back + _PRIOR_PAGES) / (self._saved + _PRIOR_PAGES)
        return returns * saved_s >= _WRITE_SHARE * rates.held_up * rates.page_out_s

    def saved(self) -> None:
        """See Saving."""
        self._saved += 1
        if self._saved > _MEMORY_PAGES:
            self._saved /= 2
            self._came_back /= 2

    def came_back(self, num_pages: int) -> None:
        """See Saving."""
        self._came_back += num_pages
