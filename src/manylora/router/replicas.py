"""Replicas as the router knows them, and kinds of replicas, which are believed to be equally fast.

Owns each replica's account between its reports, and what the replicas of a kind have learnt of prompts, copies
and reads, as one estimate of each. A replica's own estimate follows its last few prompts, so what differs
between prompts looks like a difference between replicas, and the one that happens to look fast gets the next
request.
"""

from __future__ import annotations

from typing import NamedTuple

from manylora.protocol import commands
from manylora.protocol.routing import NOWHERE, ON_DEVICE, ReplicaFacts, ReplicaReport, StepPlane
from manylora.router.requests import LiveRequest, Shape
from manylora.types import BASE, AdapterId, RequestId

KindKey = tuple[str, tuple[StepPlane, ...], float, float, float]


class Learnt(NamedTuple):
    """The seconds that a replica has learnt, 0 if it has not: of a prompt's token, a page from the host, and an
    adapter's page that is read."""

    token_s: float = 0.0
    page_in_s: float = 0.0
    page_read_s: float = 0.0


NOTHING = Learnt()


def learnt_of(status: commands.Status) -> Learnt:
    return Learnt(status.token_s, status.page_in_s, status.page_read_s)


def kind_key(facts: ReplicaFacts) -> KindKey:
    """Return the key of a replica's kind: the device that it names, and the seconds."""
    return facts.numerics, facts.planes, facts.token_s, facts.page_in_s, facts.page_read_s


class ReplicaKind:
    """A kind of replicas, which share what they learn.

    ``planes``: of decode steps, one object for all. ``token_s``, ``page_in_s``, ``page_read_s``: means over the
    replicas that have learnt these; before any has, the values of the facts.
    """

    __slots__ = ("_counts", "_stated", "_sums", "page_in_s", "page_read_s", "planes", "token_s")

    def __init__(self, facts: ReplicaFacts) -> None:
        self.planes = facts.planes
        self._stated = Learnt(facts.token_s, facts.page_in_s, facts.page_read_s)
        self._sums = [0.0, 0.0, 0.0]
        self._counts = [0, 0, 0]
        self.token_s, self.page_in_s, self.page_read_s = self._stated

    def note(self, before: Learnt, now: Learnt) -> None:
        """Replace what one replica has learnt; ``NOTHING`` as it comes or goes."""
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
    """The share of a replica that a request takes. ``waiting_tokens``: of its prompt, to be computed;
    ``kv_tokens``: the positions that it attends to."""

    request: RequestId
    rows: int
    pages: int
    waiting_tokens: int
    kv_tokens: int


class ReplicaLoad(NamedTuple):
    """The load of decode steps: ``rows``, the positions that they attend to, distinct ``adapters`` and their
    pages, and the ranks of all rows."""

    rows: float = 0
    kv_tokens: float = 0
    adapters: float = 0
    adapter_pages: float = 0
    rank_sum: float = 0


