"""Rows of a step whose adapters' products the CPU computes, since the adapters are still on their way (CaraServe
§4).

Owns what the workers are told of a step: which tokens are whose, and in which order their products come, and how
what they find gets into the rows. The base's part of these rows runs with that of all others. Where operations and
the device can, the host launches such a step and waits for nothing in it (``DeviceHandover``); else it hands over
each product itself. Does not know why a row is cold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from manylora.adapters.pack import AdapterLayout
from manylora.assist.board import Board, BoardShape
from manylora.assist.orders import LentPool, Product, ProductPart
from manylora.assist.workers import HandedStep, Workers, WorkersFailed
from manylora.config import MOST_CPU_TOKENS, num_cores
from manylora.config.cold_start import SLICE_SHARE
from manylora.devices.device import Device
from manylora.executor.inputs import StepInputs
from manylora.kernels.ops import LoraSegments, Ops
from manylora.kernels.shapes import AdapterGeometry, ProjectionGroup
from manylora.memory.gates import Awaited, CopyGate
from manylora.memory.host import HostPool
from manylora.protocol import StepDone
from manylora.types import AdapterId, SequenceId

_log = logging.getLogger(__name__)

LATE_S = 10.0
"""How long a step waits for the workers, in all, before it goes on without."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ColdAdapter:
    """An adapter in the host's pool, ``offsets`` as ``cell_offsets`` gives them of its pages there; the gate of
    its copy, and which sequences' rows are its."""

    layout: AdapterLayout
    offsets: np.ndarray
    gate: CopyGate
    sequences: tuple[SequenceId, ...]


class ColdStep:
    """The cold rows of one step, by their adapters. Where no worker takes the step, it awaits the copies."""

    def __init__(self, adapters: dict[AdapterId, ColdAdapter]) -> None:
        self._adapters = adapters
        self._rows: ColdRows | None = None
        self._awaited: Awaited | None = None
        self._cpu_s = self._waited_s = 0.0

    def begin(
        self,
        workers: Workers | None,
        handover: DeviceHandover | None,
        inputs: StepInputs,
        geometry: AdapterGeometry,
        device: Device,
    ) -> ColdRows | None:
        """Hand the step over to the workers; None where none takes it, once the copies have landed. ``handover``:
        where the device posts and takes."""
        segments, names = inputs.lora, inputs.lora_adapters
        chosen = [place for place, name in enumerate(names) if name in self._adapters]
        if workers is not None and segments is not None and chosen:
            adapters = [self._adapters[names[place]] for place in chosen]
            rows = ColdRows(segments, chosen, adapters, geometry, device, handover)
            if rows.begin(workers):
                self._rows = rows
                return rows
        self._awaited = Awaited([(adapter.gate, adapter.sequences) for adapter in self._adapters.values()])
        self._awaited.pass_all()
        return None

    @contextlib.contextmanager
    def launching(self, workers: Workers | None) -> Iterator[None]:
        """Around the step's launch; one that fails has ended."""
        try:
            yield
        except BaseException:
            self._launched()
            self.end(workers)
            raise
        self._launched()

    def _launched(self) -> None:
        if self._rows is not None:
            self._rows.launched()

    def end(self, workers: Workers | None) -> None:
        """Wait until the device has taken what the CPU found."""
        if self._rows is not None and workers is not None:
            self._cpu_s, self._waited_s = self._rows.end(workers)

    def tell(self, done: StepDone, workers: Workers | None) -> None:
        """Add what became of these rows to what is told of the step."""
        spoilt = {*done.spoilt}
        if self._awaited is not None:
            spoilt.update(self._awaited.spoilt())
            done.stall_s += self._awaited.stall_s
        if self._rows is not None and self._rows.has_failed:
            spoilt.update(*(adapter.sequences for adapter in self._adapters.values()))
        done.spoilt = tuple(sorted(spoilt))
        done.cpu_s = self._cpu_s
        done.cpu_workers = 0 if workers is None else workers.num_workers
        done.stall_s += self._waited_s


