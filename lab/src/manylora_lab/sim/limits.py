"""What no cache policy could do better on one recorded run, and what unlimited memory would do.

Owns the record of which sequence asked for which pages when, taken from commands alone, and upper bounds for it of
Belady's kind; docs/limits.md states every relaxation and proves the bounds. Decides nothing and changes no run.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import hashlib
import heapq
from collections.abc import Iterable, Sequence

from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.protocol.commands import (
    Command,
    Emit,
    EndSequence,
    ReadAdapter,
    RunStep,
    SequenceStart,
    SwapPages,
)
from manylora.types import BASE, AdapterId, SequenceId
from manylora_lab.pricing.costs import StepCosts
from manylora_lab.sim.cold import NOTHING_COLD, ColdCosts
from manylora_lab.sim.device import MergeCosts
from manylora_lab.sim.replay import Replay, Watch
from manylora_lab.workloads.stream import Stream

_UNKNOWN = -1
_WARM_UP_TOKENS = 64
"""More than a replay asks of each adapter before its stream starts."""


@dataclasses.dataclass(slots=True)
class Accesses:
    """What starting sequences asked for, of one kind: pages of KV, or adapters.

    ``num_free`` of them were in use until then, or by others at that moment: every policy has those. ``idle``
    counts those that had to be kept through steps in which no sequence used them: by first and last such step and
    by how many pages each takes. The rest were never there before.
    """

    num_accesses: int = 0
    num_free: int = 0
    num_pages_accessed: int = 0
    num_pages_free: int = 0
    idle: collections.Counter[tuple[int, int, int]] = dataclasses.field(default_factory=collections.Counter)

    def note(self, first_idle: int, step: int, count: int, pages_each: int) -> None:
        """Count so many that were accessed at ``step`` and lay unused since ``first_idle``."""
        if first_idle < step:
            self.idle[first_idle, step - 1, pages_each] += count
        else:
            self.note_free(count, pages_each)

    def note_free(self, count: int, pages_each: int) -> None:
        """Count so many of those accessed as in use."""
        self.num_free += count
        self.num_pages_free += count * pages_each


@dataclasses.dataclass(slots=True)
class _Running:
    """A sequence between its start and its end. ``tokens``: those that are known, one less than ``num_computed``
    where two steps are in flight. ``chain``: its pages by number, of which ``num_used`` are full and known."""

    adapter: AdapterId
    tokens: list[int]
    digest: bytes
    num_computed: int = 0
    chain: list[int] = dataclasses.field(default_factory=list)
    num_used: int = 0
    has_tail: bool = False


class Recorder:
    """Listens to the commands of one run, from its first on, and keeps what bounds need.

    An access is a sequence's start: the step in which it first runs after it was admitted, for the first time
    or again. It accesses its adapter and every full page before its last token. A page is the tokens up to
    its end under one adapter, known by 128 bits of a hash of them. Steps are counted from 0. For requests of
    one sample. Memory: some 200 bytes a page that was ever computed.
    """

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.pages_in_use: list[int] = []
        """Distinct pages, by step, that its running sequences cannot do without."""
        self._numbers: dict[bytes, int] = {}
        self._last_use: list[int] = []  # by page, a step; or unknown, while it was never computed
        self._users: list[int] = []
        self._adapter_pages: dict[AdapterId, int] = {}
        self._adapter_users: collections.Counter[AdapterId] = collections.Counter()
        self._adapter_last_use: dict[AdapterId, int] = {}
        self._running: dict[SequenceId, _Running] = {}
        self._num_pages_used = 0
        self._num_tails = 0
        self._num_adapter_pages_used = 0
        self.begin()

    def begin(self) -> None:
        """Count from here. What was there before may be anywhere now, as if every policy had put it there."""
        self._began = len(self.pages_in_use)
        self.kv = Accesses()
        self.adapters = Accesses()
        self.tokens_asked = 0  # prompts, and what was generated before a preemption
        self.kv_pages_found = 0
        self.kv_pages_copied_in = 0
        self.adapters_brought = 0  # to the device, from the host or from files
        self.adapter_pages_brought = 0
        self.adapters_read = 0  # from files, to either tier
        self.adapter_pages_read = 0

    def watch(self, now: float, command: Command) -> None:
        """The next command, as ``Replay`` hands it to its watcher."""
        match command:
            case Emit():
                sequence, index = command.sampled_by
                if index == 0 and sequence in self._running:
                    self._learn(self._running[sequence], command.token)
            case RunStep():
                self._step(command)
            case EndSequence():
                self._end(command.sequence)
            case SwapPages() if command.to_device and command.adapter is None:
                self.kv_pages_copied_in += len(command.pairs)
            case SwapPages() if command.to_device:
                self.adapters_brought += 1
                self.adapter_pages_brought += len(command.pairs)
            case ReadAdapter():
                self._read(command)

    def _read(self, command: ReadAdapter) -> None:
        num_pages = len(command.pages)
        self._adapter_pages[command.adapter] = num_pages
        self.adapters_read += 1
        self.adapter_pages_read += num_pages
        if command.tier == "device":
            self.adapters_brought += 1
            self.adapter_pages_brought += num_pages

    def _step(self, step: RunStep) -> None:
        # A page that two sequences must both compute, since they start at once, is there for neither.
        for start in step.starts:
            self._start(start)
        for number, first, num_tokens, _, _ in step.rows:
            self._advance(self._running[number], first + num_tokens, len(self.pages_in_use))
        self.pages_in_use.append(self._num_in_use)

    @property
    def _num_in_use(self) -> int:
        return self._num_pages_used + self._num_tails + self._num_adapter_pages_used

    def _learn(self, running: _Running, token: int) -> None:
        """A token was drawn, of which the latest step may have filled a page already."""
        running.tokens.append(token)
        if running.num_computed >= len(running.tokens):
            before = self._num_in_use
            self._advance(running, running.num_computed, len(self.pages_in_use) - 1)
            self.pages_in_use[-1] += self._num_in_use - before

    def _start(self, start: SequenceStart) -> None:
        running = _Running(start.adapter, list(start.tokens), start.adapter.to_bytes(8, "little"))
        self._running[start.sequence] = running
        self._ask_adapter(start.adapter)
        num_accesses = (len(start.tokens) - 1) // self.page_tokens
        self._extend(running, num_accesses)
        self._ask_pages(running.chain)
        self.tokens_asked += len(start.tokens)
        self.kv_pages_found += start.num_computed // self.page_tokens
        self._advance(running, start.num_computed, len(self.pages_in_use))

    def _ask_adapter(self, adapter: AdapterId) -> None:
        if adapter == BASE:
            return
        accesses, num_pages, now = self.adapters, self._adapter_pages[adapter], len(self.pages_in_use)
        accesses.num_accesses += 1
        accesses.num_pages_accessed += num_pages
        if self._adapter_users[adapter]:
            accesses.note_free(1, num_pages)
        else:
            self._num_adapter_pages_used += num_pages
            last_use = self._adapter_last_use.get(adapter, _UNKNOWN)
            if last_use != _UNKNOWN:
                accesses.note(max(last_use + 1, self._began), now, 1, num_pages)
        self._adapter_users[adapter] += 1

    def _ask_pages(self, chain: list[int]) -> None:
        accesses, now, users, last_uses = self.kv, len(self.pages_in_use), self._users, self._last_use
        accesses.num_accesses += len(chain)
        accesses.num_pages_accessed += len(chain)
        num_free = 0
        found: dict[int, int] = {}  # by last use: most of a chain was last used at once
        for page in chain:
            last_use = last_uses[page]
            if users[page]:
                num_free += 1
            elif last_use != _UNKNOWN:
                found[last_use] = found.get(last_use, 0) + 1
                last_uses[page] = now
        accesses.note_free(num_free, 1)
        for last_use, count in found.items():
            accesses.note(max(last_use + 1, self._began), now, count, 1)

    def _extend(self, running: _Running, num_pages: int) -> None:
        """Number the chain's pages up to so many."""
        first, size = len(running.chain), self.page_tokens
        if num_pages <= first:
            return
        tokens = array.array("q", running.tokens[first * size : num_pages * size]).tobytes()
        numbers, digest, page_bytes = self._numbers, running.digest, len(tokens) // (num_pages - first)
        for begin in range(0, len(tokens), page_bytes):
            digest = hashlib.blake2b(digest + tokens[begin : begin + page_bytes], digest_size=16).digest()
            number = numbers.setdefault(digest, len(numbers))
            if number == len(self._users):
                self._users.append(0)
                self._last_use.append(_UNKNOWN)
            running.chain.append(number)
        running.digest = digest

    def _advance(self, running: _Running, num_tokens: int, step: int) -> None:
        """The sequence has, or computes in this step, so many tokens. A page whose last token is not known yet
        counts as its tail."""
        running.num_computed = num_tokens
        num_full = min(num_tokens, len(running.tokens)) // self.page_tokens
        has_tail = num_tokens > num_full * self.page_tokens
        self._num_tails += has_tail - running.has_tail
        running.has_tail = has_tail
        if num_full <= running.num_used:
            return
        self._extend(running, num_full)
        users = self._users
        for page in running.chain[running.num_used : num_full]:
            users[page] += 1
            self._num_pages_used += users[page] == 1
            self._last_use[page] = step
        running.num_used = num_full

    def _end(self, sequence: SequenceId) -> None:
        running = self._running.pop(sequence, None)
        if running is None:
            return
        users, last_step = self._users, len(self.pages_in_use) - 1
        for page in running.chain[: running.num_used]:
            users[page] -= 1
            self._num_pages_used -= users[page] == 0
            self._last_use[page] = last_step
        self._num_tails -= running.has_tail
        if running.adapter == BASE:
            return
        self._adapter_users[running.adapter] -= 1
        self._adapter_last_use[running.adapter] = last_step
        if self._adapter_users[running.adapter] == 0:
            self._num_adapter_pages_used -= self._adapter_pages[running.adapter]


