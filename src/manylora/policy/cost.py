"""What things take, learnt from what they took: transfers, reads, prefill. Numbers in, seconds out.

Owns running estimates that start from modest assumptions; everything it learns arrives in events, so a replay
learns the same.
"""

from __future__ import annotations

from collections.abc import Sequence

_KEEP = 0.9
"""How much of an estimate survives one observation."""

_FIRST_COPY_BYTES_S = 20e9
_FIRST_READ_BYTES_S = 1e9
_FIRST_PREFILL_S = 50e-6  # a token
_FIRST_STEP_S = 0.01
_LEAST_PREFILL_TOKENS = 64
_HOPE = 1 / 2000
"""How much less a transfer is believed to take for each page that was computed instead."""
_MOST_HELD_UP = 2.0
"""A page that is computed holds up all sequences of its step, one that is copied only its own. Others count as one
at most: the copies' lane has a queue too."""


class Rates:
    """Seconds a page of ``page_bytes`` and ``page_tokens`` takes; ``step_s``: a step, of ``step_rows`` rows."""

    def __init__(self, page_bytes: int, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.page_in_s = page_bytes / _FIRST_COPY_BYTES_S
        self.page_out_s = page_bytes / _FIRST_COPY_BYTES_S
        self.page_read_s = page_bytes / _FIRST_READ_BYTES_S
        self.step_s = _FIRST_STEP_S
        self.step_rows = 1.0
        self._token_s = _FIRST_PREFILL_S
        self._decode_s = 0.0
        self._num_copies = {True: 0, False: 0}
        self._num_reads = 0

    @property
    def held_up(self) -> float:
        """How many sequences a step's time is lost to, as far as it counts (``_MOST_HELD_UP``)."""
        rows = self.step_rows
        return 1.0 if rows < 1.0 else _MOST_HELD_UP if rows > _MOST_HELD_UP else rows

    @property
    def has_copied(self) -> bool:
        """Whether a copy to the device has been seen."""
        return self._num_copies[True] > 0

    def learnt(self) -> tuple[float, float, float]:
        """Seconds of a prompt's token, of a page from the host, and of an adapter's page that is read; 0 where
        none was seen."""
        has_prefilled = self._token_s != _FIRST_PREFILL_S
        return (
            self._token_s if has_prefilled else 0.0,
            self.page_in_s if self._num_copies[True] else 0.0,
            self.page_read_s if self._num_reads else 0.0,
        )

    def page_prefill_s(self, prefix_class: int) -> float:
        """Computing one page again, after a prefix of about 2 ** (prefix_class - 1) pages.

        Attention over the prefix adds to what a token takes; a quarter more per doubling beyond 64 pages is
        about what a 7B model shows.
        """
        page_s = self._page_tokens * self._token_s
        return page_s * (1.0 + 0.25 * (prefix_class - 7)) if prefix_class > 7 else page_s

    def saw_copy(self, num_pages: int, seconds: float, to_device: bool) -> None:
        """A copy between the tiers has landed."""
        if seconds <= 0 or not num_pages:
            return
        old = self.page_in_s if to_device else self.page_out_s
        new = _blend(old, seconds / num_pages, self._num_copies[to_device])
        self._num_copies[to_device] += 1
        if to_device:
            self.page_in_s = new
        else:
            self.page_out_s = new

    def expected_step_s(self, num_prefill_tokens: int) -> float:
        """A step that decodes, and computes so many tokens of prompts beside."""
        return (self._decode_s or self.step_s) + num_prefill_tokens * self._token_s

    def weigh_copying(self, prefix_classes: Sequence[int]) -> float:
        """How much less bringing one page for each of these from the host holds up than computing them, for a
        decision: copies are made where it is 0 or more. Before the first copy has come they are believed to take
        nothing, or none might ever be tried.

        An estimate that keeps copies from being made would never be corrected, so a loss makes it more hopeful.
        """
        prefill_s = 0.0
        for prefix_class in prefix_classes:
            prefill_s += self.page_prefill_s(prefix_class)
        saved_s = self.held_up * prefill_s
        if self._num_copies[True]:
            saved_s -= len(prefix_classes) * self.page_in_s
        if saved_s < 0:
            self.page_in_s *= (1 - _HOPE) ** len(prefix_classes)
        return saved_s

    def saw_read(self, num_pages: int, seconds: float) -> None:
        """An adapter was read from its source."""
        if seconds > 0 and num_pages:
            self.page_read_s = _blend(self.page_read_s, seconds / num_pages, self._num_reads)
            self._num_reads += 1

    def saw_step(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step ended; with many more tokens than rows it was mostly prefill."""
        if seconds <= 0:
            return
        self.step_s = _KEEP * self.step_s + (1 - _KEEP) * seconds
        self.step_rows = _KEEP * self.step_rows + (1 - _KEEP) * num_rows
        if num_tokens == num_rows:
            self._decode_s = seconds if not self._decode_s else _KEEP * self._decode_s + (1 - _KEEP) * seconds
        elif num_tokens - num_rows >= _LEAST_PREFILL_TOKENS:
            marginal = max(0.1 * seconds, seconds - self._decode_s) / (num_tokens - num_rows)
            self._token_s = _KEEP * self._token_s + (1 - _KEEP) * marginal


def _blend(old: float, seen: float, num_before: int) -> float:
    """The first observation replaces the assumption."""
    return seen if num_before == 0 else _KEEP * old + (1 - _KEEP) * seen
