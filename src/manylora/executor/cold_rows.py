"""Runs cold rows: the CPU computes their adapters' products while the adapters are still being copied
(CaraServe §4).

Owns the assignment of a step's tokens to adapters, and how the CPU's results are added to the rows. The base
model's part of cold rows runs together with that of all other rows. Where the operations and the device allow
it, the host launches such a step without waiting in it (``DeviceHandover``); else the host hands over each
product itself. Does not know why a row is cold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from manylora.adapters.pack import AdapterLayout
from manylora.devices.device import Device
from manylora.executor.batch import StepInputs
from manylora.executor.cpu_lora import LATE_S, ColdWork, CpuLora, CpuLoraLate
from manylora.kernels import loops
from manylora.kernels.ops import LoraSegments, Ops
from manylora.kernels.shapes import AdapterGeometry, ProjectionGroup
from manylora.memory.gates import Awaited, CopyGate
from manylora.protocol import events
from manylora.types import AdapterId, SequenceId, first_line

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ColdAdapter:
    """An adapter in the host's pool, with the gate of its copy and the sequences that use it. ``offsets``:
    the ``cell_offsets`` of its pages in the host's pool."""

    layout: AdapterLayout
    offsets: np.ndarray
    gate: CopyGate
    sequences: tuple[SequenceId, ...]


class ColdRows:
    """The cold rows of one step, by adapter. The CPU serves them where it takes the step; else the step awaits
    the adapters' copies. Used by the step loop's thread, layer after layer. ``others``: the segments of all
    other adapters' rows, once the CPU has taken the step."""

    def __init__(self, adapters: dict[AdapterId, ColdAdapter]) -> None:
        self.others: LoraSegments | None = None
        self._adapters = adapters
        self._handover: DeviceHandover | None = None
        self._told: Callable[[], np.ndarray] | None = None
        self._awaited: Awaited | None = None
        self._has_failed = False  # whether the CPU was late, which makes the rows invalid
        self._num_threads = 0
        self._cpu_s = self._waited_s = 0.0

    def begin(
        self,
        cpu: CpuLora | None,
        handover: DeviceHandover | None,
        inputs: StepInputs,
        geometry: AdapterGeometry,
        device: Device,
    ) -> bool:
        """Hand the step over to the CPU's threads. Where they do not take it, pass the gates of all copies and
        return False. ``handover``: given where the device itself posts rows and takes results."""
        segments, names = inputs.layout.lora, inputs.layout.lora_adapters
        chosen = [place for place, name in enumerate(names) if name in self._adapters]
        self._num_threads = 0 if cpu is None else cpu.num_threads
        if cpu is not None and segments is not None and chosen:
            self._cpu, self._handover = cpu, handover
            starts, lengths = segments.start[chosen].tolist(), segments.length[chosen].tolist()
            adapters = [self._adapters[names[place]] for place in chosen]
            self._widths, work = _described(lengths, adapters, geometry)
            if self._is_taken(work):
                self.others = _without(segments, chosen)
                self._num_tokens = sum(lengths)
                places = [np.arange(start, start + length) for start, length in zip(starts, lengths)]
                self._rows = device.upload(np.concatenate(places).astype(np.int64))
                return True
        self._awaited = Awaited([(adapter.gate, adapter.sequences) for adapter in self._adapters.values()])
        self._awaited.pass_all()
        return False

    def _is_taken(self, work: ColdWork) -> bool:
        if self._handover is not None and self._handover.is_busy:
            return False
        num_given = self._cpu.begin(work)
        if num_given and self._handover is not None:
            self._handover.begin(len(work.jobs), num_given)
        return num_given > 0

    # ------------------------------------------------------------ a step that the CPU has taken

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Return a context for the step's launch. Where the launch fails, the CPU's part of the step is
        ended."""
        try:
            yield
        except BaseException:
            self._launched()
            self.end()
            raise
        self._launched()

    def _launched(self) -> None:
        if self._handover is not None:
            self._told = self._handover.issued()
            return
        self._cpu.end()
        self._cpu_s, self._waited_s = self._cpu.busy_s(), self._cpu.waited_s

    def post(self, x: torch.Tensor, group: ProjectionGroup) -> bool:
        """Post the cold rows of x ``[T, in]`` to the CPU. Return False where no adapter of these rows adapts
        this group, or the CPU has been late."""
        if self._has_failed or group.name not in self._widths:
            return False
        rows = x.index_select(0, self._rows)
        if self._handover is not None:
            self._handover.post(rows)
        else:
            self._cpu.rows(*rows.shape).copy_(rows)
            self._cpu.post()
        return True

    def add(self, y: torch.Tensor, group: ProjectionGroup) -> None:
        """Add the CPU's results to y ``[T, sum(out)]``. Where the CPU is late, the rows are invalid."""
        width = self._widths[group.name]
        if self._handover is not None:
            y.index_add_(0, self._rows, self._handover.take(self._num_tokens, width).to(y.dtype))
            return
        try:
            self._cpu.wait()
        except CpuLoraLate:
            self._has_failed = True
            return
        found = self._cpu.results(self._num_tokens, width)
        y.index_add_(0, self._rows, found.to(y.device, y.dtype))

    # ------------------------------------------------------------ the step's end

    def end(self) -> None:
        """Wait until the device has taken the CPU's results."""
        if self._handover is None or self._told is None:
            return
        waited_ns, is_late = self._told().tolist()
        self._has_failed = bool(is_late)
        self._cpu.end()
        self._handover.is_busy = False
        self._cpu_s, self._waited_s = self._cpu.busy_s(), waited_ns / 1e9

    def fill_in(self, done: events.StepDone) -> None:
        """Add these rows' outcome to the step's answer: invalid sequences, the CPU's time, and waits."""
        invalid = {*done.invalid}
        if self._awaited is not None:
            invalid.update(self._awaited.invalid())
            done.stall_s += self._awaited.stall_s
        if self._has_failed:
            invalid.update(*(adapter.sequences for adapter in self._adapters.values()))
        done.invalid = tuple(sorted(invalid))
        done.cpu_s = self._cpu_s
        done.cpu_workers = self._num_threads
        done.stall_s += self._waited_s