def start_workers(
    host: HostPool, geometry: AdapterGeometry, num_workers: int, cores_before: int = 0
) -> Workers:
    """Processes that read the host's pool, which is lent. Raises OSError where the system gives none.

    ``cores_before``: see ``ColdStartConfig``.
    """
    assert host.descriptor is not None
    groups = geometry.groups
    dtype = str(host.dtype).removeprefix("torch.")
    shape = BoardShape(
        num_workers,
        MOST_CPU_TOKENS,
        max(group.in_features for group in groups),
        max(group.offsets[-1] for group in groups),
        dtype,
    )
    place = LentPool(
        host.descriptor,
        host.num_pages * host.shape.page_bytes,
        geometry.slab_elements,
        geometry.cell_elements,
        geometry.alignment,
    )
    return Workers(shape, place, _cores(num_workers, cores_before), LATE_S)


def _cores(num_workers: int, before: int) -> list[int]:
    """The last ones that this process may use, but for ``before``; none where that leaves no core for others."""
    end = num_cores() - before
    return sorted(os.sched_getaffinity(0))[end - num_workers : end] if end > num_workers else []


class ColdRows:
    """The cold rows of one step that workers serve. Used by the step loop's thread, layer after layer. ``others``:
    the segments of other rows, ``lora`` their plan."""

    def __init__(
        self,
        segments: LoraSegments,
        chosen: list[int],
        adapters: Sequence[ColdAdapter],
        geometry: AdapterGeometry,
        device: Device,
        handover: DeviceHandover | None = None,
    ) -> None:
        """``chosen``: the segments of the adapters, in their order."""
        self.others = _without(segments, chosen)
        self.lora: Any | None = None
        self.has_failed = False
        self._adapters = adapters
        self._geometry = geometry
        self._handover = handover
        self._step: HandedStep | None = None
        self._taken: tuple[Callable[[], bool], Callable[[], np.ndarray]] | None = None
        starts, lengths = segments.start[chosen].tolist(), segments.length[chosen].tolist()
        self._lengths: list[int] = lengths
        self.num_tokens = sum(lengths)
        places = np.concatenate([np.arange(start, start + length) for start, length in zip(starts, lengths)])
        self._rows = device.upload(places.astype(np.int64))
        self._products = self._describe()
        self._jobs = self._in_order()

    def begin(self, workers: Workers) -> bool:
        """Hand the step over; False where no worker takes it, or there is no room for so many rows."""
        if self._handover is not None and self._handover.is_busy:
            return False
        products = list(self._products.values())
        widest = max((product.width for product in products), default=0)
        if self.num_tokens > workers.shape.num_tokens or widest > workers.shape.out_features:
            return False
        cells = [adapter.offsets for adapter in self._adapters]
        self._step = workers.begin(self._lengths, self._jobs, products, cells)
        if self._step is None:
            return False
        if self._handover is not None:
            given = [worker.number for worker in self._step.given]
            self._handover.begin(self._step.job, len(self._jobs), given)
        return True

    # ------------------------------------------------------------ as the decoder goes

    def post(self, x: torch.Tensor, group: ProjectionGroup) -> bool:
        """Show the workers what they need of x ``[T, in]``; False where no adapter of theirs is on this group."""
        if self.has_failed or self._step is None or group.name not in self._products:
            return False
        rows = x.index_select(0, self._rows)
        if self._handover is not None:
            self._step.job += 1
            self._handover.post(rows, self._step.job)
            return True
        target = self._step.rows(self.num_tokens, group.in_features)
        target[:] = as_numbers(rows.cpu())
        self._step.post()
        return True

    def add(self, y: torch.Tensor, group: ProjectionGroup) -> None:
        """Add what they have computed to y ``[T, sum(out)]``. Where they fail the rows are worth nothing."""
        assert self._step is not None
        width = self._products[group.name].width
        if self._handover is not None:
            found = self._handover.take(self.num_tokens, width, self._step.job)
            y.index_add_(0, self._rows, found.to(y.dtype))
            return
        try:
            results = self._step.take(self.num_tokens, width)
        except WorkersFailed:
            self.has_failed = True
            return
        # A copy: the next job's results go where these lie.
        y.index_add_(0, self._rows, torch.from_numpy(results.copy()).to(y.device, y.dtype))

    def launched(self) -> None:
        """All of the step has been, or it has failed."""
        assert self._step is not None
        if self._handover is not None:
            self._taken = self._handover.issued()
            return
        self._step.end()
        self._seconds = self._step.busy_s(), self._step.waited_s

    def end(self, workers: Workers) -> tuple[float, float]:
        """Wait until all has been taken: seconds that the workers computed, and that the step waited for them."""
        if self._handover is None or self._step is None or self._taken is None:
            return self._seconds
        has_passed, told = self._taken
        is_well = self._step.wait(has_passed)
        waited_ns, is_late = told().tolist()
        self.has_failed = not is_well or bool(is_late)
        seconds = self._step.busy_s(), waited_ns / 1e9
        if self.has_failed:
            workers.failed(self._step)
        else:
            self._step.end()
        self._handover.end()
        return seconds

    # ------------------------------------------------------------ what the workers are told

    def _describe(self) -> dict[str, Product]:
        """By the name of the group; those that none of the adapters is on are left out."""
        found: dict[str, Product] = {}
        first = 0
        for group in self._geometry.groups:
            parts: list[ProductPart] = []
            column = 0
            for index, projection in enumerate(group.projections, first):
                records = [tuple(adapter.layout.records[index].tolist()) for adapter in self._adapters]
                width = projection.out_features
                scales = [adapter.layout.scales[index].tolist() for adapter in self._adapters]
                parts.append(ProductPart(column, width, records, scales))
                column += width
            first += len(group.projections)
            if any(rank for part in parts for _, _, rank in part.records):
                found[group.name] = Product(group.in_features, column, parts)
        return found

    def _in_order(self) -> list[tuple[int, int]]:
        """(layer, place of the product) as the decoder comes to them."""
        places = {name: place for place, name in enumerate(self._products)}
        return [
            (layer, places[group.name])
            for layer, groups in enumerate(self._geometry.layers)
            for group in groups
            if group.name in places
        ]


