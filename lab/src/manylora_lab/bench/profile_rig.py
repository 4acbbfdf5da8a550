"""Drives the real executor without a policy, to time one batch, copy or read after another.

KV that a batch attends to was never computed: its pages hold what they hold, which costs the same to read.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from pathlib import Path

from manylora.config.declaring import ConfigError
from manylora.config.policy import PolicyConfig
from manylora.protocol.commands import Await, ReadAdapter, RunStep, SequenceStart, StepRow, SwapPages, Tier
from manylora.protocol.events import AdapterRead
from manylora.protocol.executor import Executor
from manylora.types import BASE, AdapterId, PageId, SamplingParams
from manylora_lab.bench.direct import DirectExecutor
from manylora_lab.bench.profile_grid import Batch
from manylora_lab.pricing.costs import prefill_pairs
from manylora_lab.pricing.profile import GatePoint, StepPoint, TransferPoint

_GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
_TOKEN = 5
_PROMPT = 32
"""Of the steps that await copies."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """``start`` tells the executor of the row's sequence."""

    start: SequenceStart
    row: StepRow
    num_bytes: int


class ProfileRig:
    """An executor, its free pages, and adapters in theirs."""

    def __init__(self, executor: Executor, policy: PolicyConfig) -> None:
        self._executor = DirectExecutor(executor)
        self.policy = policy
        self._free = list(range(policy.num_pages))
        random.Random(0).shuffle(self._free)
        self._free_host = list(range(policy.num_host_pages))
        random.Random(1).shuffle(self._free_host)
        self._adapter_pages: dict[AdapterId, tuple[PageId, ...]] = {}
        self._num_steps = 0
        self._num_copies = 0

    @property
    def num_free_pages(self) -> int:
        """The free pages of the device's pool."""
        return len(self._free)

    @property
    def num_adapters(self) -> int:
        """The adapters on the device."""
        return len(self._adapter_pages)

    @property
    def adapter_pages(self) -> list[int]:
        """How many pages each of these has, in their order."""
        return [len(pages) for pages in self._adapter_pages.values()]

    # ------------------------------------------------------------ adapters

    def serve(self, paths: Sequence[Path], room: float) -> None:
        """Bring adapters to the device, as many as go into the share ``room`` of its pages."""
        most_pages = int(room * self.policy.num_pages)
        reads = []
        for adapter, path in enumerate(paths, 1):
            num_pages = self._executor.add_adapter(adapter, str(path)).num_pages
            most_pages -= num_pages
            if most_pages < 0:
                self._executor.forget_adapter(adapter)
                break
            pages = tuple(self._free.pop() for _ in range(num_pages))
            self._adapter_pages[adapter] = pages
            reads.append(ReadAdapter(adapter, pages))
            self._executor.begin(reads[-1])
        for read in reads:
            answer = self._executor.wait_for(read)
            assert isinstance(answer, AdapterRead)
            _require(answer.ok, "an adapter could not be read", answer.error)

    def reads(self, adapters: Sequence[AdapterId], repeats: int) -> list[TransferPoint]:
        """Times of reading these, which are served, into each tier. The system has the files cached."""
        points = []
        for adapter in adapters:
            pages = self._adapter_pages[adapter]
            tiers: list[tuple[Tier, tuple[PageId, ...]]] = [("device", pages)]
            if len(pages) <= len(self._free_host):
                tiers.append(("host", tuple(self._free_host[: len(pages)])))
            num_bytes = len(pages) * self.policy.page_bytes
            for tier, place in tiers:
                seconds = undisturbed([self._read(adapter, place, tier) for _ in range(repeats)])
                points.append(TransferPoint(tier == "device", num_bytes, rounded(seconds)))
        if all(point.to_device for point in points):
            raise ConfigError("the host pool is too small for one adapter: raise --host-pool")
        return points

    def _read(self, adapter: AdapterId, pages: tuple[PageId, ...], tier: Tier) -> float:
        answer = self._executor.read_adapter(ReadAdapter(adapter, pages, tier))
        _require(answer.ok, "an adapter could not be read", answer.error)
        return answer.read_s

    def forget_adapters(self) -> None:
        """Forget the adapters, so that another may number them anew."""
        for adapter in self._adapter_pages:
            self._executor.evict_adapter(adapter)
            self._executor.forget_adapter(adapter)
        self._adapter_pages.clear()

    # ------------------------------------------------------------ copies

    def copies(self, repeats: int) -> list[TransferPoint]:
        """Times of copies of 1, 2, 4, ... scattered pages each way, from the command to its answer."""
        points = []
        count = 1
        while count <= min(64, len(self._free), len(self._free_host)):
            device, host = self._free[:count], self._free_host[:count]
            for to_device, pairs in ((False, zip(device, host)), (True, zip(host, device))):
                fixed = tuple(pairs)
                self._copy(to_device, fixed)
                seconds = undisturbed([self._copy(to_device, fixed) for _ in range(repeats)])
                points.append(TransferPoint(to_device, count * self.policy.page_bytes, rounded(seconds)))
            count *= 2
        return points

    def gates(self, repeats: int) -> list[GatePoint]:
        """What copies of 1, 2, 4, ... scattered pages cost a step that awaits them: steps of a prompt, with
        a copy that is commanded just before and without, in turns."""
        length = min(_PROMPT, self.policy.max_batch_tokens, self.policy.max_model_len - 1)
        step = Batch(prefills=((0, length),))
        points = []
        count = 1
        while count <= min(64, len(self._free_host), len(self._free) // 2):
            # Its rows have the first free pages.
            pairs = tuple(zip(self._free_host, self._free[-count:]))
            self._awaiting(step, pairs)
            alone, awaiting = [], []
            for _ in range(repeats):
                alone.append(self.time(step))
                awaiting.append(self._awaiting(step, pairs))
            issued, stepped = zip(*awaiting)
            # Two threads want the machine: far fewer of these steps are undisturbed.
            more_s = min(stepped) - min(alone)
            num_bytes = count * self.policy.page_bytes
            points.append(GatePoint(num_bytes, rounded(min(issued)), rounded(max(more_s, 1e-9))))
            count *= 2
        return points

    def _awaiting(self, batch: Batch, pairs: tuple[tuple[PageId, PageId], ...]) -> tuple[float, float]:
        """Seconds that commanding a copy takes, and the step that awaits it, but for what it stands still."""
        _, rows = self._rows(batch)
        self._num_copies += 1
        self._num_steps += 1
        copy = SwapPages(self._num_copies, True, pairs, groups=self.policy.cold_start.num_groups)
        awaits = (Await(copy.copy, tuple(item.row.sequence for item in rows)),)
        starts, step_rows = tuple(item.start for item in rows), tuple(item.row for item in rows)
        began = time.perf_counter()
        self._executor.begin(copy)
        issue_s = time.perf_counter() - began
        done = self._executor.run_step(RunStep(self._num_steps, starts, step_rows, awaits=awaits)).done
        _require(done.ok and not done.invalid, "a step that awaits a copy failed", done.error)
        self._executor.wait_for(copy)
        self._end(rows)
        return issue_s, done.device_s - done.stall_s

    def _copy(self, to_device: bool, pairs: tuple[tuple[PageId, PageId], ...]) -> float:
        self._num_copies += 1
        began = time.perf_counter()
        answer = self._executor.swap_pages(SwapPages(self._num_copies, to_device, pairs))
        seconds = time.perf_counter() - began
        _require(answer.ok, "a copy failed", answer.error)
        return seconds

    # ------------------------------------------------------------ steps

    def rehearse(self, batch: Batch) -> None:
        """Run the batch once for what only a first run costs, such as kernels to compile."""
        decodes, prefills = self._rows(batch)
        rows = [*decodes, *prefills]
        self._run(rows, rows)
        self._end(rows)

    def time(self, batch: Batch) -> float:
        """Seconds of the batch, as the engine would note them.

        Its decoding rows go on from a step of their own, its prompts come as new sequences, as in serving: so
        what is planned for the same adapters from step to step is planned where no prompt comes, and only then.
        """
        decodes, prefills = self._rows(batch)
        if decodes:
            self._run(decodes, decodes)
        seconds = self._run(prefills, [*decodes, *prefills])
        self._end([*decodes, *prefills])
        return seconds

    def point(self, batch: Batch, seconds: float) -> StepPoint:
        """The batch's numbers, beside what it took."""
        decodes, prefills = self._rows(batch)
        rows = [*decodes, *prefills]
        distinct = {item.start.adapter: item.num_bytes for item in rows if item.num_bytes}
        return StepPoint(
            num_decodes=len(decodes),
            num_prefill_tokens=sum(item.row.num_tokens for item in prefills),
            num_kv_tokens=sum(item.row.start + item.row.num_tokens for item in rows),
            adapter_bytes=sum(distinct.values()),
            num_adapters=len(distinct),
            num_prefill_pairs=sum(prefill_pairs(item.row.start, item.row.num_tokens) for item in prefills),
            adapter_token_bytes=sum(item.row.num_tokens * item.num_bytes for item in rows),
            seconds=rounded(seconds),
            is_held_out=batch.is_held_out,
        )

    def _rows(self, batch: Batch) -> tuple[list[_Row], list[_Row]]:
        adapters = [adapter + 1 for adapter in batch.adapters] or [BASE]
        shapes = [(context, 1) for context in batch.contexts] + list(batch.prefills)
        unused = iter(self._free)
        rows = []
        for number, (start, num_tokens) in enumerate(shapes):
            count = -(-(start + num_tokens) // self.policy.page_tokens)
            pages = [next(unused) for _ in range(count)]
            adapter = adapters[number % len(adapters)]
            rows.append(self._sequence(number + 1, adapter, start, num_tokens, pages))
        return rows[: len(batch.contexts)], rows[len(batch.contexts) :]

    def _sequence(
        self, sequence: int, adapter: AdapterId, start: int, num_tokens: int, pages: list[PageId]
    ) -> _Row:
        end = start + num_tokens
        told = SequenceStart(
            sequence, 0, adapter, (_TOKEN,) * end, max(1, start), start, tuple(pages), _GREEDY, ()
        )
        num_bytes = len(self._adapter_pages[adapter]) * self.policy.page_bytes if adapter != BASE else 0
        return _Row(told, StepRow(sequence, start, num_tokens, 1), num_bytes)

    def _run(self, new: Sequence[_Row], rows: Sequence[_Row]) -> float:
        self._num_steps += 1
        starts = tuple(item.start for item in new)
        step = RunStep(self._num_steps, starts, tuple(item.row for item in rows))
        done = self._executor.run_step(step).done
        _require(done.ok, "a step failed", done.error)
        return done.device_s

    def _end(self, rows: Sequence[_Row]) -> None:
        for item in rows:
            self._executor.end_sequence(item.start.sequence)


def undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile: what it takes while nothing else wants the machine, without the luckiest runs."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


def rounded(seconds: float) -> float:
    """What is certain of it and a bit more."""
    return float(f"{seconds:.6g}")


def _require(ok: bool, what: str, why: str) -> None:
    if not ok:
        raise ConfigError(f"{what}: {why}")
