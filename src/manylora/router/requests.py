"""A live request as the router knows it. Owns its fields; does not know which replicas there are."""

from __future__ import annotations

from manylora.protocol.routing import Asked, ReplicaFacts, ReplicaId
from manylora.types import AdapterId, RequestId

Shape = tuple[int, int, int, int, str]
"""The facts of a replica that bound its requests: pages, tokens of a page, context, pages for adapters, and the
class of its numerics."""


INNOCENT_DEATHS = 3
"""This many deaths of replicas by the fault of others count as one failure."""


def shape_of(facts: ReplicaFacts) -> Shape:
    """Return the bounds of a replica's requests from its facts."""
    most = facts.num_pages if facts.adapter_pages is None else facts.adapter_pages
    return facts.num_pages, facts.page_tokens, facts.max_model_len, most, facts.numerics


class LiveRequest:
    """A request from Asked to its one end. ``replica``: its replica, None in the queue; ``number``: of its
    assignment.

    ``key``: its place in the queue, by the moment of its first arrival. ``failures``: attempts that did not
    finish. ``deaths``: the attempts among them in which the replica died and the request may be to blame.
    ``gap_s``: since when no replica that is up can hold it. Its first token binds it to the ``numerics`` of the
    replica that gave it.
    """

    __slots__ = (
        "_fits", "_fits_shape", "_num_before", "_num_innocent", "_numerics_here", "adapter", "adapter_pages",
        "attempt", "deaths", "failures", "gap_s", "id", "is_accepted", "is_withdrawing", "key", "max_tokens",
        "moved_s", "num_generated", "num_moves", "number", "numerics", "positions", "prefix", "prompt_tokens",
        "rank", "reason", "replica", "samples", "source", "target",
    )  # fmt: skip

    def __init__(self, asked: Asked, rank: int, adapter_pages: int, now: float, order: int) -> None:
        self.id: RequestId = asked.request
        self.adapter: AdapterId = asked.adapter
        self.rank = rank
        self.adapter_pages = adapter_pages
        self.prompt_tokens = asked.prompt_tokens
        self.max_tokens = asked.max_tokens
        self.samples = asked.samples
        self.prefix = asked.prefix
        self.key = (now - asked.waited_s, order)
        self.attempt = asked.attempts
        self.failures = asked.failures
        self.deaths = asked.deaths
        self.positions = list(asked.generated) or [0] * asked.samples
        self.num_generated = sum(self.positions)
        self.replica: ReplicaId | None = None
        self.number = 0
        self.is_accepted = False
        self.is_withdrawing = False
        self.target: ReplicaId | None = None
        self.source: ReplicaId | None = None
        self.reason = "new"
        self.moved_s = float("-inf")
        self.num_moves = 0
        self.gap_s: float | None = None
        self.numerics: str | None = None
        self._num_before = self.num_generated
        self._num_innocent = 0
        self._numerics_here = ""
        self._fits_shape: Shape | None = None  # the last that was asked about
        self._fits = False

    # ------------------------------------------------------------ where it is

    def assign(self, replica: ReplicaId, number: int, numerics: str) -> None:
        """Begin another attempt, on this replica."""
        self._numerics_here = numerics
        self._bind()
        self.attempt += 1
        self._num_before = self.num_generated
        self.replica = replica
        self.number = number
        self.is_accepted = False
        self.gap_s = None

    def hold(self, replica: ReplicaId, numerics: str) -> None:
        """Note the present attempt, on this replica by another router's assignment."""
        self._numerics_here = numerics
        self.replica = replica
        self.is_accepted = True
        self._bind()

    @property
    def can_leave(self) -> bool:
        """Whether its replica has reported it and is not withdrawing it."""
        return self.replica is not None and self.is_accepted and not self.is_withdrawing

    def withdraw(self, target: ReplicaId | None, reason: str) -> None:
        """Note that its replica will release it, for ``target`` or, if None, for a replica chosen then."""
        self.is_withdrawing = True
        self.target = target
        self.reason = reason

    def leave(self, reason: str) -> None:
        """Note that it is on no replica any more."""
        self.source, self.replica = self.replica, None
        self.is_withdrawing = False
        self.target = None
        self.reason = reason

    def die(self, is_blamed: bool) -> None:
        """Count a death of its replica.

        If others are to blame it counts a third, or a request that waits while replicas are killed would be
        given up with them.
        """
        self._num_innocent += not is_blamed
        if is_blamed or self._num_innocent % INNOCENT_DEATHS == 0:
            self.failures += 1
        self.deaths += is_blamed

    @property
    def num_new(self) -> int:
        """Known tokens of its present attempt."""
        return self.num_generated - self._num_before

    def note_progress(self, sample: int, position: int) -> None:
        """Note how many tokens a sample has, where these are more than before."""
        if not 0 <= sample < len(self.positions) or position <= self.positions[sample]:
            return
        self.num_generated += position - self.positions[sample]
        self.positions[sample] = position
        if self.replica is not None:
            self._bind()

    def _bind(self) -> None:
        if self.num_generated and self.numerics is None:
            self.numerics = self._numerics_here
            self._fits_shape = None

    # ------------------------------------------------------------ what it needs

    @property
    def num_tokens(self) -> int:
        """Tokens to compute if none is cached: of the prompt, and generated ones."""
        return self.prompt_tokens + self.num_generated

    def pages_now(self, page_tokens: int) -> int:
        """Return the pages of KV to go on with, and one more for each sample."""
        return -(-self.num_tokens // page_tokens) + self.samples

    def can_ever_fit(self, shape: Shape) -> bool:
        """Return whether an empty replica of this shape holds it to the end, as the replica itself decides."""
        if shape is not self._fits_shape:
            self._fits_shape = shape
            num_pages, page_tokens, max_model_len, most_adapter_pages, numerics = shape
            num_tokens = self.prompt_tokens + self.max_tokens
            kv_pages = -(-(num_tokens - 1) // page_tokens)
            self._fits = (
                self.numerics in (None, numerics)
                and num_tokens <= max_model_len
                and self.adapter_pages <= most_adapter_pages
                and kv_pages + self.adapter_pages <= num_pages
            )
        return self._fits