def _described(
    lengths: list[int], adapters: Sequence[ColdAdapter], geometry: AdapterGeometry
) -> tuple[dict[str, int], ColdWork]:
    """Return the widths of the results by group name, and the work for the CPU. Both include only groups that
    some adapter adapts."""
    begins = np.cumsum([0, *(len(adapter.offsets) for adapter in adapters)])
    records = np.stack([a.layout.records + at * a.layout.shifted for a, at in zip(adapters, begins.tolist())])
    first, places, widths = 0, {}, {}
    for place, group in enumerate(geometry.groups):
        end = first + len(group.projections)
        if records[:, first:end, 2].any():
            places[group.name], widths[group.name] = place, group.offsets[-1]
        first = end
    jobs = [
        (layer, places[group.name])
        for layer, groups in enumerate(geometry.layers)
        for group in groups
        if group.name in places
    ]
    scales = np.stack([adapter.layout.scales for adapter in adapters]).astype(np.float32)
    cells = np.concatenate([adapter.offsets for adapter in adapters])
    return widths, ColdWork(lengths, np.array(jobs, np.int64).reshape(-1, 2), records, scales, cells)


def _without(segments: LoraSegments, cold: list[int]) -> LoraSegments | None:
    kept = np.setdiff1d(np.arange(len(segments.start)), cold)
    if len(kept) == 0:
        return None
    of_rows = segments.start[kept], segments.length[kept], segments.records[kept], segments.scales[kept]
    return LoraSegments(*of_rows, segments.cells)


# ---------------------------------------------------------------- handover by the device


