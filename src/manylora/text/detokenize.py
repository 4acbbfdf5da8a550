"""Incremental detokenization: token ids in, the text they add out, never half a character.

Owns what is held back between tokens; knows nothing of requests or of stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence, Set
from typing import Protocol

# Whatever a decoder makes of a token, it looks at no more than so many before it. A character has at most four
# bytes: more than this many tokens that still end in U+FFFD are not one.
_MAX_HELD_TOKENS = 8


def last_shown(prompt: Sequence[int], skipped: Set[int]) -> list[int]:
    """Find the last tokens of a prompt on which the text of the next one may depend."""
    found: list[int] = []
    for token_id in reversed(prompt):
        if token_id not in skipped:
            found.insert(0, token_id)
            if len(found) == _MAX_HELD_TOKENS:
                break
    return found


class Detokenizer(Protocol):
    """One sample's text as it grows. The pieces together are what the decode of the prompt with its tokens has
    after the decode of the prompt."""

    def add(self, token_id: int) -> str:
        """The text that this token completes; bytes of an unfinished character are held back."""

    def finish(self) -> str:
        """Give the text that was held back, with U+FFFD for bytes that never became a character."""


class ByteDetokenizer:
    """Decodes byte-level vocabularies: joins bytes, so a token costs a look-up and no decoding of a window."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], skipped: Set[int], prompt: Sequence[int] = ()
    ) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(map(token_bytes, last_shown(prompt, skipped))))
        # A character that the prompt leaves unfinished is U+FFFD there already.
        self._num_hidden = int(bool(self._decoder.getstate()[0]))

    def add(self, token_id: int) -> str:
        """See Detokenizer."""
        if token_id in self._skipped:
            return ""
        return self._shown(self._decoder.decode(self._token_bytes(token_id)))

    def finish(self) -> str:
        """See Detokenizer."""
        return self._shown(self._decoder.decode(b"", final=True))

    def _shown(self, text: str) -> str:
        if not self._num_hidden or not text:
            return text
        self._num_hidden = 0
        return text[1:]


class WindowDetokenizer:
    """Decodes any other vocabulary: a short window of tokens twice, with and without the new ones.

    The window starts at tokens already shown, because what a decoder makes of a token (a leading space,
    a byte) depends on its neighbours.
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
        """See Detokenizer."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        shown, text = self._shown, self._decode(self._window)
        num_held = len(self._window) - self._num_shown
        if len(text) <= len(shown) or (text.endswith("\ufffd") and num_held <= _MAX_HELD_TOKENS):
            return ""
        # Of what is shown some stays: the newest token alone may be what a decoder strips from a beginning.
        del self._window[: -_MAX_HELD_TOKENS // 2]
        self._align()
        return text[len(shown) :]

    def finish(self) -> str:
        """See Detokenizer."""
        shown, text = self._shown, self._decode(self._window)
        self._num_shown, self._shown = len(self._window), text
        return text[len(shown) :]

    def _align(self) -> None:
        """Have the window, all of which is shown, begin with a whole character: another beginning would make a
        whole run of bytes invalid. An unfinished character at its end does so, too."""
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
