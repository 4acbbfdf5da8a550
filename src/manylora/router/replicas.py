"""Replicas as the router knows them, and kinds of replicas, which are believed to be equally fast.

Owns each replica's account between its reports, and what the replicas of a kind have learnt of prompts, copies and
reads, as one estimate of each. A replica's own estimate follows its last few prompts, so what differs between
prompts looks like a difference between replicas, and the one that happens to look fast gets the next request.
"""

from __future__ import annotations

from typing import NamedTuple

from manylora.protocol import Status
from manylora.protocol.routing import NOWHERE, ON_DEVICE, ReplicaFacts, ReplicaReport, StepPlane
from manylora.router.requests import LiveRequest, Shape
from manylora.types import BASE, AdapterId, RequestId

KindKey = tuple[str, tuple[StepPlane, ...], float, float, float]


class Learnt(NamedTuple):
    """Seconds that a replica has learnt, or 0 where it has not: of a prompt's token, of a page from the host, and
    of an adapter's page that is read."""

    token_s: float = 0.0
    page_in_s: float = 0.0
    page_read_s: float = 0.0


NOTHING = Learnt()


def learnt_of(status: Status) -> Learnt:
    return Learnt(status.token_s, status.page_in_s, status.page_read_s)


def kind_key(facts: ReplicaFacts) -> KindKey:
    """What replicas of one kind have in common: the device that they name, and the seconds."""
    return facts.numerics, facts.planes, facts.token_s, facts.page_in_s, facts.page_read_s


class ReplicaKind:
    """``planes``: of decode steps, one object for all. ``token_s``, ``page_in_s``, ``page_read_s``: means over the
    replicas of the kind that have learnt these; before any has, what the facts say."""

    __slots__ = ("_counts", "_stated", "_sums", "page_in_s", "page_read_s", "planes", "token_s")

    def __init__(self, facts: ReplicaFacts) -> None:
        self.planes = facts.planes
        self._stated = Learnt(facts.token_s, facts.page_in_s, facts.page_read_s)
        self._sums = [0.0, 0.0, 0.0]
        self._counts = [0, 0, 0]
        self.token_s, self.page_in_s, self.page_read_s = self._stated

    def note(self, before: Learnt, now: Learnt) -> None:
        """A replica of the kind that had learnt one has learnt another; ``NOTHING`` where it comes or goes."""
        if before == now:
            return
        for place, (old, new) in enumerate(zip(before, now)):
            self._sums[place] += new - old
            self._counts[place] += (new > 0) - (old > 0)
        self.token_s, self.page_in_s, self.page_read_s = (
            total / count if count else stated
            for total, count, stated in zip(self._sums, self._counts, self._stated)
        )


class Taken(NamedTuple):
    """What a request takes of a replica. ``waiting_tokens``: of its prompt, to be computed; ``kv_tokens``: that it
    attends to."""

    request: RequestId
    rows: int
    pages: int
    waiting_tokens: int
    kv_tokens: int


class ReplicaLoad(NamedTuple):
    """What decode steps are made of: ``rows``, the positions that these attend to, distinct ``adapters`` and their
    pages, and the ranks of all rows."""

    rows: float = 0
    kv_tokens: float = 0
    adapters: float = 0
    adapter_pages: float = 0
    rank_sum: float = 0


