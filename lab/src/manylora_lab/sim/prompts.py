"""The prompts of a stream's turns, and the requests that they make: what a client of the simulator sends.

Where a stream names no token ids, a piece's tokens are 2**20 times the number of its identity, and those that
follow; so a turn's prompt spells the history, the simulated device's replies included. Knows no replica.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Hashable, Sequence

from manylora.config.declaring import ConfigError
from manylora.types import AdapterId, Request, RequestId, SamplingParams
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

MOST_TOKENS = 2**20
"""Of a piece."""


class StreamTurns:
    """What is said in conversations, and whose turn has to wait for the reply before it."""

    def __init__(self, stream: Stream) -> None:
        self._last_turn = {request.conversation: request.turn for request in stream.requests}
        self._said: dict[int, list[int]] = {}  # of conversations that go on
        self._busy: dict[int, collections.deque[StreamRequest]] = {}  # with the turns that wait
        self._first_tokens: dict[Hashable, int] = {}
        self._identities: list[Hashable] = []

    def is_free(self, request: StreamRequest) -> bool:
        """Whether the turn can be handed over; if not, it is remembered."""
        waiting = self._busy.get(request.conversation)
        if waiting is None:
            return True
        waiting.append(request)
        return False

    def take(self, request: StreamRequest) -> tuple[tuple[int, ...], list[int] | None]:
        """The turn's prompt, and where its reply is to be added, if another turn follows.

        The conversation is busy until the reply has ended.
        """
        self._busy.setdefault(request.conversation, collections.deque())
        said = self._said.get(request.conversation, [])
        for piece in request.prompt:
            said.extend(self._tokens(piece))
        prompt = tuple(said)
        if not self._goes_on(request):
            return prompt, None
        self._said[request.conversation] = said
        return prompt, said

    def ended(self, request: StreamRequest) -> StreamRequest | None:
        """The reply has ended; returns the turn that waited for it."""
        if not self._goes_on(request):
            self._said.pop(request.conversation, None)
        waiting = self._busy[request.conversation]
        if waiting:
            return waiting.popleft()
        del self._busy[request.conversation]
        return None

    def _goes_on(self, request: StreamRequest) -> bool:
        return request.turn < self._last_turn[request.conversation]

    def _tokens(self, piece: Piece) -> Sequence[int]:
        if piece.tokens is not None:
            return piece.tokens
        if piece.num_tokens > MOST_TOKENS:
            raise ConfigError(f"a piece of {piece.num_tokens} tokens is longer than {MOST_TOKENS}")
        first = self._first_tokens.get(piece.identity)
        if first is None:
            first = self._first_tokens[piece.identity] = len(self._identities) * MOST_TOKENS
            self._identities.append(piece.identity)
        return range(first, first + piece.num_tokens)

    def identity_of(self, token: int) -> Hashable | None:
        """Of the piece that the token is of, or that it was generated after; None for no stream's token."""
        return self._identities[token // MOST_TOKENS] if token >= 0 else None


def client_name(adapter: int | None) -> str:
    """What a stream's adapter is called where clients are told apart."""
    return "base" if adapter is None else f"adapter-{adapter}"


def request_of(
    name: RequestId, adapter: AdapterId, prompt: tuple[int, ...], num_reply: int, share: float = 1.0
) -> Request:
    return Request(name, adapter, prompt, _greedy(num_reply), share=share)


@functools.lru_cache(maxsize=4096)
def _greedy(num_reply: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_reply, temperature=0.0, seed=0, ignore_eos=True)