# ---------------------------------------------------------------- bounds


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Of what was asked for, the most that any policy with so many pages has kept since it was last used.

    Each number by itself: ``kv_pages`` if every page not in use went to KV, ``adapters`` (whole ones) if to
    adapters; ``pages`` of both kinds together.
    """

    kv_pages: int
    adapters: int
    pages: int


def limits(record: Recorder, num_pages: int) -> Limits:
    """Upper bounds for one recorded sequence and a memory of so many pages; proofs: docs/limits.md.

    With the device's pages: what is found there although nothing was copied in for it. With both tiers': what is
    found in either. O(n log n + steps) for n distinct (first, last idle step) pairs.
    """
    capacity = [num_pages - in_use for in_use in record.pages_in_use]
    if capacity and min(capacity) < 0:
        raise ValueError(f"{max(record.pages_in_use)} pages were in use at once, of {num_pages}")
    kv, adapters = record.kv, record.adapters
    kv_idle = [(first, last, count) for (first, last, _), count in kv.idle.items()]
    # A page of an adapter counts by itself here.
    adapter_idle = [(first, last, count * each) for (first, last, each), count in adapters.idle.items()]
    return Limits(
        kv.num_free + most_kept(kv_idle, capacity),
        adapters.num_free + _most_adapters(adapters, most_kept(adapter_idle, capacity), capacity),
        kv.num_pages_free + adapters.num_pages_free + most_kept(kv_idle + adapter_idle, capacity),
    )


def most_kept(idle: Iterable[tuple[int, int, int]], capacity: Sequence[int]) -> int:
    """The most items that can be kept, each from its first to its last step, ``capacity[step]`` at a time.

    ``idle``: (first step, last step, how many items). Belady's rule, exact: where too many are kept, the item
    that is needed last goes. O(n log n + steps).
    """
    queue = sorted(idle, reverse=True)
    num_kept = num_active = 0
    ending = [0] * (len(capacity) + 1)  # of the active ones, by last step
    latest: list[tuple[int, int]] = []  # a heap: (-last step, how many)
    for step, room in enumerate(capacity):
        num_active -= ending[step - 1] if step else 0
        while queue and queue[-1][0] == step:
            _, last, count = queue.pop()
            heapq.heappush(latest, (-last, count))
            ending[last] += count
            num_active += count
            num_kept += count
        # Ended items lie at the heap's bottom: the one on top is active while any is.
        while num_active > room:
            last, count = -latest[0][0], latest[0][1]
            dropped = min(count, num_active - room)
            if dropped == count:
                heapq.heappop(latest)
            else:
                heapq.heapreplace(latest, (-last, count - dropped))
            ending[last] -= dropped
            num_active -= dropped
            num_kept -= dropped
    return num_kept


def _most_adapters(accesses: Accesses, most_pages: int, capacity: Sequence[int]) -> int:
    """The less of two bounds: the fewest pages each within ``most_pages``; all as small as the smallest."""
    if not accesses.idle:
        return 0
    by_size: collections.Counter[int] = collections.Counter()
    for (_, _, each), count in accesses.idle.items():
        by_size[each] += count
    by_pages, pages_left = 0, most_pages
    for each, count in sorted(by_size.items()):
        num_fitting = min(count, pages_left // each)
        by_pages += num_fitting
        pages_left -= num_fitting * each
    smallest = min(by_size)
    idle = [(first, last, count) for (first, last, _), count in accesses.idle.items()]
    return min(by_pages, most_kept(idle, [room // smallest for room in capacity]))


def summarize_limits(record: Recorder, config: PolicyConfig) -> dict[str, float]:
    """What the run kept and the most that it could have, as shares of 1 of what was asked for.

    ``kv_*`` of tokens, ``adapter_*`` of whole adapters, ``page_*`` of pages of both kinds. ``*_kept``: found in
    either tier, less what was read from files; ``*_kept_device``: less what was copied to the device, too. Both
    on demand or ahead of it. Each is at most its ``*_limit``, for every policy.
    """
    device = limits(record, config.num_pages)
    both = limits(record, config.num_pages + config.num_host_pages)
    kv, adapters, tokens = record.kv_pages_found, record.adapters, record.tokens_asked
    pages = record.kv.num_pages_accessed + adapters.num_pages_accessed
    kv_device = kv - record.kv_pages_copied_in
    adapter_pages = adapters.num_pages_accessed - record.adapter_pages_read
    adapter_pages_device = adapters.num_pages_accessed - record.adapter_pages_brought
    size, num_accesses = record.page_tokens, adapters.num_accesses
    return {
        "kv_kept": _share(kv * size, tokens),
        "kv_kept_limit": _share(both.kv_pages * size, tokens),
        "kv_kept_device": _share(kv_device * size, tokens),
        "kv_kept_device_limit": _share(device.kv_pages * size, tokens),
        "adapter_kept": _share(num_accesses - record.adapters_read, num_accesses),
        "adapter_kept_limit": _share(both.adapters, num_accesses),
        "adapter_kept_device": _share(num_accesses - record.adapters_brought, num_accesses),
        "adapter_kept_device_limit": _share(device.adapters, num_accesses),
        "page_kept": _share(kv + adapter_pages, pages),
        "page_kept_limit": _share(both.pages, pages),
        "page_kept_device": _share(kv_device + adapter_pages_device, pages),
        "page_kept_device_limit": _share(device.pages, pages),
    }


def _share(part: int, whole: int) -> float:
    """The share, not below 0: copies that served no sequence can outnumber what was kept."""
    return round(max(0, part) / whole, 4) if whole else 0.0


# ---------------------------------------------------------------- runs


def recorded(
    stream: Stream,
    config: PolicyConfig,
    costs: StepCosts,
    adapter_pages: Sequence[int],
    is_warm: bool = True,
    watch: Watch | None = None,
    merging: MergeCosts | None = None,
    copy_limit: int | None = None,
    cold: ColdCosts = NOTHING_COLD,
) -> tuple[Replay, Recorder]:
    """Replay the stream to its end and record it; the warm-up is not counted. Raises what ``Replay`` raises."""
    record = Recorder(config.page_tokens)

    def watch_both(now: float, command: Command) -> None:
        record.watch(now, command)
        if watch is not None:
            watch(now, command)

    watched = record.watch if watch is None else watch_both
    replay = Replay(stream, config, costs, adapter_pages, is_warm, watched, merging, copy_limit, cold=cold)
    while not replay.outcomes:
        record.begin()
        if not replay.advance():
            break
    replay.run()
    return replay, record


def reference(stream: Stream, config: PolicyConfig, costs: StepCosts, adapter_pages: Sequence[int]) -> Replay:
    """The same arrivals where all is resident: every adapter from before the start, all KV from when it is there.

    CaraServe's "Cached" (§7.1 there), for KV as well. A reference, not a bound: a policy that makes one request
    wait may thereby serve others sooner. Batch sizes and lengths stay ``config``'s. Takes a tree node for each
    page of the stream. Raises RuntimeError if anything was read, copied or dropped after the start.
    """
    replay = Replay(stream, _endless(stream, config, adapter_pages), costs, adapter_pages)
    replay.run()
    before, after = replay.counters_at_start, replay.report().counters
    for name in (
        "adapter_hits_host", "adapter_misses", "kv_hit_tokens_host", "preemptions", "adapter_reads",
        "adapter_evictions", "history_evictions", "history_drops", "host_evictions", "prefetches",
        "pages_swapped_in", "pages_swapped_out",
    ):  # fmt: skip
        count = getattr(after, name) - getattr(before, name)
        if count:
            raise RuntimeError(f"nothing should leave in the reference of {stream.name}, but {name}: {count}")
    return replay


def _endless(stream: Stream, config: PolicyConfig, adapter_pages: Sequence[int]) -> PolicyConfig:
    """The same with one tier that holds every page of the stream."""
    size = config.page_tokens
    said: collections.Counter[int] = collections.Counter()
    for request in stream.requests:
        said[request.conversation] += request.new_tokens + request.output_tokens
    num_pages = sum(-(-num_tokens // size) for num_tokens in said.values())
    # Beside history: tails, and pages that several compute at once before all but one are given up.
    num_pages += config.max_num_seqs * -(-config.max_model_len // size)
    num_pages += sum(adapter_pages) + len(adapter_pages) * -(-_WARM_UP_TOKENS // size)
    return dataclasses.replace(config, num_pages=num_pages, num_host_pages=0, cache=CacheConfig("lru"))
