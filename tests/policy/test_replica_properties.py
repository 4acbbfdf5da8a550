"""Random events, failures included: every policy invariant after each, and the right tokens in the end."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manylora_lab.baselines import ALL_CACHE_POLICIES

from manylora.config.policy import ADMISSIONS, FIRST_STEP_S, CacheConfig, PolicyConfig
from manylora.config.queueing import QueueConfig
from manylora.policy.cache_policies import adapter_pages_limit
from manylora.policy.replica import Replica
from manylora.policy.tree import DependencyTree
from manylora.protocol import hashing
from manylora.protocol.commands import (
    AdapterFreed,
    Admitted,
    Emit,
    Finish,
    PromptScored,
    Ready,
    Reject,
    Released,
    RunStep,
    SetTimer,
    Status,
)
from manylora.protocol.events import (
    Abort,
    AdapterAdded,
    AdapterRead,
    AdapterRemoved,
    Arrive,
    CopyDone,
    Event,
    PinAdapter,
    Release,
    StatusDue,
    StepDone,
    Timer,
)
from manylora.protocol.routing import NOWHERE, ON_DEVICE, ON_HOST
from manylora.reports import AdapterUse
from manylora.types import BASE, Request, SamplingParams
from tests.policy.device_model import VOCABULARY, DeviceModel, undisturbed
from tests.policy.invariants import all_nodes, check
from tests.policy.reports import gauges
from tests.policy.rig import check_order

BLOCK_BYTES = 8 * 6
"""Of the router's blocks here, so that prompts of a few tokens have some."""
EVENT_S = 0.25
"""From each event to the next."""
VTC = {"fairness": "vtc", "fair_share": ("1=3",)}
PRIORITY = {"scheduling_policy": "priority", "priority_floor": -1}
QUEUES: list[dict[str, Any]] = [
    VTC, {**VTC, "fair_by": "key", "fair_weights": "2,3,1"}, PRIORITY, {**PRIORITY, "priority_age_s": 0.7},
    {"adapter_batch_limit": "1"}, {"adapter_batch_limit": "1:hard"}, {"adapter_batch_limit": "2:hard"},
    {**VTC, **PRIORITY, "priority_age_s": 2.0, "adapter_batch_limit": "2"},
    {**VTC, **PRIORITY, "fair_by": "key", "adapter_batch_limit": "1:hard"},
]  # fmt: skip
"""Orders of the queue; half of the replicas have the usual one."""


def cached_blocks(tree: DependencyTree) -> set[int]:
    """Hashes of all blocks that a request could reuse, by the tokens on the paths to them."""
    found: set[int] = set()
    for root in all_nodes(tree):
        if not root.is_adapter:
            continue
        stack = [(child, b"") for child in root.children.values()]
        while stack:
            node, before = stack.pop()
            if not node.is_ghost:
                cells = before + node.key
                scope = cells[: len(cells) % 8]
                found |= set(chained(root.adapter, scope, cells[len(scope) :]))
                stack += [(child, cells) for child in node.children.values()]
    return found


def chained(adapter: int, scope: bytes, cells: bytes) -> Iterator[int]:
    last = hashing.prefix_root(adapter, scope)
    for start in range(0, len(cells) - BLOCK_BYTES + 1, BLOCK_BYTES):
        last = hashing.block_hash(last, cells[start : start + BLOCK_BYTES])
        yield last