def _without(segments: LoraSegments, cold: list[int]) -> LoraSegments | None:
    kept = np.setdiff1d(np.arange(len(segments.start)), cold)
    if len(kept) == 0:
        return None
    return LoraSegments(
        segments.start[kept],
        segments.length[kept],
        segments.records[kept],
        segments.scales[kept],
        segments.cells,
    )


def as_numbers(rows: torch.Tensor) -> np.ndarray:
    """As the board has them."""
    if rows.dtype is torch.float32:
        return np.asarray(rows.numpy())
    return np.asarray(rows.view(torch.int16).numpy()).view(np.uint16)


# ---------------------------------------------------------------- handed over by the device


@runtime_checkable
class AwaitsWords(Protocol):
    def await_words(
        self, words: torch.Tensor, wanted: torch.Tensor, told: torch.Tensor, is_first: bool
    ) -> None:
        """What is issued after it begins once each of ``words[:, 0]``, which others write, is at least
        ``wanted[1:]``, or the step's waits have lasted ``wanted[0]`` nanoseconds. ``told`` [2]: how long they
        have, and 1 where that was too long; the first wait begins it anew. All int64; words in pinned memory."""


def device_handover(board: Board, ops: Ops, device: Device, late_s: float) -> DeviceHandover | None:
    """None where the host has to hand rows over."""
    if not isinstance(ops, AwaitsWords):
        return None
    if not device.can_mark():
        _log.warning("the host hands rows to CPU workers: the driver writes no numbers in streams")
        return None
    found: DeviceHandover | None = None
    try:
        found = DeviceHandover(board, ops, device, late_s)
        found.try_out()
        return found
    except (RuntimeError, ValueError) as error:
        _log.warning("the host hands rows to CPU workers: %s", str(error).partition("\n")[0])
        if found is not None:
            found.close()
        return None


