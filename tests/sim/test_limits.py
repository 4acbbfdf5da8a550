"""Bounds on what any cache policy can keep: against exhaustive search, and against every policy's real runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_lab.baselines import ALL_CACHE_POLICIES
from manylora_lab.sim import limits as limits_module
from manylora_lab.sim.limits import Limits, Recorder, limits, most_kept, recorded, reference, summarize_limits
from manylora_lab.sim.replay import Replay
from manylora_lab.sim.summary import summarize
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

from manylora.config.policy import PolicyConfig
from manylora.protocol.commands import (
    Command,
    Emit,
    EndSequence,
    ReadAdapter,
    RunStep,
    SequenceStart,
    StepRow,
    SwapPages,
)
from manylora.types import BASE, SamplingParams
from tests.sim.test_replay import COSTS, chat, config_of, request, stream_of

PARAMS = SamplingParams(max_tokens=1, seed=0)
PAGE = 2  # tokens, in what is not a replay
SIZES = {BASE: 0, 1: 1, 2: 2}

# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("idle", "capacity", "most"),
    [
        ([], [1, 1], 0),
        ([(0, 3, 1), (1, 1, 1), (2, 2, 1)], [1, 1, 1, 1], 2),
        ([(0, 3, 1), (1, 1, 1), (2, 2, 1)], [2, 2, 2, 2], 3),
        ([(0, 3, 5), (1, 1, 3)], [4, 4, 4, 4], 4),  # of the five, three give way, and one never fits
        ([(0, 2, 2)], [2, 1, 2], 1),
        ([(0, 0, 1), (2, 2, 1)], [0, 9, 1], 1),
    ],
)
def test_who_is_needed_last_gives_way(
    idle: list[tuple[int, int, int]], capacity: list[int], most: int
) -> None:
    assert most_kept(idle, capacity) == most


def start_of(
    sequence: int, adapter: int, tokens: tuple[int, ...], num_computed: int = 0, num_prompt: int | None = None
) -> SequenceStart:
    return SequenceStart(
        sequence, 0, adapter, tokens, num_prompt or len(tokens), num_computed, (), PARAMS, ()
    )


def run_of(sequence: int, adapter: int, tokens: tuple[int, ...]) -> list[Command]:
    """A request that is computed in one step and ends."""
    row = StepRow(sequence, 0, len(tokens), 1)
    return [RunStep(sequence, (start_of(sequence, adapter, tokens),), (row,)), EndSequence(sequence)]


def record_of(*commands: Command) -> Recorder:
    record = Recorder(PAGE)
    for command in commands:
        record.watch(0.0, command)
    return record


def test_a_page_counts_from_when_it_was_first_computed() -> None:
    a, b = (1, 1, 5), (2, 2, 5)
    record = record_of(*run_of(1, BASE, a), *run_of(2, BASE, b), *run_of(3, BASE, a), *run_of(4, BASE, b))
    assert record.pages_in_use == [2] * 4, "a full page and a tail"
    assert (record.kv.num_accesses, record.tokens_asked) == (4, 12)
    assert record.kv.idle == {(1, 1, 1): 1, (2, 2, 1): 1}
    assert limits(record, 2).kv_pages == 0
    assert limits(record, 3).kv_pages == 2
    with pytest.raises(ValueError, match="2 pages were in use at once, of 1"):
        limits(record, 1)


def test_pages_are_told_apart_by_adapter_and_by_what_is_before_them() -> None:
    read = [ReadAdapter(adapter, tuple(range(SIZES[adapter]))) for adapter in (1, 2)]
    runs = [run_of(1, 1, (7, 7, 8, 8, 0)), run_of(2, 2, (7, 7, 0)), run_of(3, BASE, (7, 7, 0)),
            run_of(4, 1, (8, 8, 0)), run_of(5, 1, (7, 7, 8, 8, 9, 9, 0))]  # fmt: skip
    record = record_of(*read, *itertools.chain(*runs))
    assert record.kv.idle == {(1, 3, 1): 2}
    assert record.adapters.idle == {(1, 2, 1): 1}, "of its three runs the last two follow each other"
    assert (record.adapters.num_accesses, record.adapters.num_free) == (4, 1)
    assert record.adapters_read == record.adapters_brought == 2


def test_what_a_reply_filled_can_be_asked_for() -> None:
    def step(number: int, at: int) -> Command:
        return RunStep(number, (), (StepRow(1, at, 1, 1),))

    first = RunStep(1, (start_of(1, BASE, (1, 2, 3)),), (StepRow(1, 0, 3, 1),))
    drawn = [Emit("a", 0, position, 4 + position, (1, 0)) for position in range(3)]
    another_s = Emit("a", 1, 0, 9, (1, 1))  # drawn for a fork, which has a sequence of its own
    turns: list[Command] = [
        first, drawn[0], another_s, step(2, 3), drawn[1], step(3, 4), drawn[2], EndSequence(1)
    ]  # fmt: skip
    again = RunStep(4, (start_of(2, BASE, (1, 2, 3, 4, 5, 6, 7), 4),), (StepRow(2, 4, 3, 1),))
    record = record_of(*turns, again)
    assert record.pages_in_use == [2, 2, 3, 4]
    assert record.kv.num_free == 2, "the page of tokens 5 and 6 was never full: 6 was drawn last"
    assert record.kv_pages_found == 2
    assert record.kv.num_accesses == 1 + 3


def test_a_page_filled_by_a_token_that_is_learnt_late_is_known_by_it() -> None:
    """Two steps in flight: the second computes what the first draws, before anybody knows what that is."""

    def step(number: int, at: int, *starts: SequenceStart) -> Command:
        return RunStep(number, starts, (StepRow(1, at, 1, 1),))

    first = RunStep(1, (start_of(1, BASE, (1, 2, 3)),), (StepRow(1, 0, 3, 1),))
    news: list[Command] = [Emit("a", 0, 0, 4, (1, 0)), Emit("a", 0, 1, 5, (1, 0)), EndSequence(1)]
    again = RunStep(4, (start_of(2, BASE, (1, 2, 3, 4, 5), 4),), (StepRow(2, 4, 1, 1),))
    other = run_of(3, BASE, (9,))
    record = record_of(first, step(2, 3), *news, *other, again)
    assert record.pages_in_use == [2, 2, 1, 3]
    assert record.kv.idle == {(2, 2, 1): 2}, "both pages, since the second step"
    at_once = record_of(first, news[0], step(2, 3), *news[1:], *other, again)
    assert (at_once.kv, at_once.pages_in_use) == (record.kv, record.pages_in_use)


def test_what_was_before_the_beginning_may_be_anywhere() -> None:
    record = record_of(*run_of(1, BASE, (1, 1, 5)), *run_of(2, BASE, (2, 2, 5)))
    record.begin()
    for command in [*run_of(3, BASE, (3, 3, 5)), *run_of(4, BASE, (1, 1, 5)), *run_of(5, BASE, (2, 2, 5))]:
        record.watch(0.0, command)
    assert record.kv.idle == {(2, 2, 1): 1, (2, 3, 1): 1}
    assert [limits(record, pages).kv_pages for pages in (2, 3, 4)] == [0, 1, 2]


def test_whole_adapters_are_bounded_by_their_pages_and_by_the_smallest() -> None:
    """Each run has a tail and its adapter in use: of the pool's pages, 2, 2, 3, 3, 2, 2, 3 and 3."""
    sizes = {1: 1, 2: 1, 3: 2, 4: 2}
    reads = [ReadAdapter(adapter, tuple(range(size))) for adapter, size in sizes.items()]
    runs = [run_of(number, 1 + (number - 1) % 4, (number,)) for number in range(1, 9)]
    record = record_of(*reads, *itertools.chain(*runs))
    assert sorted(record.adapters.idle) == [(1, 3, 1), (2, 4, 1), (3, 5, 2), (4, 6, 2)]
    # At 4 pages only one of them can be kept whole; two halves and small ones say two. Else it is exact.
    most = {pages: limits(record, pages).adapters for pages in (3, 4, 5, 6, 7, 8)}
    assert most == {3: 0, 4: 2, 5: 3, 6: 3, 7: 4, 8: 4}


