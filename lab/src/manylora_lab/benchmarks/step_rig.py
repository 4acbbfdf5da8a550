"""Steps given to an executor one by one, with no engine around them: decoding, prompts, and their times."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from manylora.protocol.commands import ReadAdapter, RunStep, SequenceStart, StepRow
from manylora.protocol.events import AdapterRead
from manylora.protocol.executor import Executor
from manylora.types import BASE, AdapterId, SamplingParams
from manylora_lab.bench.direct import DirectExecutor
from manylora_lab.pricing.shapes import ALL_MODULES, ModelShape

PAGE_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=2000)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=1, max_tokens=2000)


def step_bytes(shape: ModelShape, batch: int, context: float, ranks: Sequence[int]) -> int:
    """What a decoding step must read: weights, KV and adapters on all projections, each once."""
    num_bytes = shape.itemsize * (shape.layer_parameters + shape.head_parameters)
    num_bytes += sum(shape.adapter_bytes(rank, ALL_MODULES) for rank in ranks)
    return num_bytes + int(batch * shape.kv_token_bytes * context)


class StepTiming(NamedTuple):
    """Seconds to issue a step, to wait for it and take its tokens in, and from before to after."""

    issue_s: float
    take_s: float
    wall_s: float
    ended_s: float


class StepRig:
    """An executor with adapters 1 to n on the device. What the pages of sequences hold was never computed: it
    costs the same to read. ``clock``: of issuing and taking."""

    def __init__(
        self, executor: Executor, num_pages: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.direct = DirectExecutor(executor)
        self._free = list(range(num_pages))
        self.clock = clock
        self._numbers = itertools.count(1)
        self.merged: AdapterId = BASE
        """What steps are told is merged."""

    def load(self, adapters: Iterable[str]) -> float:
        """Bring every adapter into pages of its own; seconds."""
        began_s = time.perf_counter()
        reads = []
        for number, path in enumerate(adapters, 1):
            count = self.direct.add_adapter(number, path).num_pages
            reads.append(ReadAdapter(number, tuple(self.pages(count))))
            self.direct.begin(reads[-1])
        for read in reads:
            answer = self.direct.wait_for(read)
            assert isinstance(answer, AdapterRead)
            assert answer.ok, answer.error
        return time.perf_counter() - began_s

    def forget(self, num_adapters: int) -> None:
        """The adapters, so that others may number theirs."""
        for number in range(1, num_adapters + 1):
            self.direct.evict_adapter(number)
            self.direct.forget_adapter(number)

    def pages(self, count: int) -> list[int]:
        """Take pages of the device's pool, which from now on belong to the caller alone."""
        return [self._free.pop() for _ in range(count)]

    # ------------------------------------------------------------ steps

    def sequences(
        self, rows: Sequence[tuple[int, int]], adapted: bool, params: SamplingParams = GREEDY, room: int = 1
    ) -> list[SequenceStart]:
        """One a row, of (computed tokens, tokens to compute), with room for more; on an adapter each."""
        starts, first_page = [], 0
        for adapter, (computed, count) in enumerate(rows, 1):
            tokens = tuple(range(5, 5 + computed + count))
            num_pages = -(-(computed + count + room) // PAGE_TOKENS)
            pages = tuple(self._free[first_page : first_page + num_pages])
            assert len(pages) == num_pages, "the pool is too small"
            first_page += num_pages
            starts.append(
                SequenceStart(
                    next(self._numbers), 0, adapter if adapted else BASE, tokens, len(tokens), computed, pages,
                    params, (),
                )
            )  # fmt: skip
        return starts

    def decoding(
        self, starts: Sequence[SequenceStart], steps: int, one_less: bool = False
    ) -> Iterator[RunStep]:
        """Steps of a token more for each; every other one without its last row where ``one_less``. Then the
        sequences end."""
        places = {start.sequence: start.num_computed for start in starts}
        for number in range(steps):
            chosen = list(places)[: len(places) - (one_less and number % 2)]
            rows = tuple(StepRow(sequence, places[sequence], 1, 1) for sequence in chosen)
            for sequence in chosen:
                places[sequence] += 1
            yield RunStep(next(self._numbers), () if number else tuple(starts), rows, self.merged)
        for sequence in places:
            self.direct.end_sequence(sequence)

    def fresh(self, rows: Sequence[tuple[int, int]], adapted: bool, steps: int) -> Iterator[RunStep]:
        """Steps of sequences that begin with the step, and end before the next one."""
        for _ in range(steps):
            starts = self.sequences(rows, adapted)
            drawn = tuple(
                StepRow(start.sequence, computed, count, 1)
                for start, (computed, count) in zip(starts, rows, strict=True)
            )
            yield RunStep(next(self._numbers), tuple(starts), drawn, self.merged)
            for start in starts:
                self.direct.end_sequence(start.sequence)

    def issue(self, step: RunStep) -> None:
        """What is timed as issuing it."""
        self.direct.issue_step(step)

    def run(
        self, steps: Iterable[RunStep], depth: int = 1, between: Callable[[], None] = lambda: None
    ) -> list[StepTiming]:
        """Issue them, so many in flight. ``between``: called before each."""
        flying: list[tuple[RunStep, float, float]] = []
        found = []

        def take() -> None:
            step, began_s, issue_s = flying.pop(0)
            before = self.clock()
            done = self.direct.wait_step(step).done
            take_s, ended_s = self.clock() - before, time.perf_counter()
            assert done.ok, done.error
            found.append(StepTiming(issue_s, take_s, ended_s - began_s, ended_s))

        for step in steps:
            between()
            began_s, before = time.perf_counter(), self.clock()
            self.issue(step)
            flying.append((step, began_s, self.clock() - before))
            if len(flying) == depth:
                take()
        while flying:
            take()
        return found

    def decode_ms(
        self,
        starts: Sequence[SequenceStart],
        steps: int,
        depth: int,
        between: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Milliseconds of the later steps: between the ends of two, median and mean, and to issue one.
        ``pair_ms``: half the median from an end to the next but one, since ranks may answer two at once."""
        found = self.run(self.decoding(starts, steps), depth, between)
        ends = [one.ended_s for one in found[5 : len(found) - depth + 1]]
        gaps = [after - before for before, after in itertools.pairwise(ends)]
        pairs = [after - before for before, after in zip(ends, ends[2:])]
        return {
            "wall_ms": 1e3 * statistics.median(gaps), "pair_ms": 1e3 * statistics.median(pairs) / 2,
            "mean_ms": 1e3 * statistics.mean(gaps),
            "issue_ms": 1e3 * statistics.median(one.issue_s for one in found[5:]),
        }  # fmt: skip
