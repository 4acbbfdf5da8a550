"""Streams out of what loaders read: pieces from text, requests from lengths or dialogs, adapters, start times.

Two conventions hold for every loader here:
- A file without times gives requests that all arrive at 0, whole conversations one after the other;
  ``with_arrivals`` puts moments from elsewhere on them.
- A file without adapters gives each request a *key*, its own name for the asker (a model, a client, a language
  pair, a conversation's id; each loader says which), and ``Adapters`` turns keys into adapters. Without one all
  requests are the base's; ``assign`` chooses afterwards, by conversation.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from manylora.config.declaring import ConfigError
from manylora_lab.workloads.interleaving import Arrival, next_turns
from manylora_lab.workloads.stream import Encode, Piece, Stream, StreamRequest, in_order

BYTES_PER_TOKEN = 4
"""For lengths without a tokenizer: a rule of thumb for English (recalled, not measured here), where a character is
a byte. Other scripts count by their UTF-8 bytes, which tokenizers of mostly English vocabularies split finer."""


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Which adapter serves a key (None: the base), and the rank of each adapter that is served."""

    ranks: tuple[int, ...] = ()
    choose: Callable[[str], int | None] = lambda key: None

    @staticmethod
    def by_hash(ranks: Sequence[int]) -> Adapters:
        """Keys spread evenly and at random, the same on every machine."""
        count = _at_least_one(ranks)
        return Adapters(tuple(ranks), lambda key: int(_digest(key), 16) % count)

    @staticmethod
    def in_turn(ranks: Sequence[int]) -> Adapters:
        """The first key takes adapter 0, the next new one adapter 1, and so on, round and round."""
        count = _at_least_one(ranks)
        known: dict[str, int] = {}
        return Adapters(tuple(ranks), lambda key: known.setdefault(key, len(known) % count))

    @staticmethod
    def named(adapters: Sequence[str], ranks: Sequence[int], others: int | None = None) -> Adapters:
        """Key ``adapters[i]`` takes adapter i; any other key takes ``others``."""
        if len(adapters) != len(ranks):
            raise ConfigError(f"{len(adapters)} adapters are named, {len(ranks)} ranks given")
        numbers = {key: number for number, key in enumerate(adapters)}
        return Adapters(tuple(ranks), lambda key: numbers.get(key, others))


class TextPieces:
    """Pieces of prompts and lengths of replies from text: token ids with a tokenizer, else estimated lengths.

    Equal texts give equal pieces. The identity is a digest, so that a stream holds no user's words.
    """

    def __init__(self, encode: Encode | None = None) -> None:
        self._encode = encode

    @property
    def notes(self) -> tuple[str, ...]:
        """The stream's notes: how lengths came about."""
        if self._encode is not None:
            return ("lengths: counted by the given tokenizer",)
        return (f"lengths: no tokenizer, a token for every {BYTES_PER_TOKEN} UTF-8 bytes, rounded up",)

    def pieces(self, *texts: str) -> tuple[Piece, ...]:
        """One piece for each text that has tokens."""
        found = []
        for text in texts:
            tokens = None if self._encode is None else tuple(self._encode(text))
            length = _estimate(text) if tokens is None else len(tokens)
            if length:
                found.append(Piece(_digest(text), length, tokens))
        return tuple(found)

    def length(self, text: str) -> int:
        """The text's length in tokens."""
        return _estimate(text) if self._encode is None else len(self._encode(text))


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message of a dialog. ``ours``: the model says it; else it is input, a person's or a tool's."""

    ours: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Dialog:
    """Messages in order, and the key of the dialog's user."""

    key: str
    messages: tuple[Message, ...]


def lone_request(
    arrival_s: float, number: int, input_tokens: int, output_tokens: int, adapter: int | None, source: str
) -> StreamRequest:
    """A request known by its lengths: a conversation of its own, a prompt that no other shares."""
    prompt = (Piece((source, number), input_tokens),)
    return StreamRequest(arrival_s, adapter, number, 0, prompt, output_tokens)