class DeviceHandover:
    """Of one step at a time; of the step loop's thread. ``late_s``: how long a step's kernels wait, in all."""

    def __init__(self, board: Board, ops: AwaitsWords, device: Device, late_s: float) -> None:
        """Raises RuntimeError where the device cannot use the board's memory."""
        self.is_busy = False
        """Whether a step has begun that has not ended."""
        self._ops, self._device = ops, device
        self._late_ns = int(late_s * 1e9)
        self._board = board
        self._memory = torch.from_numpy(board.memory)
        device.pin(self._memory)
        self._posted = torch.from_numpy(board.posted_word)
        self._done = torch.from_numpy(board.done_words)
        self._told = device.zeros((2,), torch.int64)
        # Rows of ``_wanted`` begin at multiples of 16 bytes: kernels are compiled anew for what does not.
        self._width = 2 * (1 + len(self._done) // 2)

    def try_out(self) -> None:
        """Before the first step: have the device write a word there, and wait for none. Raises what went wrong."""
        trial = torch.from_numpy(self._board.trial_word)
        self._device.mark(trial, 1)
        nothing = self._device.zeros((self._width,), torch.int64)
        for is_first in (True, False):  # each is a kernel of its own, to be compiled now
            self._ops.await_words(self._done, nothing, self._told, is_first)
        self._device.synchronize()
        if int(trial) != 1:
            raise RuntimeError("numbers that the device writes do not arrive in the host's memory")

    def begin(self, first_job: int, num_jobs: int, workers: Sequence[int]) -> None:
        """A step of these jobs, given to these workers."""
        wanted = np.zeros((num_jobs, self._width), np.int64)
        wanted[:, 0] = self._late_ns
        wanted[:, 1 + np.array(workers)] = first_job + 1 + np.arange(num_jobs)[:, None]
        self._wanted = self._device.upload(wanted)
        self._first_job = first_job
        self.is_busy = True

    def post(self, rows: torch.Tensor, job: int) -> None:
        """Show the workers the rows ``[T, in]`` of a job, once the device has computed them."""
        # Results of the job before have been taken by then.
        target = torch.from_numpy(self._board.rows(*rows.shape))
        if rows.dtype.itemsize == 2:
            rows, target = rows.view(torch.int16), target.view(torch.int16)
        target.copy_(rows, non_blocking=True)
        self._device.mark(self._posted, job)

    def take(self, num_tokens: int, features: int, job: int) -> torch.Tensor:
        """float32 ``[num_tokens, features]`` on the device: what the workers have found of a job, or anything
        where they are late."""
        place = job - self._first_job - 1
        self._ops.await_words(self._done, self._wanted[place], self._told, place == 0)
        found = torch.from_numpy(self._board.results(num_tokens, features))
        return torch.empty_like(found, device=self._device.torch_device).copy_(found, non_blocking=True)

    def issued(self) -> tuple[Callable[[], bool], Callable[[], np.ndarray]]:
        """All of the step has been launched. Gives whether the device has gone through it, and what its kernels
        have told by then."""
        told, issued = self._device.download(self._told), self._device.issued()
        return lambda: self._device.has_passed(issued), told

    def end(self) -> None:
        """The step has ended on the device."""
        self.is_busy = False

    def close(self) -> None:
        """With no step on its way. Idempotent."""
        if len(self._memory):
            try:
                self._device.unpin(self._memory)
            except RuntimeError as error:
                _log.warning("the CPU workers' memory could not be unpinned: %s", error)
            self._memory = self._memory[:0]


# ---------------------------------------------------------------- before serving

READY_S = 10.0
"""How long the workers get to begin."""
_TRIED_RANK, _TRIED_TOKENS, _REPEATS = 16, (4, 32, 128), 3
_CPU = torch.device("cpu")


def tune_workers(workers: Workers, geometry: AdapterGeometry, host: HostPool, device: torch.device) -> None:
    """Set how many tokens one takes, by the geometry's first group. Leave it where the workers do not answer or
    the host's pool has too little room."""
    timed = TimedProduct(geometry, _TRIED_RANK, device)
    if timed.num_pages > host.num_pages or not workers.wait_ready(READY_S):
        return
    before = workers.slice_tokens
    try:
        # The least: at a start much else goes on, and one hand-over stands for those of all products.
        seconds = {tokens: timed.seconds(workers, tokens, of=min) for tokens in _TRIED_TOKENS}
    except WorkersFailed:
        workers.slice_tokens = before
        return
    fewest, most = _TRIED_TOKENS[0], _TRIED_TOKENS[-1]
    token_s = max(seconds[most][0] - seconds[fewest][0], 1e-9) / (most - fewest)
    read_s = max(seconds[fewest][0] - fewest * token_s, 0.0)
    handover_s = min(max(whole_s - busy_s, 0.0) for busy_s, whole_s in seconds.values())
    workers.slice_tokens = int(min(max(SLICE_SHARE * (read_s + handover_s) / token_s, 1), MOST_CPU_TOKENS))


class TimedProduct:
    """The first group's product of an adapter of ``rank`` whose rows lie one after the other in pages that hold
    nothing, for rows of ``device``. ``num_bytes``: of the adapter's rows in one layer; ``width``: of a token's
    inputs and results."""

    def __init__(self, geometry: AdapterGeometry, rank: int, device: torch.device = _CPU) -> None:
        group = geometry.groups[0]
        parts, first = [], 0
        for place, projection in enumerate(group.projections):
            of_a = rank * geometry.cells(group.in_features)
            of_b = rank * geometry.cells(projection.out_features)
            records = [(first, first + of_a, rank)]
            scales = [[1.0] * geometry.page.layers]
            parts.append(ProductPart(group.offsets[place], projection.out_features, records, scales))
            first += of_a + of_b
        self.num_pages = -(-first // geometry.cells_per_page)
        self.num_bytes = first * geometry.cell_elements * geometry.itemsize
        self.width = group.in_features + group.offsets[-1]
        self._device = device
        self._dtype = torch.float32 if geometry.itemsize == 4 else torch.bfloat16
        self.product = Product(group.in_features, group.offsets[-1], parts)
        page, cell = np.divmod(np.arange(first, dtype=np.int64), geometry.cells_per_page)
        self.offsets = np.asarray(page * geometry.page_elements + cell * geometry.cell_elements)

    def seconds(
        self,
        workers: Workers,
        tokens: int,
        num_busy: int = 1,
        of: Callable[[list[float]], float] = statistics.median,
    ) -> tuple[float, float]:
        """Of one job that so many workers share: of the busiest one, and until its results are on the device;
        each ``of`` some tries. Raises WorkersFailed."""
        busy, whole = [], []
        product = self.product
        workers.slice_tokens = -(-tokens // num_busy)
        x = torch.zeros(tokens, product.in_features, dtype=self._dtype, device=self._device)
        y = torch.zeros(tokens, product.width, dtype=self._dtype, device=self._device)
        rows = torch.arange(tokens, device=self._device)
        for _ in range(_REPEATS + 1):
            step = workers.begin([tokens], [(0, 0)], [product], [self.offsets])
            if step is None:
                raise WorkersFailed("no CPU worker is free")
            began = time.perf_counter()
            # As ColdRows does it.
            step.rows(tokens, product.in_features)[:] = as_numbers(x.index_select(0, rows).cpu())
            step.post()
            found = step.take(tokens, product.width)
            y.index_add_(0, rows, torch.from_numpy(found.copy()).to(y.device, y.dtype))
            whole.append(time.perf_counter() - began)
            busy.append(step.busy_s())
            step.end()
        # The first one warms caches.
        return of(busy[1:]), of(whole[1:])