class ReplicaState:
    """One epoch of a replica.

    ``requests``: the assigned ones, oldest assignment first; ``rows``: their sequences. ``adapters``: the
    number of requests by adapter; ``ranks``: by rank. ``is_open``: whether it may get new work; ``lacks``:
    adapters that it cannot serve.

    Assignments that no report has seen yet (``unseen``, by number) are taken off ``free_pages`` (empty or
    reclaimable) and ``spare_pages`` (empty), and counted in ``waiting_tokens`` (prompts to be computed) and
    ``kv_tokens``. ``gone``: requests that have left and that the last report may still count, oldest first.
    ``num_changes``: the number of requests and reports so far; ``step_now``: the result of ``present_step``
    since the last change. ``kind``: the speed of prompts, copies and reads on replicas like this one.
    ``report``: its last Status.
    """

    __slots__ = (
        "adapter_pages", "adapters", "drains_from_s", "epoch", "facts", "free_pages", "gone", "has_gap", "id",
        "is_open", "is_reserved", "is_suspect", "is_up", "kind", "kv_tokens", "lacks",
        "max_seqs", "num_assigned", "num_changes", "rank_sum", "ranks", "report", "reported_s",
        "requests", "residency", "rows", "shape", "spare_pages", "step_now", "unseen", "waiting_tokens",
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
        self.is_open = False
        self.is_up = True
        self.is_suspect = False
        self.is_reserved = False
        self.drains_from_s: float | None = None
        self.reported_s = now
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
        self.report = commands.Status(0, 0, 0, facts.num_pages)
        self.free_pages = self.spare_pages = facts.num_pages
        self.waiting_tokens = self.kv_tokens = 0
        self.step_now: tuple[float, StepPlane] | None = None

    @property
    def rank_max(self) -> int:
        """The largest rank among its requests, 0 without any."""
        return max(self.ranks, default=0)

    @property
    def load(self) -> ReplicaLoad:
        """The present load."""
        return ReplicaLoad(self.rows, self.kv_tokens, len(self.adapters), self.adapter_pages, self.rank_sum)

    def tier_of(self, adapter: AdapterId) -> int:
        """Return the tier of an adapter, as it will be once all assignments have arrived."""
        if adapter == BASE or adapter in self.adapters:
            return ON_DEVICE
        return self.residency.get(adapter, NOWHERE)

    def pages_for(self, request: LiveRequest) -> int:
        """Return the pages that a request needs here, with its adapter's if that is not on the device."""
        pages = request.pages_now(self.facts.page_tokens)
        return pages if self.tier_of(request.adapter) == ON_DEVICE else pages + request.adapter_pages

    def has_room(self, request: LiveRequest) -> bool:
        """Return whether the pages that a request needs, at most all, are free or reclaimable now."""
        return min(self.pages_for(request), self.facts.num_pages) <= self.free_pages

    def movable(self) -> list[LiveRequest]:
        """Return the requests that it has reported and is not withdrawing, the newest arrival first."""
        held = (each for each in self.requests.values() if each.is_accepted and not each.is_withdrawing)
        return sorted(held, key=lambda request: request.key, reverse=True)

    # ------------------------------------------------------------ assignments

    def take(self, request: LiveRequest, num_cached: int) -> int:
        """Assign a request, with ``num_cached`` tokens expected in the prefix cache; return the assignment's
        number."""
        self.num_assigned += 1
        num_tokens = request.num_tokens
        taken = Taken(
            request.id, request.samples, self.pages_for(request), max(num_tokens - num_cached, 1), num_tokens
        )
        self.unseen[self.num_assigned] = taken
        self._reserve(taken)
        self.hold(request)
        return self.num_assigned

    def hold(self, request: LiveRequest) -> None:
        """Add a request. Where it was here already, the reports count it."""
        self._note_change()
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
        """Remove a request."""
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
        """Free the share of a request that the last report counted; its pages are reclaimable."""
        self.free_pages += taken.pages
        self.kv_tokens -= taken.kv_tokens

    # ------------------------------------------------------------ reports

    def receive(self, report: ReplicaReport, now: float) -> list[RequestId]:
        """Take the counts of a newer report. Return the requests whose assignments it has seen."""
        before, status = self.report, report.status
        self.report = status
        self.has_gap = not status.is_full and (self.has_gap or status.seq > before.seq + 1)
        self._note_change()
        self.reported_s = now
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
        self.kind.note(learnt_of(before), learnt_of(status))
        return seen

    def end(self) -> None:
        """End this epoch: what it has learnt counts no more."""
        self.is_up = False
        self.kind.note(learnt_of(self.report), NOTHING)

    # ------------------------------------------------------------ seconds

    def present_step(self) -> tuple[float, StepPlane]:
        """Return the seconds of a decode step of the present load (one row at least), and the plane that bounds
        it."""
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
        """The seconds of ``present_step``."""
        return self.present_step()[0]