def dialog_requests(
    number: int, dialog: Dialog, adapters: Adapters, pieces: TextPieces
) -> Iterator[StreamRequest]:
    """The turns of a dialog as conversation ``number``, all arriving at 0.

    A turn's prompt is all input since the model spoke; what the model says until the next input is one reply.
    What it says before any input (a greeting) belongs to the first prompt. Input at the end without an answer
    is left out, and a dialog without any answered input gives no turn. No chat template is put around anything.
    """
    adapter = adapters.choose(dialog.key)
    for turn, (prompt, reply_tokens) in enumerate(_exchanges(dialog, pieces)):
        yield StreamRequest(0.0, adapter, number, turn, prompt, reply_tokens)


def _exchanges(dialog: Dialog, pieces: TextPieces) -> Iterator[tuple[tuple[Piece, ...], int]]:
    prompt: list[Piece] = []
    heard, reply_tokens = False, 0
    for message in dialog.messages:
        said = pieces.pieces(message.text)
        if message.ours and heard:
            reply_tokens += sum(piece.num_tokens for piece in said)
        elif said:
            if reply_tokens:
                yield tuple(prompt), reply_tokens
                prompt, heard, reply_tokens = [], False, 0
            prompt += said
            heard = heard or not message.ours
    if reply_tokens:
        yield tuple(prompt), reply_tokens


def requests_of_dialogs(
    dialogs: Iterable[Dialog], adapters: Adapters, pieces: TextPieces
) -> tuple[list[StreamRequest], int]:
    """The turns of all dialogs, numbered in order as conversations, and how many dialogs have no answer."""
    requests: list[StreamRequest] = []
    unanswered = 0
    for number, dialog in enumerate(dialogs):
        turns = list(dialog_requests(number, dialog, adapters, pieces))
        requests += turns
        unanswered += not turns
    return requests, unanswered


NO_TIMES = "arrival times: none in the source, all 0 until some are given"


def assign(stream: Stream, ranks: Sequence[int], choose: Callable[[StreamRequest], int | None]) -> Stream:
    """The same stream with other adapters: ``choose`` is asked once a conversation, with its first turn, in
    order of arrival. Raises ConfigError for an adapter that ``ranks`` does not have."""
    chosen: dict[int, int | None] = {}
    requests = []
    for request in stream.requests:
        if request.conversation not in chosen:
            chosen[request.conversation] = choose(request)
        requests.append(dataclasses.replace(request, adapter=chosen[request.conversation]))
    return dataclasses.replace(stream, requests=tuple(requests), ranks=tuple(ranks))


def with_arrivals(stream: Stream, moments_s: Iterable[float], gap_s: Callable[[], float]) -> Stream:
    """The same conversations, of which one begins or has its next turn at each moment; seconds.

    They begin in the stream's order, a later turn ``gap_s`` or more after the turn before it (drawn anew for
    each) while others can begin, then as soon as a moment is left (``next_turns``); it waits for its reply
    besides. As many turns as there are moments, at most all. Raises ConfigError if none.
    """
    grouped: dict[int, list[StreamRequest]] = {}
    for request in stream.requests:
        grouped.setdefault(request.conversation, []).append(request)
    turns = list(grouped.values())
    lengths = iter([len(its_turns) for its_turns in turns])
    moments = (Arrival(at_s) for at_s in moments_s)
    requests = [
        dataclasses.replace(turns[number][turn], arrival_s=at_s)
        for at_s, number, turn in next_turns(moments, lambda _: next(lengths, 0), lambda *_: gap_s())
    ]
    notes = [note for note in stream.notes if note != NO_TIMES]
    return in_order(stream.name, requests, stream.ranks, notes)


def _estimate(text: str) -> int:
    return -(-len(text.strip().encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _at_least_one(ranks: Sequence[int]) -> int:
    if not ranks:
        raise ConfigError("requests can be spread over 1 adapter or more, not over none")
    return len(ranks)
