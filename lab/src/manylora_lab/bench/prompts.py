"""A stream's pieces as prompts: the stream's own token ids, or made-up ones, or words, as text or said in a chat.

What is made up depends on the seed and the piece's identity alone, and is the same on every machine: equal
identities give equal tokens, and of two lengths the shorter is the longer's beginning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from manylora_lab.bench.targets import Prompt, PromptKind, TargetResult
from manylora_lab.workloads.stream import Piece, StreamRequest

FIRST_TOKEN = 3
"""Ids below it are special tokens in most vocabularies."""

_LIST = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue side "
    "kind head house service friend father power hour game line end member law car city community name "
    "president team minute idea body information back parent face others level office door health person art "
    "war history party result change morning reason research girl guy moment air"
)
_WORDS = _LIST.split()


class Prompts:
    """``vocab_size``: ids are drawn below it, evenly. Of text and chats: words instead, one for each token."""

    def __init__(self, seed: int, vocab_size: int, kind: PromptKind = "tokens") -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._kind = kind

    def nothing(self) -> Prompt:
        """Said before a conversation's first turn."""
        return "" if self._kind == "text" else ()

    def new(self, request: StreamRequest) -> Prompt:
        """What the turn adds to its conversation; made anew each time."""
        return self._prompt(request.prompt)

    def reply(self, answer: TargetResult) -> Prompt:
        """What an answer adds."""
        return tuple(answer.tokens) if self._kind == "tokens" else self._said(answer.text)

    def made_up(self, what: str, length: int) -> Prompt:
        """A prompt apart from any stream."""
        return self._prompt((Piece(what, length),))

    def _prompt(self, pieces: Sequence[Piece]) -> Prompt:
        if self._kind == "tokens":
            return tuple(token for piece in pieces for token in self._tokens(piece))
        return self._said("".join(map(self._words, pieces)))

    def _said(self, text: str) -> Prompt:
        return text if self._kind == "text" else (text,)

    def _tokens(self, piece: Piece) -> tuple[int, ...] | list[int]:
        if piece.tokens is not None:
            return piece.tokens
        choices = self._vocab_size - FIRST_TOKEN
        return (self._numbers(piece) % choices + FIRST_TOKEN).tolist()

    def _words(self, piece: Piece) -> str:
        return "".join(f"{_WORDS[number]} " for number in self._numbers(piece) % len(_WORDS))

    def _numbers(self, piece: Piece) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        name = f"{self._seed}/{piece.identity!r}"
        return np.frombuffer(hashlib.shake_128(name.encode()).digest(4 * piece.num_tokens), "<u4")


def joined(before: Prompt, after: Prompt) -> Prompt:
    """One after the other; both of one kind."""
    return before + after  # type: ignore[operator]