class ReplicaMachine(RuleBasedStateMachine):
    """Drives a Replica against the dictionary device."""

    @initialize(
        num_pages=st.integers(6, 24),
        page_tokens=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 12),
        num_host_pages=st.sampled_from([0, 2, 5, 9, 16, 40]),
        policy=st.sampled_from(ALL_CACHE_POLICIES),
        low_mark=st.sampled_from([0.3, 0.7]),
        high_mark=st.sampled_from([0.7, 0.95, None]),
        admission=st.sampled_from(["fcfs", *ADMISSIONS]),
        slo_ttft_s=st.sampled_from([0.75, 2.0, 5.0]),
        pipeline_depth=st.sampled_from([1, 2]),
        max_waiting=st.sampled_from([None, None, 1, 2, 4]),
        queue=st.sampled_from([{}] * len(QUEUES) + QUEUES),
        max_prefills=st.sampled_from([None, None, 1, 2]),
        kept_share=st.sampled_from([0.1, 0.5, 1.0]),
        long_from=st.sampled_from([None, None, 5, 8, 13]),
    )
    def start(
        self,
        num_pages: int,
        page_tokens: int,
        max_num_seqs: int,
        extra_budget: int,
        num_host_pages: int,
        policy: str,
        low_mark: float,
        high_mark: float | None,
        admission: str,
        slo_ttft_s: float,
        pipeline_depth: int,
        max_waiting: int | None,
        queue: dict[str, Any],
        max_prefills: int | None,
        kept_share: float,
        long_from: int | None,
    ) -> None:
        cache = CacheConfig(
            policy, adapter_share=0.5, tau_s=2.0, window_s=8.0, low_mark=low_mark, high_mark=high_mark
        )
        config = PolicyConfig(
            num_pages,
            page_tokens,
            40,
            max_num_seqs,
            max_num_seqs + extra_budget,
            num_host_pages,
            1000,
            cache,
            admission,
            slo_ttft_s,
            pipeline_depth,
            max_waiting,
            QueueConfig(**queue),
            max_prefills_per_step=max_prefills,
            kept_share=kept_share,
            long_from=long_from,
        )
        self.begin(config, DeviceModel(page_tokens, pipeline_depth))

    def begin(self, config: PolicyConfig, device: DeviceModel) -> None:
        self.config = config
        self.replica = Replica(config)
        self.replica._residency.changes.block_bytes = BLOCK_BYTES
        self.most_adapter_pages = min(4, adapter_pages_limit(self.config))
        self.timer: float | None = None
        self.ready: set[str] = set()
        self.device = device
        device.long_from = config.long_from
        self.now = 0.0
        self.ids = itertools.count()
        self.requests: dict[str, Request] = {}
        self.ended: dict[tuple[str, int], str] = {}
        self.rejected: set[str] = set()
        self.turned_away: set[str] = set()
        self.aborted: set[str] = set()
        self.emitted: dict[tuple[str, int], list[int]] = {}
        self.adapters: dict[int, int] = {}
        self.removed: set[int] = set()
        self.arrived_s: dict[str, float] = {}
        self.admission_order: list[str] = []
        self.attempts: dict[str, int] = {}
        self.given_up: tuple[str, int] | None = None  # an attempt that another takes the place of
        self.leaving: set[str] = set()
        self.away: set[str] = set()  # let go, and not back yet
        self.moved: set[str] = set()
        self.resumed: set[str] = set()  # came back with tokens, the last time
        self.scored: dict[str, int] = {}  # of prompts' positions, how many are told of
        self.num_scored_before: dict[int, int] = {}  # by sequence, as it started
        self.scoring: dict[int, dict[int, tuple[int, int]]] = {}  # by step and sequence: what its row scores
        self.ending = 0
        self.adapter_ids = itertools.count(1)
        self.told: dict[int, AdapterUse] = {}
        self.num_reports = 0
        self.told_tiers: dict[int, int] = {}
        self.told_blocks: set[int] = set()

    def check(self) -> None:
        check(self.replica)

    def feed(self, event: Event) -> None:
        self.now += EVENT_S
        if isinstance(event, StepDone):
            self.ending = event.step
        commands = self.replica.handle(event, self.now)
        if self.config.pipeline_depth == 1:
            check_order(commands)
        for command in commands:
            self.note(command)
            self.device.obey(command)
        self.check()

    def note(self, command: Any) -> None:
        match command:
            case RunStep():
                most = self.config.max_prefills_per_step
                assert most is None or sum(row.num_tokens > 1 for row in command.rows) <= most
                scored = self.num_scored_before
                scored |= {start.sequence: start.num_scored for start in command.starts}
                self.scoring[command.step] = {
                    row.sequence: (max(row.start, scored[row.sequence]), row.start + row.num_tokens)
                    for row in command.rows
                }
            case PromptScored():
                asked = self.requests[command.request]
                assert asked.params.prompt_logprobs is not None
                last = len(asked.prompt) - 1
                first, end = self.scoring[self.ending][command.sequence]
                assert first == command.start == self.scored.get(command.request, 0), "each once, in order"
                assert first < last
                self.scored[command.request] = min(end, last)
            case Emit():
                self.check_scored(command.request)
                tokens = self.emitted.setdefault((command.request, command.sample), [])
                assert command.position == len(tokens), "each position is emitted once, in order"
                assert (command.request, command.sample) not in self.ended, "nothing follows the end"
                tokens.append(command.token)
            case Finish():
                key = (command.request, command.sample)
                assert key not in self.ended, "each sample ends exactly once"
                assert command.request not in self.rejected
                self.ended[key] = command.reason
                if command.reason == "length":
                    self.check_scored(command.request)
                if command.error is not None and "first token" in command.error.message:
                    self.note_refusal(command)
            case Reject():
                assert command.request not in self.rejected
                is_back = command.request in self.moved
                assert is_back or not any(request == command.request for request, _ in self.ended)
                self.rejected.add(command.request)
                if command.error.status == 429:
                    self.turned_away.add(command.request)
            case SetTimer():
                assert command.at > self.now
                self.timer = command.at
            case Ready():
                assert command.request not in self.ready, "a request becomes ready once"
                assert command.adapter_s >= 0
                assert command.kv_s >= 0
                self.ready.add(command.request)
            case Admitted():
                asked = self.requests[command.request]
                assert 0 <= command.num_cached <= len(asked.prompt)
                if asked.params.prompt_logprobs is not None:
                    num_scored = self.scored.get(command.request, 0)
                    is_known = num_scored == len(asked.prompt) - 1
                    assert is_known or command.num_cached <= num_scored, "nothing unscored is reused"
                self.admission_order.append(command.request)
            case Released():
                self.note_release(command)
            case AdapterFreed():
                assert command.adapter in self.removed
                self.removed.remove(command.adapter)
                live = [r for r in self.requests.values() if r.adapter == command.adapter]
                assert all(self.has_ended(r) or r.id in self.away for r in live), "freed when nobody uses it"

    def check_scored(self, name: str) -> None:
        """Nothing is said of samples before all of the prompt has been."""
        if self.requests[name].params.prompt_logprobs is not None:
            assert self.scored.get(name, 0) == len(self.requests[name].prompt) - 1

    def note_release(self, command: Released) -> None:
        """Every Release has one answer, which tells how far each sample came."""
        name = command.request
        is_given_up = (name, command.attempt) == self.given_up
        if command.attempt != self.attempts.get(name, 0) and not is_given_up:
            assert command.positions == ()
            return
        samples = range(self.requests[name].params.n)
        assert command.positions == tuple(len(self.emitted.get((name, sample), ())) for sample in samples)
        self.leaving.discard(name)
        self.ready.discard(name)
        if name in self.admission_order:
            self.admission_order.remove(name)
        if is_given_up:
            self.given_up = None
        elif not self.has_ended(self.requests[name]):
            self.away.add(name)

    def note_refusal(self, command: Finish) -> None:
        """Somebody waited too long; only early abort says so, and only to those who never began."""
        assert self.config.admission == "early-abort"
        assert self.config.slo_ttft_s is not None
        assert (command.reason, command.error and command.error.status) == ("error", 503)
        assert command.request not in self.admission_order
        assert not self.emitted.get((command.request, command.sample)), "its first token came"
        waited_s = self.now - self.arrived_s[command.request]
        assert waited_s + FIRST_STEP_S >= self.config.slo_ttft_s

    def has_ended(self, request: Request) -> bool:
        return request.id in self.rejected or all(
            (request.id, sample) in self.ended for sample in range(request.params.n)
        )

    def live(self) -> list[str]:
        return sorted(r.id for r in self.requests.values() if not self.has_ended(r) and r.id not in self.away)

    def num_queued(self, but: str = "") -> int:
        """Requests that wait for their first admission, however many samples each has."""
        return len(set(self.live()) - set(self.admission_order) - self.resumed - self.leaving - {but})

    # ------------------------------------------------------------ rules

    @rule(num_pages=st.integers(1, 4))
    def add_adapter(self, num_pages: int) -> None:
        adapter = next(self.adapter_ids)
        num_pages = min(num_pages, self.most_adapter_pages)
        self.adapters[adapter] = num_pages
        self.told[adapter] = AdapterUse(adapter, "absent", num_pages, 0, 0)
        self.feed(AdapterAdded(adapter, num_pages))

    @precondition(lambda self: self.adapters)
    @rule(data=st.data())
    def remove_adapter(self, data: st.DataObject) -> None:
        adapter = data.draw(st.sampled_from(sorted(self.adapters)))
        del self.adapters[adapter]
        self.removed.add(adapter)
        self.feed(AdapterRemoved(adapter))

    @rule(
        data=st.data(),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        max_tokens=st.integers(0, 10),
        min_tokens=st.integers(0, 2),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        stops=st.booleans(),
        together=st.sampled_from([1, 1, 1, 2, 3]),
        scope=st.sampled_from(["", "", "a", "b"]),
        priority=st.integers(-1, 3),
        client=st.integers(0, 2),
        scores=st.sampled_from([None, None, None, 0]),
    )
    def arrive(
        self,
        data: st.DataObject,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        n: int,
        stops: bool,
        together: int,
        scope: str,
        priority: int,
        client: int,
        scores: int | None,
    ) -> None:
        max_tokens = max_tokens if scores is not None else max(1, max_tokens)
        # Removed adapters too: such a request must be rejected.
        adapter = data.draw(st.sampled_from([BASE, *sorted(self.adapters), *sorted(self.removed)]))
        params = SamplingParams(
            n=n, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), seed=0, prompt_logprobs=scores
        )
        stop_ids = (VOCABULARY - 1,) if stops else ()
        num_steps = len(self.device.steps)
        for num_more in reversed(range(together)):
            request = Request(f"r{next(self.ids)}", adapter, tuple(prompt), params, stop_ids, scope)
            if self.config.queue.has_priorities:
                request = dataclasses.replace(request, priority=priority)
            if self.config.queue.fair_by == "key":
                request = dataclasses.replace(request, client=client, share=3.0 if client == 1 else 1.0)
            self.arrived_s[request.id] = self.now + EVENT_S
            is_full = self.config.max_waiting is not None and self.num_queued() >= self.config.max_waiting
            self.requests[request.id] = request
            self.feed(Arrive(request, more=num_more > 0))
            is_wrong = request.id in self.rejected - self.turned_away
            assert is_wrong or (request.id in self.turned_away) == is_full, "refused where the queue is full"
            if num_more:
                assert len(self.device.steps) == num_steps, "no step starts before the last has come"
            if adapter in self.removed:
                assert request.id in self.rejected

    def ask(self, adapter: int, prompt: list[int], max_tokens: int) -> None:
        """One request of one sample."""
        params = SamplingParams(max_tokens=max_tokens, seed=0)
        request = Request(f"r{next(self.ids)}", adapter, tuple(prompt), params, ())
        self.arrived_s[request.id] = self.now + EVENT_S
        self.requests[request.id] = request
        self.feed(Arrive(request))

    @precondition(lambda self: self.adapters)
    @rule(data=st.data(), is_pinned=st.sampled_from([True, True, True, False]))
    def keep_adapter(self, data: st.DataObject, is_pinned: bool) -> None:
        """A router wants a copy of it, or does not any more."""
        adapter = data.draw(st.sampled_from(sorted(self.adapters)))
        self.feed(PinAdapter(adapter, is_pinned))
        kept = self.replica._pinned.pinned
        most_pages = self.config.kept_share * self.config.num_pages
        assert sum(self.adapters[each] for each in kept) <= most_pages, "copies stay within their share"
        assert is_pinned or adapter not in kept

    @precondition(lambda self: self.live())
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data: st.DataObject, whole: bool) -> None:
        request = data.draw(st.sampled_from(self.live()))
        sample = None if whole else data.draw(st.integers(0, self.requests[request].params.n - 1))
        self.aborted.add(request)
        self.feed(Abort(request, sample))
        if whole:
            assert self.has_ended(self.requests[request])

    @precondition(lambda self: self.live())
    @rule(data=st.data(), is_known=st.sampled_from([True] * 7 + [False]))
    def release(self, data: st.DataObject, is_known: bool) -> None:
        """Another replica is to have a request, or somebody believes that it is here."""
        request = data.draw(st.sampled_from(self.live()))
        attempt = self.attempts.get(request, 0)
        if is_known:
            self.moved.add(request)
            self.leaving.add(request)
            self.feed(Release(request, attempt))
            if not self.device.steps:
                assert request in self.away, "without a step in flight it is let go at once"
        else:
            self.feed(Release(request, attempt + 1))
            assert request not in self.away, "another attempt is none of its business"

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        self.go_on(data.draw(st.sampled_from(sorted(self.away))))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def come_again(self, data: st.DataObject) -> None:
        """Whoever had sent a live request sends it once more, with the tokens that have come."""
        self.go_on(data.draw(st.sampled_from(self.live())))

    def go_on(self, name: str) -> None:
        request = self.requests[name]
        samples = range(request.params.n)
        resume = tuple(tuple(self.emitted.get((name, sample), ())) for sample in samples)
        closed = tuple(sample for sample in samples if (name, sample) in self.ended)
        attempt = self.attempts.get(name, 0)
        if name not in self.away:
            self.given_up = name, attempt
        self.moved.add(name)
        self.away.discard(name)
        self.attempts[name] = attempt + 1
        (self.resumed.add if any(resume) else self.resumed.discard)(name)
        is_full = self.config.max_waiting is not None and self.num_queued(name) >= self.config.max_waiting
        waited_s = self.now + EVENT_S - self.arrived_s[name]
        given = resume if any(resume) else ()
        if not given:
            self.scored.pop(name, None)
        self.feed(Arrive(request, False, given, closed, waited_s, attempt + 1))
        assert self.given_up is None, "the attempt before has been given up"
        if name in self.rejected:
            assert is_full or request.adapter not in {BASE, *self.adapters}

    @precondition(lambda self: self.device.steps)
    @rule(data=st.data(), how=st.sampled_from(["well"] * 14 + ["failed", "unsound"]))
    def end_step(self, data: st.DataObject, how: str) -> None:
        awaits = self.device.steps[0].command.awaits
        late: tuple[int, ...] = ()
        if awaits and how != "failed":  # else it could not even be issued, perhaps
            for copy in self.device.awaited():
                self.end_copy_of(copy, data.draw(st.sampled_from([True, True, True, False])), 0.01)
            late = tuple(wanted.copy for wanted in awaits if data.draw(st.integers(0, 5)) == 0)
        done = self.device.finish_step(ok=how != "failed", late=late)
        if how == "unsound" and done.tokens:
            sampled_sequences = [sequence for sequence, _ in done.tokens]
            done.unsound = tuple(data.draw(st.lists(st.sampled_from(sampled_sequences), unique=True)))
        self.feed(done)

    @precondition(lambda self: self.device.reads)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def land_read(self, data: st.DataObject, ok: bool) -> None:
        read = data.draw(st.sampled_from(self.device.reads))
        self.device.land(read, ok)
        self.feed(AdapterRead(read.adapter, ok, "" if ok else "made to fail"))

    @precondition(lambda self: self.device.copies)
    @rule(data=st.data(), ok=st.sampled_from([True] * 7 + [False]), copy_s=st.sampled_from([1e-6, 1.0]))
    def end_copy(self, data: st.DataObject, ok: bool, copy_s: float) -> None:
        """In any order, and sometimes not at all; so slow at times that computing is cheaper."""
        self.end_copy_of(data.draw(st.sampled_from(sorted(self.device.copies))), ok, copy_s)

    def end_copy_of(self, copy: int, ok: bool, copy_s: float) -> None:
        self.device.end_copy(copy, ok)
        self.feed(CopyDone(copy, ok, copy_s, "" if ok else "made to fail"))

    @precondition(lambda self: self.timer is not None)
    @rule()
    def ring(self) -> None:
        self.timer = None
        self.feed(Timer())

    @rule()
    def look(self) -> None:
        """What snapshots of changes have told together is what one of everything tells."""
        changed = gauges(self.replica, "changed")
        self.told |= {use.adapter: use for use in changed.adapters}
        whole = gauges(self.replica)
        assert [self.told[use.adapter] for use in whole.adapters] == list(whole.adapters)
        assert dataclasses.replace(changed, adapters=whole.adapters) == whole

    @rule(is_full=st.sampled_from([True, False, False, False, False]))
    def tell_router(self, is_full: bool) -> None:
        """What reports of changes have told together is what one of everything tells, and nothing was lost
        untold."""
        (status,) = self.replica.handle(StatusDue(is_full), self.now)
        assert isinstance(status, Status)
        self.num_reports += 1
        assert status.seq == self.num_reports
        assert status.is_full == (is_full or status.seq == 1)
        whole = gauges(self.replica)
        tiers = self.told_tiers = dict(() if status.is_full else self.told_tiers) | dict(status.residency)
        there = {use.adapter: use for use in whole.adapters if use.adapter != BASE}
        for adapter in tiers.keys() | there.keys():
            use = there.get(adapter)
            on_host = use is not None and use.host_state == "held"
            on_device = use is not None and use.state == "resident"
            assert tiers.get(adapter, NOWHERE) == (
                ON_DEVICE if on_device else ON_HOST if on_host else NOWHERE
            )
        assert (status.running, status.waiting) == (whole.num_running, whole.num_waiting)
        assert 0 <= status.free_pages + status.reclaimable_pages <= whole.pages_total
        assert min(status.waiting_tokens, status.kv_tokens) >= 0
        cached = cached_blocks(self.replica._tree)
        assert self.told_blocks - set(status.evicted) <= cached, "a lost block is told of"
        self.told_blocks = cached

    @invariant()
    def work_never_stalls(self) -> None:
        if hasattr(self, "device") and self.live():
            device = self.device
            assert device.steps or device.reads or device.copies or device.switches, (
                "live requests keep something going"
            )

    # ------------------------------------------------------------ the end

    def teardown(self) -> None:
        if not hasattr(self, "device"):
            return
        for _ in range(10_000):
            if self.away:
                self.go_on(min(self.away))
            elif self.device.reads:
                read = self.device.reads[0]
                self.device.land(read, True)
                self.feed(AdapterRead(read.adapter, True))
            elif self.device.copies:
                self.end_copy_of(min(self.device.copies), True, 0.01)
            elif self.device.switches:
                self.feed(self.device.end_switch(0.01))
            elif self.device.steps:
                self.feed(self.device.finish_step(ok=True))
            else:
                break
        assert not self.live(), "every admitted request ends"
        assert not self.removed, "every removed adapter is freed"
        for request in self.requests.values():
            for sample in range(request.params.n):
                if self.ended.get((request.id, sample)) in ("stop", "length"):
                    expected = undisturbed(
                        request.adapter, request.prompt, request.params, request.stop_ids, sample
                    )
                    emitted = self.emitted.get((request.id, sample), [])
                    assert emitted == expected, "no schedule changes tokens"
        firsts = [int(request[1:]) for request in self.admission_order if request not in self.moved]
        assert len(firsts) == len(set(firsts)), "a request is admitted for the first time once"
        is_usual = self.config.queue == QueueConfig() and not self.config.merge.is_on
        if self.config.admission == "fcfs" and is_usual:
            assert firsts == sorted(firsts), "admission is in arrival order: nobody starves"
        assert not self.device.sequences, "the executor was told to forget every sequence"
        snapshot = gauges(self.replica)
        assert snapshot.num_running == snapshot.num_waiting == snapshot.pages_running == 0
        assert snapshot.pages_loading == snapshot.pages_saving == 0
        used = snapshot.pages_free + snapshot.pages_history + snapshot.pages_adapters
        assert used == snapshot.pages_total


ReplicaMachine.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=60,
    deadline=None,
    # Shrinking a stateful failure can take minutes; the seed that is printed reproduces it.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestReplicaProperties = ReplicaMachine.TestCase