def device_handover(cpu: CpuLora, ops: Ops, device: Device) -> DeviceHandover | None:
    """Return a handover that has been tried out, or None where the host has to hand rows over. Logs the
    reason where the operations could wait on the device but the handover does not work."""
    if not ops.waits:
        return None
    found: DeviceHandover | None = None
    try:
        found = DeviceHandover(cpu, ops, device)
        found.try_out()
        return found
    except (AttributeError, OSError, RuntimeError, ValueError) as error:
        _log.warning("the host hands rows to the CPU's threads: %s", first_line(error))
        if found is not None:
            found.close()
        return None


class DeviceHandover:
    """A handover of cold rows that the device drives: it posts rows to the CPU's threads and waits for their
    results. Serves one step at a time. Used by the step loop's thread."""

    def __init__(self, cpu: CpuLora, ops: Ops, device: Device) -> None:
        """Pin the memory of rows and results. Raises RuntimeError where the device cannot use it."""
        self.is_busy = False
        """Whether a step has begun and not ended."""
        self._ops, self._device = ops, device
        self._late_ns = int(LATE_S * 1e9)
        self._cpu = cpu
        device.pin(cpu.memory)
        self._is_pinned = True
        self._done = cpu.words[1:]
        self._told = device.zeros((2,), torch.int64)
        # Rows of ``_wanted`` begin at multiples of 16 bytes, since kernels are compiled anew for other
        # alignments.
        self._width = 2 * (1 + cpu.num_threads // 2)

    def try_out(self) -> None:
        """Let the device write a word to the shared memory, and run its wait with nothing to wait for. Call
        it before the first step. Raises RuntimeError where the word does not arrive, or the device's own
        error."""
        trial = self._cpu.words[0, -1:]  # a word that no thread reads
        self._device.mark(trial, 1)
        nothing = self._device.zeros((self._width,), torch.int64)
        for is_first in (True, False):  # two kernels, both compiled now
            self._ops.await_words(self._done, nothing, self._told, is_first)
        self._device.synchronize()
        if int(trial) != 1:
            raise RuntimeError("numbers that the device writes do not arrive in the host's memory")

    def begin(self, num_jobs: int, num_given: int) -> None:
        """Begin a step of ``num_jobs`` jobs that ``num_given`` threads share."""
        self._first_job = self._cpu.job
        wanted = np.zeros((num_jobs, self._width), np.int64)
        wanted[:, 0] = self._late_ns
        wanted[:, 1 : 1 + num_given] = self._first_job + 1 + np.arange(num_jobs)[:, None]
        self._wanted = self._device.upload(wanted)
        self.is_busy = True

    def post(self, rows: torch.Tensor) -> None:
        """Post the rows ``[T, in]`` of the next job to the CPU, once the device has computed them."""
        # By then the previous job's results have been taken, so the CPU no longer reads that job's rows.
        self._cpu.rows(*rows.shape).copy_(rows, non_blocking=True)
        self._cpu.job += 1
        self._device.mark(self._cpu.words[0, loops.POSTED : loops.POSTED + 1], self._cpu.job)

    def take(self, num_tokens: int, features: int) -> torch.Tensor:
        """Return the CPU's results of the last job, float32 ``[num_tokens, features]`` on the device. Where
        the CPU is late, the contents are undefined."""
        place = self._cpu.job - self._first_job - 1
        self._ops.await_words(self._done, self._wanted[place], self._told, place == 0)
        found = self._cpu.results(num_tokens, features)
        return torch.empty_like(found, device=self._device.torch_device).copy_(found, non_blocking=True)

    def issued(self) -> Callable[[], np.ndarray]:
        """Start to download what the step's kernels reported, after the whole step has been launched. Returns
        a function that waits for the step and returns int64 [2]: nanoseconds waited, and 1 where the CPU was
        late."""
        return self._device.download(self._told)

    def close(self) -> None:
        """Unpin the memory. Call it when no step is in flight. Idempotent."""
        if self._is_pinned:
            self._is_pinned = False
            self._device.release(self._cpu.memory, "CPU LoRA's memory")
