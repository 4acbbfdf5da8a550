"""Finds stop strings in text that arrives in pieces of any size.

The string that is complete first ends the text; of two complete at the same character, the longer one does.
"""

from __future__ import annotations

import array
from collections.abc import Sequence


class StopStrings:
    """A request's stop strings, prepared once and shared by its samples."""

    def __init__(self, stop: Sequence[str], include_in_output: bool = False) -> None:
        self.stop = tuple(stop)
        self.include_in_output = include_in_output
        self.fallbacks = tuple(_fallbacks(text) for text in self.stop)


def _fallbacks(text: str) -> Sequence[int]:
    """Return the Knuth-Morris-Pratt table: for each prefix, the length of its longest proper prefix that also
    ends it."""
    table = array.array("i", bytes(4 * len(text)))
    matched = 0
    for i in range(1, len(text)):
        while matched and text[matched] != text[i]:
            matched = table[matched - 1]
        matched += text[matched] == text[i]
        table[i] = matched
    return table


class StopChecker:
    """A filter for one sample's text, which holds back only text that could still become a stop string."""

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._matched = [0] * len(strings.stop)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Add text, and return the text that may be shown now. Once ``found`` is set the text has ended."""
        if self.found is not None:
            return ""
        for position, char in enumerate(text):
            complete = self._advance(char)
            if complete is not None:
                self.found = complete
                seen = self._held + text[: position + 1]
                self._held = ""
                return seen if self._strings.include_in_output else seen[: len(seen) - len(complete)]
        self._held += text
        num_shown = len(self._held) - max(self._matched)
        shown, self._held = self._held[:num_shown], self._held[num_shown:]
        return shown

    def finish(self) -> str:
        """Return the text that was held back, which did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        complete, fallbacks = None, self._strings.fallbacks
        for index, text in enumerate(self._strings.stop):
            matched = self._matched[index]
            while matched and text[matched] != char:
                matched = fallbacks[index][matched - 1]
            matched += text[matched] == char
            if matched == len(text) and (complete is None or len(text) > len(complete)):
                complete = text
            # A whole match ends the sample, so its state is never advanced again.
            self._matched[index] = matched
        return complete
