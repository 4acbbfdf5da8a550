"""Detokenizes incrementally: each token id gives the text that it adds, never half a character.

Owns the text that is held back between tokens; knows nothing of requests or of stop strings.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Sequence, Set
from typing import Protocol

# A decoder's output for a token depends on at most this many tokens before it. A character has at most four bytes,
# so if more tokens than this still end in U+FFFD, they are not one unfinished character.
_MAX_HELD_TOKENS = 8


def last_shown(prompt: Sequence[int], skipped: Set[int]) -> list[int]:
    """Return the last tokens of a prompt on which the next token's text may depend, without skipped ones."""
    shown = (token_id for token_id in reversed(prompt) if token_id not in skipped)
    return [*itertools.islice(shown, _MAX_HELD_TOKENS)][::-1]


class Detokenizer(Protocol):
    """One sample's text as it grows. Joined, the pieces are the text of the prompt with the sample's tokens,
    less the text of the prompt alone."""

    def add(self, token_id: int) -> str:
        """Return the text that this token completes; bytes of an unfinished character are held back."""

    def finish(self) -> str:
        """Return the text held back, with U+FFFD for bytes that never became a character."""


class ByteDetokenizer:
    """A detokenizer for byte-level vocabularies. It joins bytes, so a token costs a look-up instead of
    decoding a window."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], skipped: Set[int], prompt: Sequence[int] = ()
    ) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(map(token_bytes, last_shown(prompt, skipped))))
        # A character that the prompt leaves unfinished is already U+FFFD in the prompt's text.
        self._num_hidden = int(bool(self._decoder.getstate()[0]))

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._shown(self._decoder.decode(self._token_bytes(token_id)))

    def finish(self) -> str:
        return self._shown(self._decoder.decode(b"", final=True))

    def _shown(self, text: str) -> str:
        if not self._num_hidden or not text:
            return text
        self._num_hidden = 0
        return text[1:]


class WindowDetokenizer:
    """A detokenizer for any other vocabulary. It decodes a short window of tokens twice, with and without the
    new ones.

    The window begins with tokens already shown, since a decoder's output for a token (a leading space, a
    byte) depends on its neighbours.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], skipped: Set[int], prompt: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        self._window = last_shown(prompt, skipped)
        self._num_shown, self._shown = 0, ""
        self._align()

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        shown, text = self._shown, self._decode(self._window)
        num_held = len(self._window) - self._num_shown
        if len(text) <= len(shown) or (text.endswith("\ufffd") and num_held <= _MAX_HELD_TOKENS):
            return ""
        # Some shown tokens stay in the window, since a decoder may strip a token that begins a text.
        del self._window[: -_MAX_HELD_TOKENS // 2]
        self._align()
        return text[len(shown) :]

    def finish(self) -> str:
        shown, text = self._shown, self._decode(self._window)
        self._num_shown, self._shown = len(self._window), text
        return text[len(shown) :]

    def _align(self) -> None:
        """Shorten the window until it begins with a whole character, and mark all of it as shown.

        A partial character at the beginning would make a whole run of bytes invalid. An unfinished character
        at the end does so, too; so the window is decoded without its last tokens as well.
        """
        window = self._window
        shown = self._decode(window)
        while (
            len(window) > 1
            and shown.startswith("\ufffd")
            and all(
                self._decode(window[:-tail]).startswith("\ufffd") for tail in range(1, min(4, len(window)))
            )
        ):
            del window[0]
            shown = self._decode(window)
        self._num_shown, self._shown = len(window), shown
