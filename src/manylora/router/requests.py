"""A live request as the router knows it. Owns its fields; does not know which replicas there are."""

from __future__ import annotations

from manylora.protocol.routing import Asked, ReplicaFacts, ReplicaId
from manylora.types import AdapterId, RequestId

Shape = tuple[int, int, int, int, str]
"""What of a replica's facts bounds the requests that it can ever hold: pages, tokens of one, context, the pages
that adapters may take, and the class of its numerics."""


INNOCENT_DEATHS = 3
"""So many deaths of replicas that others are to blame for count as one failure."""


def shape_of(facts: ReplicaFacts) -> Shape:
    """Of a replica's facts what bounds its requests."""
    most = facts.num_pages if facts.adapter_pages is None else facts.adapter_pages
    return facts.num_pages, facts.page_tokens, facts.max_model_len, most, facts.numerics


class LiveRequest:
    """From Asked to its one end. ``replica``: where it is, None in the queue; ``number``: of its assignment.

    ``key``: its place in the queue, by the moment at which it first came. ``failures``: attempts that were lost
    by deaths or given up by the front end, of which it may be to blame for ``deaths``. ``gap_s``: since when no
    replica that is up can hold it. With its first token it is bound to the ``numerics`` of the replica that gave
    it, so that it goes on alike.
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
        """Another attempt begins, on this replica."""
        self._numerics_here = numerics
        self._bind()
        self.attempt += 1
        self._num_before = self.num_generated
        self.replica = replica
        self.number = number
        self.is_accepted = False
        self.gap_s = None

    def hold(self, replica: ReplicaId, numerics: str) -> None:
        """Its present attempt is on this replica, by another router's assignment."""
        self._numerics_here = numerics
        self.replica = replica
        self.is_accepted = True
        self._bind()

    @property
    def can_leave(self) -> bool:
        """Whether its replica has said that it has it, and was not told to let it go."""
        return self.replica is not None and self.is_accepted and not self.is_withdrawing

    def withdraw(self, target: ReplicaId | None, reason: str) -> None:
        """Its replica is to let it go; ``target``: which is to have it then, None: whichever is chosen then."""
        self.is_withdrawing = True
        self.target = target
        self.reason = reason

    def leave(self, reason: str) -> None:
        """It is on no replica any more."""
        self.source, self.replica = self.replica, None
        self.is_withdrawing = False
        self.target = None
        self.reason = reason

    def die(self, is_blamed: bool) -> None:
        """Its replica has died with it. Where others are to blame that counts a third: else a request that waits
        while replicas are killed one after the other would be given up with them."""
        self._num_innocent += not is_blamed
        if is_blamed or self._num_innocent % INNOCENT_DEATHS == 0:
            self.failures += 1
        self.deaths += is_blamed

    @property
    def num_new(self) -> int:
        """Tokens of its present attempt that are known of."""
        return self.num_generated - self._num_before

    def note_progress(self, sample: int, position: int) -> bool:
        """A sample has this many tokens; whether that is news."""
        if not 0 <= sample < len(self.positions) or position <= self.positions[sample]:
            return False
        self.num_generated += position - self.positions[sample]
        self.positions[sample] = position
        if self.replica is not None:
            self._bind()
        return True

    def _bind(self) -> None:
        if self.num_generated and self.numerics is None:
            self.numerics = self._numerics_here
            self._fits_shape = None

    # ------------------------------------------------------------ what it needs

    @property
    def num_tokens(self) -> int:
        """Tokens to compute where nothing of it is cached: the prompt, and what was generated."""
        return self.prompt_tokens + self.num_generated

    def pages_now(self, page_tokens: int) -> int:
        """Pages of KV that it needs to go on, and one for each sample to grow into."""
        return -(-self.num_tokens // page_tokens) + self.samples

    def can_ever_fit(self, shape: Shape) -> bool:
        """Whether an empty replica of this shape holds it to the end, as the replica itself decides."""
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
