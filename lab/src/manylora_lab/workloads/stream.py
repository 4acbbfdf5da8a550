"""A request stream: which adapter is asked for what, and when. The one form that all workloads take.

Owns the types and their checks. Loaders and generators make streams; the simulator and the benchmarks replay them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Sequence

from manylora.config.declaring import ConfigError

Encode = Callable[[str], Sequence[int]]
"""Text to token ids."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A run of a prompt's tokens. Prompts that begin with equal pieces begin with equal tokens.

    ``tokens``: the ids, where the workload has real text and a tokenizer was at hand; else the replay makes
    them up from ``identity``, equal tokens for an equal one.
    """

    identity: Hashable
    num_tokens: int
    tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ConfigError(f"a piece of a prompt has at least 1 token, got {self.num_tokens}")
        if self.tokens is not None and len(self.tokens) != self.num_tokens:
            raise ConfigError(f"a piece of {self.num_tokens} tokens names {len(self.tokens)} ids")


@dataclasses.dataclass(frozen=True, slots=True)
class StreamRequest:
    """One request. ``arrival_s`` counts from the start of the stream; ``adapter`` is a number, None the base.

    Requests of one ``conversation`` are its turns, numbered from 0. A turn's prompt is what was said before (all
    earlier turns' prompts and replies) and then ``prompt``; it waits for the reply before it. A request that
    stands alone has a conversation of its own. ``output_tokens``: how many are generated, whatever they are.
    """

    arrival_s: float
    adapter: int | None
    conversation: int
    turn: int
    prompt: tuple[Piece, ...]
    output_tokens: int

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that no earlier turn of the conversation has."""
        return sum(piece.num_tokens for piece in self.prompt)


@dataclasses.dataclass(frozen=True)
class Stream:
    """Requests in order of arrival. ``name``: of the workload; ``notes``: sources, licences, what stands for what.

    ``ranks``: of each adapter that is served, also of those that no request asks for. Raises ConfigError for
    requests that make no sense together.
    """

    name: str
    requests: tuple[StreamRequest, ...]
    ranks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.requests:
            why = "".join(f" ({note})" for note in self.notes if note.endswith("left out"))
            raise ConfigError(f"the workload {self.name} has no requests{why}")
        before = 0.0
        next_turns: dict[int, tuple[int, int | None]] = {}
        for request in self.requests:
            where = f"{self.name}: turn {request.turn} of conversation {request.conversation}"
            if not before <= request.arrival_s < math.inf:
                raise ConfigError(f"{where} arrives at {request.arrival_s}, after one of {before}")
            before = request.arrival_s
            turn, adapter = next_turns.get(request.conversation, (0, request.adapter))
            if request.turn != turn:
                raise ConfigError(f"{where} comes where turn {turn} should")
            if request.adapter != adapter:
                raise ConfigError(f"{where} names adapter {request.adapter}, earlier turns {adapter}")
            next_turns[request.conversation] = (turn + 1, adapter)
            if not request.prompt:
                raise ConfigError(f"{where} has an empty prompt")
            if request.output_tokens < 1:
                raise ConfigError(f"{where} generates {request.output_tokens} tokens")
            if request.adapter is not None and not 0 <= request.adapter < len(self.ranks):
                raise ConfigError(f"{where} names adapter {request.adapter} of {len(self.ranks)}")

    @property
    def duration_s(self) -> float:
        """The time from the start to the last arrival."""
        return self.requests[-1].arrival_s

    def with_rate(self, scale: float) -> Stream:
        """The same, ``scale`` times as fast."""
        if not 0 < scale < math.inf:
            raise ConfigError(f"the rate can be scaled by numbers above 0, not by {scale}")
        faster = (dataclasses.replace(r, arrival_s=r.arrival_s / scale) for r in self.requests)
        return dataclasses.replace(self, requests=tuple(faster))

    def with_lengths(self, scale: float) -> Stream:
        """The same with prompts and replies ``scale`` times as long, of at least 1 token (dLoRA §7.4). Real text
        becomes made-up tokens, equal ones where it was equal."""
        if not 0 < scale < math.inf:
            raise ConfigError(f"lengths can be scaled by numbers above 0, not by {scale}")

        def scaled(length: int) -> int:
            return max(round(length * scale), 1)

        other = (
            dataclasses.replace(
                request,
                prompt=tuple(Piece(piece.identity, scaled(piece.num_tokens)) for piece in request.prompt),
                output_tokens=scaled(request.output_tokens),
            )
            for request in self.requests
        )
        return dataclasses.replace(self, requests=tuple(other))

    def since(self, start_s: float) -> Stream:
        """The same, with arrivals that count from ``start_s``, no later than the first of them."""
        later = (dataclasses.replace(r, arrival_s=r.arrival_s - start_s) for r in self.requests)
        return dataclasses.replace(self, requests=tuple(later))

    def first(self, count: int) -> Stream:
        """The first ``count`` arrivals: whole conversations' beginnings, so a stream as well."""
        if count < 1:
            raise ConfigError(f"a stream has at least 1 request, got {count}")
        return dataclasses.replace(self, requests=self.requests[:count])


def prompt_tokens(requests: Iterable[StreamRequest]) -> list[int]:
    """The length of each request's whole prompt, history included; in order of arrival."""
    said: dict[int, int] = {}
    lengths = []
    for request in requests:
        length = said.get(request.conversation, 0) + request.new_tokens
        said[request.conversation] = length + request.output_tokens
        lengths.append(length)
    return lengths


def in_order(
    name: str, requests: Iterable[StreamRequest], ranks: Sequence[int], notes: Sequence[str]
) -> Stream:
    """A stream of requests that come in any order; equal moments keep theirs."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    return Stream(name, tuple(ordered), tuple(ranks), tuple(notes))