class ReplicaState:
    """One epoch of a replica.

    ``requests``: those that are assigned to it, oldest assignment first; ``rows``: their sequences. ``adapters``:
    how many requests each adapter has here; ``ranks``: and each rank. ``is_open``: whether it may get new work;
    ``lacks``: adapters that it cannot serve.

    What is reserved for unseen assignments is taken off ``free_pages`` (empty or reclaimable) and ``spare_pages``
    (empty), and is in ``waiting_tokens`` (prompts to be computed) and ``kv_tokens``. ``unseen``: these, by number;
    ``gone``: what has left since the last report, and what that still counted, oldest first. ``num_changes``: how
    often requests or reports have come; ``step_now``: what ``present_step`` has found, until then. ``kind``: how
    fast prompts, copies and reads are on replicas like this one; ``learnt``: what it has learnt of that itself.
    """

    __slots__ = (
        "adapter_pages", "adapters", "drains_from_s", "epoch", "facts", "free_pages", "gone", "has_gap", "id",
        "is_exhausted", "is_open", "is_reserved", "is_suspect", "is_up", "kind", "kv_tokens", "lacks", "learnt",
        "max_seqs", "num_assigned", "num_changes", "page_price_s", "rank_sum", "ranks", "report", "reported_s",
        "requests", "residency", "rows", "seq", "shape", "spare_pages", "step_now", "unseen", "waiting_tokens",
    )  # fmt: skip

    def __init__(
        self, replica: int, epoch: int, facts: ReplicaFacts, shape: Shape, kind: ReplicaKind, now: float
    ) -> None:
        self.id = replica
        self.epoch = epoch
        self.facts = facts
        self.max_seqs = facts.max_seqs
        self.shape = shape
        self.kind = kind
        self.learnt = NOTHING
        self.is_open = self.is_up = True
        self.is_suspect = False
        self.is_reserved = False
        self.drains_from_s: float | None = None
        self.reported_s = now
        self.seq = 0
        self.has_gap = False
        self.requests: dict[RequestId, LiveRequest] = {}
        self.rows = 0
        self.rank_sum = 0
        self.ranks: dict[int, int] = {}
        self.adapters: dict[AdapterId, int] = {}
        self.adapter_pages = 0
        self.lacks: frozenset[AdapterId] = frozenset()
        self.residency: dict[AdapterId, int] = {}
        self.num_assigned = 0
        self.num_changes = 0
        self.unseen: dict[int, Taken] = {}
        self.gone: list[Taken] = []
        self.report = Status(0, 0, 0, facts.num_pages)
        self.free_pages = self.spare_pages = facts.num_pages
        self.waiting_tokens = self.kv_tokens = 0
        self.is_exhausted = False
        self.page_price_s = 0.0
        self.step_now: tuple[float, StepPlane] | None = None

    @property
    def rank_max(self) -> int:
        """The largest rank among its requests, 0 without any."""
        return max(self.ranks, default=0)

    @property
    def load(self) -> ReplicaLoad:
        """What it has now."""
        return ReplicaLoad(self.rows, self.kv_tokens, len(self.adapters), self.adapter_pages, self.rank_sum)

    def tier_of(self, adapter: AdapterId) -> int:
        """Where the adapter is, or will be when what was assigned has come."""
        if adapter == BASE or adapter in self.adapters:
            return ON_DEVICE
        return self.residency.get(adapter, NOWHERE)

    def pages_for(self, request: LiveRequest) -> int:
        """Pages that it needs here to go on, its adapter's among them where that is not on the device."""
        pages = request.pages_now(self.facts.page_tokens)
        return pages if self.tier_of(request.adapter) == ON_DEVICE else pages + request.adapter_pages

    def has_room(self, request: LiveRequest) -> bool:
        """Whether the pages that it needs are free or reclaimable now; all of them are enough for any request that
        can ever be held here."""
        return min(self.pages_for(request), self.facts.num_pages) <= self.free_pages

    def movable(self) -> list[LiveRequest]:
        """The requests that it is known to have and was not told to let go, newest first: by the moment at which
        each first came."""
        held = (each for each in self.requests.values() if each.is_accepted and not each.is_withdrawing)
        return sorted(held, key=lambda request: request.key, reverse=True)

    # ------------------------------------------------------------ assignments

    def take(self, request: LiveRequest, num_cached: int) -> int:
        """The request is assigned here, ``num_cached`` of its tokens being expected in the prefix cache. Returns
        the assignment's number."""
        self.num_assigned += 1
        self._note_change()
        num_tokens = request.num_tokens
        taken = Taken(
            request.id, request.samples, self.pages_for(request), max(num_tokens - num_cached, 1), num_tokens
        )
        self.unseen[self.num_assigned] = taken
        self._reserve(taken)
        self._add(request)
        return self.num_assigned

    def hold(self, request: LiveRequest) -> None:
        """The request is here already, and what it takes is in the reports."""
        self._note_change()
        self._add(request)

    def _add(self, request: LiveRequest) -> None:
        self.requests[request.id] = request
        self.rows += request.samples
        self.rank_sum += request.rank
        self.ranks[request.rank] = self.ranks.get(request.rank, 0) + 1
        if request.adapter != BASE:
            count = self.adapters.get(request.adapter, 0)
            self.adapters[request.adapter] = count + 1
            if not count:
                self.adapter_pages += request.adapter_pages

    def drop(self, request: LiveRequest) -> None:
        """The request is not here any more."""
        del self.requests[request.id]
        self._note_change()
        taken = self.unseen.pop(request.number, None)
        if taken is not None:
            self._reserve(taken, -1)
        else:
            num_tokens = request.num_tokens
            taken = Taken(
                request.id, request.samples, -(-num_tokens // self.facts.page_tokens), 0, num_tokens
            )
            self._free(taken)
        self.gone.append(taken)
        self.rows -= request.samples
        self.rank_sum -= request.rank
        self.ranks[request.rank] -= 1
        if not self.ranks[request.rank]:
            del self.ranks[request.rank]
        if request.adapter != BASE:
            self.adapters[request.adapter] -= 1
            if not self.adapters[request.adapter]:
                del self.adapters[request.adapter]
                self.adapter_pages -= request.adapter_pages

    def _note_change(self) -> None:
        self.num_changes += 1
        self.step_now = None

    def _reserve(self, taken: Taken, times: int = 1) -> None:
        self.free_pages -= times * taken.pages
        self.spare_pages -= times * taken.pages
        self.waiting_tokens += times * taken.waiting_tokens
        self.kv_tokens += times * taken.kv_tokens

    def _free(self, taken: Taken) -> None:
        """It was in the last report. Its pages may be had, though what they hold can be reused."""
        self.free_pages += taken.pages
        self.kv_tokens -= taken.kv_tokens

    # ------------------------------------------------------------ reports

    def receive(self, report: ReplicaReport, now: float) -> list[RequestId]:
        """Take the counts of a newer report. Returns the requests whose assignments it has seen."""
        status = self.report = report.status
        self.has_gap = not status.is_full and (self.has_gap or status.seq > self.seq + 1)
        self.seq = status.seq
        self._note_change()
        self.reported_s = now
        self.is_exhausted = status.is_exhausted
        seen = []
        for number in list(self.unseen):
            if number > report.seen_upto:
                break
            seen.append(self.unseen.pop(number).request)
        self.spare_pages = status.free_pages
        self.free_pages = status.free_pages + status.reclaimable_pages
        self.waiting_tokens = status.waiting_tokens
        self.kv_tokens = status.kv_tokens
        # Sequences that the report counts and the router does not: the last that have left.
        too_many = status.running + status.waiting - self.rows
        for taken in self.unseen.values():
            self._reserve(taken)
            too_many += taken.rows
        still = len(self.gone)
        while still and too_many > 0:
            still -= 1
            too_many -= self.gone[still].rows
            self._free(self.gone[still])
        del self.gone[:still]
        self.page_price_s = status.page_price_s
        self._learn(learnt_of(status))
        return seen

    def _learn(self, learnt: Learnt) -> None:
        """Of a kind whatever its replicas have learnt counts together."""
        self.kind.note(self.learnt, learnt)
        self.learnt = learnt

    def set_tier(self, adapter: AdapterId, tier: int) -> None:
        """The replica has said where it has an adapter."""
        if tier == NOWHERE:
            self.residency.pop(adapter, None)
        else:
            self.residency[adapter] = tier

    # ------------------------------------------------------------ life

    def suspect(self) -> None:
        """No report has come for too long."""
        self.is_suspect = True
        self.is_open = False

    def trust(self) -> None:
        """One has come."""
        self.is_suspect = False
        self._reopen()

    def reserve(self) -> None:
        """It is kept for one request."""
        self.is_reserved = True
        self.is_open = False

    def release(self) -> None:
        """It is not any more."""
        self.is_reserved = False
        self._reopen()

    def _reopen(self) -> None:
        is_held = self.is_suspect or self.is_reserved or self.drains_from_s is not None
        self.is_open = self.is_up and not is_held

    def drain(self, since_s: float) -> None:
        """It gets no more work; the earliest moment that was named counts."""
        self.drains_from_s = since_s if self.drains_from_s is None else min(self.drains_from_s, since_s)
        self.is_open = False

    def end(self) -> None:
        """This epoch is over."""
        self.is_open = self.is_up = False
        self._learn(NOTHING)

    # ------------------------------------------------------------ seconds

    def present_step(self) -> tuple[float, StepPlane]:
        """A decode step of what is here now, of one row at least, by the replica's fitted model: its seconds, and
        the plane that bounds it."""
        found = self.step_now
        if found is None:
            rows = self.rows if 0 < self.rows <= self.max_seqs else min(max(self.rows, 1), self.max_seqs)
            kv_tokens, num_adapters, adapter_pages = self.kv_tokens, len(self.adapters), self.adapter_pages
            rank_sum = self.rank_sum
            longest, bounding = -1.0, self.kind.planes[0]
            for plane in self.kind.planes:
                base, row, kv_token, adapter, page, rank, padded = plane
                seconds = base + rows * row + kv_tokens * kv_token
                seconds += num_adapters * adapter + adapter_pages * page + rank_sum * rank
                if padded:
                    seconds += rows * self.rank_max * padded
                if seconds > longest:
                    longest, bounding = seconds, plane
            found = self.step_now = longest, bounding
        return found

    @property
    def step_s(self) -> float:
        """Seconds of such a step."""
        return self.present_step()[0]
