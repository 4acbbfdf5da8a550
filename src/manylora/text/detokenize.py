"""Incremental detokenization: token ids in, the text they add out, never half a character.

Owns what is held back between tokens; knows nothing of requests or of stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Set
from typing import Protocol


class Detokenizer(Protocol):
    """One sample's text as it grows. The pieces together are the whole decode of its tokens."""

    def add(self, token_id: int) -> str:
        """The text that this token completes; bytes of an unfinished character are held back."""

    def finish(self) -> str:
        """What was held back, with U+FFFD for bytes that never became a character."""


class ByteDetokenizer:
    """Decodes byte-level vocabularies: joins bytes, so a token costs a look-up and no decoding of a window."""

    def __init__(self, token_bytes: Callable[[int], bytes], skipped: Set[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """See Detokenizer."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """See Detokenizer."""
        return self._decoder.decode(b"", final=True)


# A character has at most four bytes: more than this many tokens that still end in U+FFFD are not one.
_MAX_HELD_TOKENS = 8


class WindowDetokenizer:
    """Decodes any other vocabulary: a short window of tokens twice, with and without the new ones.

    The window starts at tokens already shown, because what a decoder makes of a token (a leading space,
    a byte) depends on its neighbours.
    """

    def __init__(self, decode: Callable[[list[int]], str], skipped: Set[int]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._window: list[int] = []
        self._num_shown = 0

    def add(self, token_id: int) -> str:
        """See Detokenizer."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        shown = self._decode(self._window[: self._num_shown])
        text = self._decode(self._window)
        num_held = len(self._window) - self._num_shown
        if len(text) <= len(shown) or (text.endswith("\ufffd") and num_held <= _MAX_HELD_TOKENS):
            return ""
        del self._window[: self._num_shown]
        self._num_shown = len(self._window)
        return text[len(shown) :]

    def finish(self) -> str:
        """See Detokenizer."""
        shown = self._decode(self._window[: self._num_shown])
        text = self._decode(self._window)
        self._num_shown = len(self._window)
        return text[len(shown) :]
