"""``dlora``: dLoRA's dynamic batching (§4): thresholds decide when to merge, credits limit the requests held
back.

``DloraMerging`` is Algorithm 1, ``Thresholds`` Algorithm 2, ``Credits`` Algorithm 3. All unfinished requests
count, admitted or waiting; a batch is at most ``max_num_seqs`` of them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable

from manylora.config.merging import MergeConfig
from manylora.config.policy import PolicyConfig
from manylora.policy.merging.choice import Choice, MergeGauges, MergePolicy, MergeView, StepShape
from manylora.policy.merging.times import StepSeconds
from manylora.policy.sequences import LOADING, Scheduled, Sequence
from manylora.types import BASE, AdapterId, SequenceId

MICROSECONDS = 1_000_000


class Credits:
    """By adapter; the base has credits like one.

    ``starve_s``: an adapter of which a whole batch, ``batch`` requests, is held back for so long has gained
    ``margin`` and starves, until it has paid half of that back. All start with twice the margin, which is what
    an adapter can pay.
    """

    def __init__(self, starve_s: float, batch: int) -> None:
        self.margin = int(starve_s * MICROSECONDS) * batch
        self.start = 2 * self.margin
        self.left_over = 0
        """The sum of removed adapters' credits beyond ``start``; with it all credits sum to ``start`` for each
        adapter."""
        self.changed: dict[AdapterId, int] = {}
        """The credit of every adapter that ever paid or gained any."""
        self._starving: set[AdapterId] = set()

    def of(self, adapter: AdapterId) -> int:
        return self.changed.get(adapter, self.start)

    def forget(self, adapter: AdapterId) -> None:
        """Drop an adapter that is gone."""
        self.left_over += self.of(adapter) - self.start
        self.changed.pop(adapter, None)
        self._starving.discard(adapter)

    def transfer(self, payers: Iterable[AdapterId], held_back: Collection[AdapterId], amount: int) -> None:
        """Pay each of ``held_back`` the amount: the first from the first payer, the second from the second.

        If there are fewer payers, the first pays for the rest; without any, none is paid.
        """
        paying = list(payers)
        if not paying:
            return
        for place, adapter in enumerate(held_back):
            payer = paying[place] if place < len(paying) else paying[0]
            if payer != adapter:
                self.changed[payer] = self.of(payer) - amount
                self.changed[adapter] = self.of(adapter) + amount

    def starving(self) -> set[AdapterId]:
        """Return the adapters whose requests go first."""
        for adapter, credit in self.changed.items():
            if adapter in self._starving:
                if credit < self.start + self.margin // 2:
                    self._starving.remove(adapter)
            elif credit > self.start + self.margin:
                self._starving.add(adapter)
        return self._starving


LEAST_BETA, MOST_ALPHA = 0.05, 4.0
"""The bounds of both thresholds, unless they are set beyond; alpha stays above beta by a step at least. They
are ours: the paper bounds neither."""


@dataclasses.dataclass(slots=True)
class _Period:
    """The steps of one mode while one adapter had the most requests.

    Counts requests and seconds of the merged batch, and of the batch in arrival order.
    """

    is_merged: bool
    adapter: AdapterId
    num_steps: int = 0
    merge_requests: int = 0
    merge_s: float = 0.0
    fcfs_requests: int = 0
    fcfs_s: float = 0.0
    switch_s: float = 0.0


_Served = tuple[int, float]
"""The requests of a batch, and the seconds of its step."""


class Thresholds:
    """Merge where an adapter's requests are more than ``alpha`` of a batch; unmerge where fewer than ``beta``.

    An unmerged period tunes alpha, a merged one beta, as the paper says (the authors' code does the opposite):
    where the other mode would have served more requests a second, the switch to it included, the threshold on
    the way there comes nearer by ``dec``; else it goes away by the factor ``mul``.
    """

    def __init__(self, config: MergeConfig) -> None:
        self.alpha, self.beta = config.alpha, config.beta
        self._least_beta, self._most_alpha = min(LEAST_BETA, config.beta), max(MOST_ALPHA, config.alpha)
        self._dec, self._mul, self._window = config.dec, config.mul, config.window
        self._period: _Period | None = None

    def step(
        self, is_merged: bool, adapter: AdapterId, merge: _Served, fcfs: _Served, switch_s: float
    ) -> None:
        """Note that a step starts.

        ``merge``, ``fcfs``: the batch with ``adapter`` merged, and the batch in arrival order. ``switch_s``:
        seconds of a switch to the other mode.
        """
        period = self._period
        if period is None or period.is_merged != is_merged or period.adapter != adapter:
            self._end()
            period = self._period = _Period(is_merged, adapter)
        period.num_steps += 1
        period.merge_requests += merge[0]
        period.merge_s += merge[1]
        period.fcfs_requests += fcfs[0]
        period.fcfs_s += fcfs[1]
        period.switch_s = switch_s
        if period.num_steps >= self._window:
            self._end()

    def _end(self) -> None:
        """Judge the period at a break point, if there is one."""
        period, self._period = self._period, None
        if period is None or period.merge_s <= 0 or period.fcfs_s <= 0:
            return
        if period.is_merged:
            other = period.fcfs_requests / (period.fcfs_s + period.switch_s)
            pays = other > period.merge_requests / period.merge_s
            beta = self.beta + self._dec if pays else self.beta / self._mul
            self.beta = max(min(beta, self.alpha - self._dec), self._least_beta)
        else:
            other = period.merge_requests / (period.merge_s + period.switch_s)
            pays = other > period.fcfs_requests / period.fcfs_s
            alpha = self.alpha - self._dec if pays else self.alpha * self._mul
            self.alpha = min(max(alpha, self.beta + self._dec), self._most_alpha)


class DloraMerging(MergePolicy):
    """While an adapter is merged its requests alone run. Unmerged, the requests that came first run; one that
    was let past them may lose its slot to them.

    The paper names no amounts. Here a request that is held back for a step, though it would run in arrival
    order, gets what the step would have taken unmerged, from one that runs in its stead. An adapter may be
    merged while it can pay for one more step. Beside the paper's credits, which judge the sum, a request that
    is held back for ``starve_s`` makes its adapter starve for as long.
    """

    def __init__(self, config: PolicyConfig, times: StepSeconds) -> None:
        self._times = times
        self._batch = config.max_num_seqs
        self._starve_s = config.merge.starve_s
        self.thresholds = Thresholds(config.merge)
        self.credits = Credits(self._starve_s, self._batch)
        self._held_back: dict[SequenceId, tuple[float, AdapterId]] = {}  # since when
        self._relieved_until: dict[AdapterId, float] = {}
        # Of the last choice: the batch in arrival order, the adapter that has most requests, how many it has.
        self._fcfs: list[Sequence] = []
        self._hot: AdapterId | None = None
        self._num_hot = 0

    # ------------------------------------------------------------ Algorithms 1 and 3

    def choose(self, view: MergeView) -> Choice:
        """See MergePolicy."""
        self._fcfs = fcfs = view.first_served()
        if not fcfs:
            self._hot = None
            return Choice(view.merged)
        first = collections.Counter(sequence.adapter for sequence in fcfs)
        starving = self._starving(view)
        merged, ratio = view.merged, view.num_unfinished(view.merged) / len(fcfs)
        self._hot = self._hottest(view, first)
        if starving:
            choice = self._relieve(view, starving)
        elif merged != BASE and ratio >= self.thresholds.beta and self._can_pay(merged, first):
            choice = Choice(merged, merged, (merged,))
        else:
            choice = self._merge_hottest(view)
        if choice.adapter != BASE:
            self._hot = choice.adapter
        self._num_hot = 0 if self._hot is None else view.num_unfinished(self._hot)
        if not view.may_switch_to(choice.adapter):
            return Choice(merged, merged, (merged,))  # a switch is under way
        return choice

    def _hottest(self, view: MergeView, first: collections.Counter[AdapterId]) -> AdapterId | None:
        """Return the adapter with the most requests among adapters that can pay for being merged."""
        known = {*view.num_admitted, *view.waiting.num_by_adapter} - {BASE}
        able = [adapter for adapter in known if self._can_pay(adapter, first)]
        return max(able, key=lambda adapter: (view.num_unfinished(adapter), -adapter), default=None)

    def _can_pay(self, adapter: AdapterId, first: collections.Counter[AdapterId]) -> bool:
        num_held_back = first.total() - first[adapter]
        return self.credits.of(adapter) >= num_held_back * self._amount(first.total())

    def _amount(self, num_requests: int) -> int:
        """Return the amount for a request held back: an unmerged step of the requests that run, in
        microseconds."""
        return round(self._times.unmerged_s(num_requests) * MICROSECONDS)

    def _merge_hottest(self, view: MergeView) -> Choice:
        """Merge the adapter with the most requests if they are enough, else run unmerged; another one may be
        merged now."""
        hot, merged, batch, alpha = self._hot, view.merged, self._fcfs, self.thresholds.alpha
        may_merge = view.can_merge and hot != merged
        if hot is not None and may_merge and view.num_unfinished(hot) / len(batch) > alpha:
            if view.may_switch_to(hot):
                return Choice(hot, hot, (hot,), reason=self._ratio_text(view, hot, ">", alpha))
            # None of its requests can run yet: one must be admitted, and all go on unmerged meanwhile.
            waits = None if view.num_admitted[hot] else view.waiting.first_of(hot)
            batch = batch if waits is None else [waits, *batch[:-1]]
        reason = self._ratio_text(view, merged, "<", self.thresholds.beta)
        return Choice(BASE, batch=tuple(batch), reason=reason)

    def _ratio_text(self, view: MergeView, adapter: AdapterId, sign: str, threshold: float) -> str:
        if adapter == BASE:
            return ""
        return f"{view.num_unfinished(adapter)} of {len(self._fcfs)} requests {sign} {threshold:.2f}"

    # ------------------------------------------------------------ starving

    def _starving(self, view: MergeView) -> set[AdapterId]:
        """Return the adapters with requests that go first: by their credits, or as one was held back too
        long."""
        now, until = view.now, self._relieved_until
        held_back = list(self._held_back.values())
        paused = view.longest_paused()
        if paused is not None and paused.paused_s is not None:
            held_back.append((paused.paused_s, paused.adapter))
        for since_s, adapter in held_back:
            if now - since_s >= self._starve_s:
                until[adapter] = max(until.get(adapter, 0.0), now + self._starve_s)
        for adapter in [adapter for adapter, moment in until.items() if moment <= now]:
            del until[adapter]
        return {adapter for adapter in {*until, *self.credits.starving()} if view.num_unfinished(adapter)}

    def _relieve(self, view: MergeView, starving: set[AdapterId]) -> Choice:
        """Choose the starving adapters' requests, then others in arrival order; merged only if one adapter
        starves."""
        if starving == {view.merged}:
            return Choice(view.merged, view.merged, (view.merged,))
        theirs = {s.id: s for s in (*view.admitted, *self._fcfs) if s.adapter in starving}
        for adapter in starving:
            waits = view.waiting.first_of(adapter)
            if waits is not None:
                theirs[waits.id] = waits
        first = sorted(theirs.values(), key=lambda sequence: sequence.order)
        others = [s for s in self._fcfs if s.adapter not in starving]
        return Choice(BASE, batch=tuple((first + others)[: self._batch]), reason="others starve")

    # ------------------------------------------------------------ events

    def started(self, shape: StepShape, rows: list[Scheduled], now: float) -> None:
        """See MergePolicy."""
        merged = shape.merged
        running = {sequence.id for sequence, _, _ in rows}
        inside = {sequence.id for sequence in self._fcfs}
        instead = [sequence.adapter for sequence, _, _ in rows if sequence.id not in inside]
        held_back = [
            s for s in self._fcfs if s.id not in running and s.stage is not LOADING and s.adapter != merged
        ]
        if merged == BASE:
            held_back = held_back[: len(instead)]  # the rest waits for pages
        payers = instead or ([] if merged == BASE else [merged])
        amount = self._amount(shape.num_rows)
        self.credits.transfer(payers, [sequence.adapter for sequence in held_back], amount)
        before = self._held_back
        self._held_back = {s.id: before.get(s.id, (now, s.adapter)) for s in held_back}
        hot, times = self._hot, self._times
        if hot is not None:
            num_merge, num_fcfs = min(self._num_hot, self._batch), len(self._fcfs)
            merge, fcfs = (num_merge, times.merged_s(num_merge)), (num_fcfs, times.unmerged_s(num_fcfs))
            switch_s = times.switch_s(merged, BASE if merged != BASE else hot)
            self.thresholds.step(merged != BASE, hot, merge, fcfs, switch_s)

    def forget(self, adapter: AdapterId) -> None:
        """See MergePolicy."""
        self.credits.forget(adapter)
        self._relieved_until.pop(adapter, None)

    def gauges(self) -> MergeGauges:
        """See MergePolicy."""
        changed = self.credits.changed.items()
        credits = tuple((adapter, credit / MICROSECONDS) for adapter, credit in changed)
        return MergeGauges(self.thresholds.alpha, self.thresholds.beta, credits)