# ---------------------------------------------------------------- exhaustive search

Item = tuple[Any, ...]


@dataclasses.dataclass
class Moment:
    """One step, in plain sets: what starting sequences asked for, in order, with whether it was in use; what is
    in use during the step; how many pages tails take."""

    asks: list[tuple[Item, bool]]
    in_use: frozenset[Item]
    num_tails: int


class Script:
    """Random sequences that start, compute and end: the commands, and the moments as sets say them."""

    PROMPTS = ((0, 0, 5), (0, 0, 1, 1, 5), (0, 0, 0), (1, 1, 5), (0, 0, 1, 1, 0, 0, 5))

    def __init__(self, choices: list[tuple[int, ...]], sizes: dict[int, int]) -> None:
        self.commands: list[Command] = [ReadAdapter(a, tuple(range(n))) for a, n in sizes.items() if n]
        self.sizes = sizes
        self.moments: list[Moment] = []
        self.known: set[Item] = set()
        self.running: dict[int, tuple[int, list[int], int]] = {}  # adapter, tokens, computed
        for number, (prompt, adapter, chunk, num_starts, ending, reuses) in enumerate(choices):
            self._end(ending)
            starts = [
                self._start(10 * number + count, self.PROMPTS[(prompt + count) % 5], adapter, bool(reuses))
                for count in range(num_starts)
            ]
            self._step(number, starts, chunk)

    def used_by(self, adapter: int, tokens: list[int], computed: int) -> set[Item]:
        pages = {(adapter, *tokens[: end * PAGE]) for end in range(1, computed // PAGE + 1)}
        return pages | {("adapter", adapter)} - {("adapter", BASE)}

    def size_of(self, item: Item) -> int:
        """Of an adapter; of a page, which an adapter's part is as well, 1."""
        return self.sizes[item[1]] if item[0] == "adapter" and len(item) == 2 else 1

    def pages_in_use(self) -> list[int]:
        return [moment.num_tails + sum(map(self.size_of, moment.in_use)) for moment in self.moments]

    def in_use(self) -> set[Item]:
        return set().union(*(self.used_by(*running) for running in self.running.values()))

    def _end(self, ending: int) -> None:
        for sequence in list(self.running)[:ending]:
            del self.running[sequence]
            self.commands.append(EndSequence(sequence))

    def _start(self, number: int, tokens: tuple[int, ...], adapter: int, reuses: bool) -> SequenceStart:
        ends = itertools.takewhile(
            lambda end: (adapter, *tokens[: end * PAGE]) in self.known,
            range(1, (len(tokens) - 1) // PAGE + 1),
        )
        return start_of(number, adapter, tokens, PAGE * sum(1 for _ in ends) if reuses else 0)

    def _step(self, number: int, starts: list[SequenceStart], chunk: int) -> None:
        asks: list[tuple[Item, bool]] = []
        for start in starts:
            asked: list[Item] = [(start.adapter, *start.tokens[: end * PAGE]) for end in (1, 2, 3)]
            asked = [page for page in asked if len(page) - 1 < len(start.tokens)]
            asked += [("adapter", start.adapter)] if start.adapter != BASE else []
            in_use = self.in_use()
            asks += [(item, item in in_use) for item in asked if item in self.known or item in in_use]
            self.running[start.sequence] = (start.adapter, list(start.tokens), start.num_computed)
        rows = []
        drawn = []
        for sequence, (adapter, tokens, computed) in self.running.items():
            end = min(computed + chunk, len(tokens))
            is_whole = end == len(tokens)
            rows.append(StepRow(sequence, computed, end - computed, int(is_whole)))
            self.running[sequence] = (adapter, tokens, end)
            if is_whole:
                drawn.append(Emit(str(sequence), 0, 0, 0, (sequence, 0)))
        in_use = self.in_use()
        self.known |= in_use
        num_tails = sum(computed % PAGE > 0 for _, _, computed in self.running.values())
        self.moments.append(Moment(asks, frozenset(in_use), num_tails))
        self.commands += [RunStep(number, tuple(starts), tuple(rows)), *drawn]
        for emit in drawn:
            self.running[emit.sampled_by[0]][1].append(emit.token)


def exhaustive(script: Script, num_pages: int, kinds: str, by_page: bool = False) -> int:
    """The most asks that are found, over all choices of what to keep in every step; every ask may keep.

    ``by_page``: each page of an adapter is an item of its own.
    """

    def is_wanted(item: Item) -> bool:
        return ("adapter" if item[0] == "adapter" else "kv") in kinds

    def split(item: Item) -> list[Item]:
        if not by_page or item[0] != "adapter":
            return [item]
        return [(*item, part) for part in range(script.size_of(item))]

    moments = [
        (
            [(part, is_free) for item, is_free in moment.asks if is_wanted(item) for part in split(item)],
            frozenset(part for item in moment.in_use for part in split(item)),
            num_pages - in_use,
        )
        for moment, in_use in zip(script.moments, script.pages_in_use(), strict=True)
    ]

    @functools.cache
    def best(step: int, there: frozenset[Item]) -> int:
        """From this step on, where ``there`` is at hand before it."""
        if step == len(moments):
            return 0
        asks, in_use, room = moments[step]
        found, asked = 0, set[Item]()
        for item, is_free in asks:
            found += is_free or item in there or item in asked
            asked.add(item)
        later = {item for asks, _, _ in moments[step + 1 :] for item, _ in asks}
        idle = [item for item in there - in_use if item in later]
        kept = [
            frozenset(choice)
            for count in range(len(idle) + 1)
            for choice in itertools.combinations(idle, count)
            if sum(map(script.size_of, choice)) <= room
        ]
        most = max(best(step + 1, frozenset(later & (keep | in_use | asked))) for keep in kept)
        return found + most

    return best(0, frozenset())


STEP = st.tuples(*(st.integers(*ends) for ends in ((0, 4), (0, 2), (1, 7), (0, 2), (0, 3), (0, 1))))


SCRIPTS = st.lists(STEP, min_size=2, max_size=8)


@given(SCRIPTS, st.integers(0, 4))
@settings(max_examples=200, deadline=None)
def test_bounds_are_the_best_of_all_choices(choices: list[tuple[int, ...]], spare: int) -> None:
    script = Script(choices, SIZES)
    record = record_of(*script.commands)
    assert record.pages_in_use == script.pages_in_use()
    num_pages = max(record.pages_in_use) + spare
    most = limits(record, num_pages)
    assert most.kv_pages == exhaustive(script, num_pages, "kv")
    assert most.pages == exhaustive(script, num_pages, "kv adapter", by_page=True)
    assert most.adapters >= exhaustive(script, num_pages, "adapter")


def test_the_best_of_all_choices_where_pages_are_scarce() -> None:
    """Long scripts, of which most cannot keep all: what shrinks towards small examples seldom comes by."""
    rng = random.Random(0)
    num_scarce = 0
    for _ in range(60):
        ends = ((0, 4), (0, 2), (2, 7), (0, 2), (0, 3), (0, 1))
        script = Script([tuple(rng.randint(*pair) for pair in ends) for _ in range(12)], SIZES)
        record = record_of(*script.commands)
        num_pages = max(record.pages_in_use) + rng.randint(0, 1)
        most = limits(record, num_pages)
        num_scarce += most.pages < limits(record, 99).pages
        assert most.kv_pages == exhaustive(script, num_pages, "kv")
        assert most.pages == exhaustive(script, num_pages, "kv adapter", by_page=True)
        assert most.adapters >= exhaustive(script, num_pages, "adapter")
    assert num_scarce > 20


@given(SCRIPTS, st.integers(0, 4), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_adapters_of_one_size_are_bounded_exactly(
    choices: list[tuple[int, ...]], spare: int, size: int
) -> None:
    script = Script(choices, {BASE: 0, 1: size, 2: size})
    record = record_of(*script.commands)
    num_pages = max(record.pages_in_use) + spare
    assert limits(record, num_pages).adapters == exhaustive(script, num_pages, "adapter")


@given(st.lists(STEP, min_size=2, max_size=20))
@settings(max_examples=50, deadline=None)
def test_more_pages_never_keep_less(choices: list[tuple[int, ...]]) -> None:
    record = record_of(*Script(choices, SIZES).commands)
    fewest = max(record.pages_in_use)
    series = [dataclasses.astuple(limits(record, fewest + more)) for more in (0, 1, 2, 3, 50)]
    for numbers in zip(*series, strict=True):
        assert list(numbers) == sorted(numbers)
    kv, adapters = record.kv, record.adapters
    all_seen_before = [asks.num_free + asks.idle.total() for asks in (kv, adapters)]
    assert [*series[-1][:2]] == all_seen_before


IDLE = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 3)).map(
    lambda t: (min(t[:2]), max(t[:2]), t[2])
)


@given(st.lists(IDLE, max_size=6), st.lists(st.integers(0, 4), min_size=7, max_size=7))
def test_most_kept_is_the_most_over_all_subsets(
    idle: list[tuple[int, int, int]], capacity: list[int]
) -> None:
    def fits(counts: tuple[int, ...]) -> bool:
        return all(
            sum(n for n, (first, last, _) in zip(counts, idle, strict=True) if first <= step <= last) <= room
            for step, room in enumerate(capacity)
        )

    every = itertools.product(*(range(count + 1) for _, _, count in idle))
    assert most_kept(idle, capacity) == max(sum(counts) for counts in every if fits(counts))


# ---------------------------------------------------------------- real runs


def shared(num: int = 60, gap_s: float = 0.03) -> Stream:
    """Single requests over five adapters, some popular; under each a system prompt that all share."""
    requests = []
    for number in range(num):
        adapter = (0, 1, 0, 2, 0, 1, 3, 4)[number % 8]
        pieces = (Piece(("system", number % 3), 9), Piece(("user", number % 7), 3 + number % 4))
        requests.append(StreamRequest(number * gap_s, adapter, number, 0, pieces, 2 + number % 6))
    return stream_of(*requests)


CASES = {
    "two tiers": (chat(12, 3, 0.05), 40, 80),
    "little host": (chat(12, 4, 0.02), 28, 20),
    "no host": (chat(20, 4, 0.03), 36, 0),
    "slow": (chat(6, 4, 0.3), 40, 40),
    "shared prompts": (shared(), 32, 24),
}


@functools.cache
def run(policy: str, case: str, pipeline_depth: int = 1) -> tuple[Replay, Recorder, PolicyConfig]:
    stream, num_pages, num_host_pages = CASES[case]
    config = dataclasses.replace(config_of(policy, num_pages, num_host_pages), pipeline_depth=pipeline_depth)
    return (*recorded(stream, config, COSTS, (4,) * 5), config)


def bounds(record: Recorder, config: PolicyConfig) -> tuple[Limits, Limits]:
    return limits(record, config.num_pages), limits(record, config.num_pages + config.num_host_pages)


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", ALL_CACHE_POLICIES)
def test_no_policy_passes_its_bounds(policy: str, case: str, pipeline_depth: int) -> None:
    _, record, config = run(policy, case, pipeline_depth)
    device, both = bounds(record, config)
    asked = record.adapters
    assert record.kv_pages_found <= both.kv_pages
    assert record.kv_pages_found - record.kv_pages_copied_in <= device.kv_pages
    assert asked.num_accesses - record.adapters_read <= both.adapters
    assert asked.num_accesses - record.adapters_brought <= device.adapters
    adapter_pages = asked.num_pages_accessed - record.adapter_pages_read
    assert record.kv_pages_found + adapter_pages <= both.pages
    shares = summarize_limits(record, config)
    for name in ("kv_kept", "adapter_kept", "page_kept"):
        assert 0 <= shares[f"{name}_device"] <= shares[f"{name}_device_limit"] <= shares[f"{name}_limit"] <= 1
        assert shares[name] <= shares[f"{name}_limit"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", ALL_CACHE_POLICIES)
def test_the_policy_s_own_counters_stay_below_as_well(policy: str, case: str) -> None:
    """Where every admission led to a start, which is when they count the same."""
    replay, record, config = run(policy, case)
    device, both = bounds(record, config)
    before, after = replay.counters_at_start, replay.report().counters

    def grown(name: str) -> int:
        return int(getattr(after, name) - getattr(before, name))

    if grown("prefix_queries_tokens") != record.tokens_asked:
        assert grown("preemptions") > 0, "only who is preempted before it starts is not seen"
        return
    on_device, on_host = (grown(f"kv_hit_tokens_{tier}") // config.page_tokens for tier in ("device", "host"))
    assert on_device + on_host == record.kv_pages_found <= both.kv_pages
    assert on_device <= device.kv_pages + max(0, record.kv_pages_copied_in - on_host)
    hits = grown("adapter_hits_device"), grown("adapter_hits_host"), grown("adapter_misses")
    assert sum(hits) == record.adapters.num_accesses
    assert grown("adapter_reads") == record.adapters_read
    if policy in ("lru", "static-lru"):  # they bring nothing before it is asked for
        assert hits[0] <= device.adapters
        assert hits[0] + hits[1] <= both.adapters
        assert on_device <= device.kv_pages


def test_the_runs_are_under_pressure_and_most_admissions_are_seen() -> None:
    num_same = 0
    for case in CASES:
        for policy in ALL_CACHE_POLICIES:
            replay, record, config = run(policy, case)
            device, _ = bounds(record, config)
            assert device.pages < limits(record, 10_000).pages, (policy, case)
            queries = (
                replay.report().counters.prefix_queries_tokens
                - replay.counters_at_start.prefix_queries_tokens
            )
            num_same += queries == record.tokens_asked
    assert num_same >= len(CASES) * len(ALL_CACHE_POLICIES) // 2


def test_with_room_for_all_the_bound_is_reached() -> None:
    stream, config = chat(6, 4, 3.0), config_of("lru", 1000, 0)
    replay, record = recorded(stream, config, COSTS, [4] * 5)
    most = limits(record, 1000)
    assert record.kv_pages_found == most.kv_pages > 0
    assert record.adapters.num_accesses == most.adapters == 24
    assert summarize_limits(record, config)["kv_kept_limit"] == summarize(replay)["prefix_hit"]


def test_a_recorder_changes_nothing() -> None:
    stream, config = chat(12, 4, 0.02), config_of("manylora", 28, 20)
    alone = Replay(stream, config, COSTS, [4] * 5)
    alone.run()
    assert summarize(alone) == summarize(recorded(stream, config, COSTS, [4] * 5)[0])


def test_a_cold_start_finds_no_adapter_at_first() -> None:
    stream = stream_of(*(request(3.0 * number, number, 0, number % 2, 5, 2) for number in range(4)))
    _, record = recorded(stream, config_of("lru", 100), COSTS, [4] * 5, is_warm=False)
    assert (record.adapters_read, limits(record, 100).adapters) == (2, 2)


def test_copies_are_counted_by_what_they_bring() -> None:
    record = record_of(
        SwapPages(1, True, ((0, 1), (2, 3))), SwapPages(2, False, ((0, 1),)), SwapPages(3, True, ((0, 1),), 7),
        ReadAdapter(7, (1, 2, 3), "host"), ReadAdapter(8, (1, 2), "device"),
    )  # fmt: skip
    assert record.kv_pages_copied_in == 2
    assert (record.adapters_brought, record.adapter_pages_brought) == (2, 3)
    assert (record.adapters_read, record.adapter_pages_read) == (2, 5)


# ---------------------------------------------------------------- the reference


@pytest.mark.parametrize("case", CASES)
def test_in_the_reference_nothing_moves(case: str) -> None:
    stream, num_pages, num_host_pages = CASES[case]
    replay = reference(stream, config_of("manylora", num_pages, num_host_pages), COSTS, [4] * 5)
    numbers = summarize(replay)
    for name in ("adapter_miss", "adapter_hit_host", "kv_hit_host", "pages_in", "pages_out", "adapter_reads"):
        assert numbers[name] == 0, name
    assert numbers["adapter_hit_device"] == 1
    assert all(outcome.adapter_s == outcome.kv_s == 0 for outcome in replay.outcomes)
    # No law, but so it is here.
    for policy in ALL_CACHE_POLICIES:
        assert numbers["ttft_mean_ms"] <= summarize(run(policy, case)[0])["ttft_mean_ms"], policy


def test_a_reference_in_which_something_leaves_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, num_pages, num_host_pages = CASES["little host"]
    small = config_of("lru", num_pages, num_host_pages)
    monkeypatch.setattr(limits_module, "_endless", lambda *_: small)
    with pytest.raises(RuntimeError, match="nothing should leave in the reference of made up, but"):
        reference(stream, small, COSTS, [4] * 5)
