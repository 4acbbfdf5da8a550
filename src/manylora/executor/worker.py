"""Executes commands on the model, the pools and the adapters of one device. Decides nothing.

Owns the order in which a step uses sequences, tables, model and sampler, and the rule that a failed step
leaves no changes in them.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from manylora.adapters.pack import pretended_layout
from manylora.adapters.registry import Registry
from manylora.devices.device import Device
from manylora.devices.peers import Peers
from manylora.devices.preparation import PREPARATION
from manylora.executor.arrivals import Arrivals
from manylora.executor.batch import Expected, InputBuilder, SequenceTable, StepInputs, Undo
from manylora.executor.cold_rows import ColdRows, DeviceHandover
from manylora.executor.cpu_lora import CpuLora
from manylora.executor.forward import Forward, Outputs
from manylora.executor.graphs import Bucket, GraphLimits, Progress, Rehearse, StepGraphs, steps_of_fixed_sizes
from manylora.executor.merging import MergedWeights, Pristine, RankedMerging
from manylora.executor.parts import StepParts
from manylora.executor.reading import AdapterReader, Inspections
from manylora.executor.sampling import RankedSampling, Results, ScoredTokens, draw, most_likely
from manylora.executor.tables import AdapterTables
from manylora.kernels.shapes import AdapterGeometry
from manylora.memory.bringing import bringer_of
from manylora.memory.copier import Copier, one_line
from manylora.memory.gates import Awaited
from manylora.memory.pool import Arena, HostPool
from manylora.models.model import Model
from manylora.protocol import commands, events
from manylora.protocol.executor import AdapterError, DeviceEvent, ExecutorState, StepResult
from manylora.types import BASE, AdapterId, CopyId, SequenceId, TokenLogprobs

_log = logging.getLogger(__name__)


class _InFlight(NamedTuple):
    """A step in flight. ``rows``: the drawing rows' places in the step, in the batch's order; ``sequences``:
    the drawing rows' sequences, in the step's order, like ``expected``. ``scored``: the batch's scored prompt
    tokens, if any. ``results`` and ``scores`` wait for the device and return the draws, and the scores of these
    tokens."""

    step: commands.RunStep
    began: float
    awaited: Awaited | None
    cold: ColdRows | None
    sequences: tuple[SequenceId, ...]
    expected: Expected
    rows: np.ndarray
    results: Callable[[], Results]
    scored: ScoredTokens | None
    scores: Callable[[], np.ndarray] | None

    def result(self) -> StepResult:
        """Wait for the device and return the step's result."""
        results, order = self.results(), np.argsort(self.rows).tolist()
        tokens = tuple((name, tuple(results.tokens[row])) for name, row in zip(self.sequences, order))
        logprobs: dict[tuple[SequenceId, int], TokenLogprobs] = {}
        for name, row in zip(self.sequences, order if results.logprobs else ()):
            told = enumerate(results.logprobs[row] if results.logprobs else ())
            logprobs |= {(name, sample): item for sample, item in told if item is not None}
        bad = set(results.unsound)
        unsound = tuple(name for name, row in zip(self.sequences, order) if row in bad) if bad else ()
        prompts = {} if self.scored is None or self.scores is None else self.scored.read(self.scores())
        return StepResult(events.StepDone(self.step.step, True, tokens, unsound=unsound), logprobs, prompts)


class Worker:
    """The ``protocol.Executor`` of one device.

    Landed adapters are shared with other threads without a lock: appending to a deque and popping from it
    rely on the GIL.
    """

    def __init__(
        self,
        decoder: Model,
        arena: Arena,
        host: HostPool,
        geometry: AdapterGeometry,
        device: Device,
        registry: Registry,
        max_adapter_rank: int | None = None,
        ranked: RankedSampling | None = None,
    ) -> None:
        """Take over the given objects, which the worker closes.

        ``geometry`` must be made of the pools' page shape and the decoder's groups. ``ranked``: given where
        the decoder is one rank's share of a model.
        """
        self._forward: Forward | None = Forward(decoder, arena, geometry, device, ranked)
        self._is_rank = ranked is not None  # ranks forget copies by command, all alike
        self._graphs: StepGraphs | None = None
        self._arena = arena
        self._host = host
        self._geometry = geometry
        self._device = device
        self._registry = registry
        self.inspections = Inspections(registry, geometry, arena.dtype, max_adapter_rank)
        self._sequences = SequenceTable()
        self._tables = AdapterTables(device, geometry)
        self._merging: MergedWeights | None = None
        self._cpu_lora: CpuLora | None = None
        self._handover: DeviceHandover | None = None
        self._inputs = InputBuilder(self._sequences, self._tables, geometry)
        self._handlers = commands.handlers(self, commands.DEVICE_COMMANDS)
        self._report: Callable[[DeviceEvent], None] = unheard
        self._in_flight: collections.deque[_InFlight] = collections.deque()  # oldest first
        self._ended_s = 0.0
        # A device without captures runs a step within the call that launches it, so work put off until after
        # the launch would wait for the whole step.
        self._copier = Copier(arena, host, device, puts_off=device.captures)
        self._arrivals = Arrivals(self._copier, self._tables, geometry, self.inspections.layout)
        self._reader = AdapterReader(arena, host, geometry, device, self._arrivals.landed.append)

    # ------------------------------------------------------------ the Executor protocol

    def connect(self, report: Callable[[DeviceEvent], None]) -> None:
        self._report = report

    def obey(self, command: commands.DeviceCommand) -> None:
        self._handlers[type(command)](command)

    def flush(self) -> None:
        self._copier.flush()

    def wait_step(self) -> None:
        self._copier.flush()
        if self._in_flight:
            result = self._finish(self._in_flight.popleft())
            if not self._is_rank:
                self._arrivals.step_ended()
            self._report(result)

    def forget_copies(self, answered: Sequence[tuple[CopyId, bool]]) -> None:
        """Forget copies that no step will name any more; each comes with whether it went well on all ranks.
        Used on one of several ranks."""
        self._arrivals.forget(answered)

    # ------------------------------------------------------------ merged weights

    def use_merging(self, pristine: Pristine, ranked: RankedMerging | None = None) -> None:
        """Accept SetMerged from now on. Call it before the first step and before ``use_graphs``.
        ``pristine``: the copy of the weights of the decoder's linears, which the worker closes. ``ranked``:
        given on one of several ranks."""
        assert self._forward is not None
        self._merging = MergedWeights(self._forward, pristine, self._tables, self._copier, ranked)

    def settle_merged(self) -> None:
        """Wait for a switch that runs beside the step loop. Raises RuntimeError where the base's weights are
        lost."""
        if self._merging is not None:
            self._merging.settle()

    def set_merged(self, command: commands.SetMerged) -> None:
        """Carry out SetMerged. Raises RuntimeError where the base's weights are lost."""
        if self._merging is None or self._forward is None:
            error = "the executor is closed" if self._forward is None else "merging is off"
            self._report(events.SwitchDone(command.switch, False, error=error))
            return
        self._arrivals.enter()
        self._merging.switch(command, self._report)

    # ------------------------------------------------------------ steps

    def use_cpu_lora(self, cpu: CpuLora, handover: DeviceHandover | None) -> None:
        """Let ``cpu`` compute the rows of ``RunStep.cpu``. Call it before the first step. The worker closes
        both objects."""
        self._cpu_lora, self._handover = cpu, handover

    def use_parts(self, parts: StepParts) -> None:
        """Let eager steps run in parts, on threads that the worker closes. Call it before the first step."""
        assert self._forward is not None
        self._forward.parts = parts

    def use_graphs(
        self,
        limits: GraphLimits,
        progress: Progress | None = None,
        rehearse: Rehearse | None = None,
        peers: Peers | None = None,
    ) -> None:
        """Run steps at fixed sizes from now on, captured where the device can. Call it before the first step.

        ``peers``: the connection to the other ranks, on one of several. Only logs a warning where the
        operations' kernels cannot be captured. Raises CapturingFailed.
        """
        assert self._forward is not None
        words = None
        if limits.num_groups and self._device.captures:
            pools = self._arena, self._host, self._device
            self._copier.bringer = bringer_of(self._forward.decoder.ops, *pools, limits.num_groups)
            words = None if self._copier.bringer is None else self._copier.bringer.words
        steps = self._forward, self._tables, limits, words
        self._graphs = steps_of_fixed_sizes(*steps, progress, rehearse, peers)

    @property
    def bucket(self) -> Bucket | None:
        """The bucket of the last issued step, or None where it ran eagerly."""
        return None if self._graphs is None else self._graphs.ran

    def run_step(self, step: commands.RunStep) -> None:
        """Carry out RunStep. A step that cannot be issued is answered as failed. Raises RuntimeError where
        the base's weights are lost."""
        merged = BASE
        if self._merging is not None:
            self._copier.flush()  # copies that were put off can run while this thread waits for a switch
            merged = self._merging.settle()
        began = time.perf_counter()
        started: list[SequenceId] = []
        changes: Undo = []
        try:
            if self._merging is not None:
                self._merging.check(step.merged)
            elif step.merged != BASE:
                raise ValueError(f"the step names adapter {step.merged} as merged, but merging is off")
            self._arrivals.enter()
            self._tables.merge(merged)
            for start in step.starts:
                self._sequences.start(start)
                started.append(start.sequence)
            self._sequences.update_pages(step.rows, changes)
            self._in_flight.append(self._launched(step, began))
        except Exception as error:
            PREPARATION.give_up()
            self._sequences.undo(changes)
            for sequence in started:
                self._sequences.end(sequence)
            self._report(self._failed(step, error, began))
        self._copier.flush()

    def _launched(self, step: commands.RunStep, began: float) -> _InFlight:
        """Launch a step whose sequences and page tables are up to date."""
        forward = self._forward
        if forward is None:
            raise RuntimeError("the executor is closed")
        rows = self._sequences.rows(step.rows)
        awaited = self._arrivals.awaited(step) if step.awaits else None
        cold = self._arrivals.cold(step) if step.cpu else None
        with torch.inference_mode():
            inputs = self._inputs.build(rows)
            outputs = self._outputs(forward, inputs, awaited, cold)
            count = len(inputs.layout.sampled_rows)
            if inputs.sampled is None:
                draws = most_likely(outputs.best, [1] * count)
            else:
                drawn = draw if forward.ranked is None else forward.ranked.draw
                draws = drawn(outputs.logits[:count], inputs.sampled, outputs.best, outputs.last[:count])
            if draws.first is not outputs.best.tokens:
                forward.redraw(outputs.pending_index[:count], draws.first)
            arrived = self._device.download(draws.packed)
            scores = None if outputs.scores is None else self._device.download(outputs.scores)
        # ``expect`` adds only the first sample's token: other samples return with their own SequenceStart.
        sequences, expected = rows.composition.sampled_sequences, self._sequences.expect(rows)
        given = step, began, awaited, cold, sequences, expected, inputs.layout.sampled_rows
        return _InFlight(*given, lambda: draws.read(arrived()), inputs.scored, scores)

    def _outputs(
        self, forward: Forward, inputs: StepInputs, awaited: Awaited | None, cold: ColdRows | None
    ) -> Outputs:
        """Run the step in its bucket where it has one. Else run it eagerly, once the copies that it awaits have
        been issued; the CPU serves its cold rows if it takes the step."""
        if cold is None and self._graphs is not None:
            outputs = self._graphs.run(inputs, awaited)
            if outputs is not None:
                return outputs
        self._tables.send()
        if awaited is not None:
            awaited.pass_all()
        given = self._cpu_lora, self._handover, inputs, self._geometry, self._device
        if cold is None or not cold.begin(*given):
            return forward.run(inputs)
        with cold.launching():
            return forward.run(inputs, cold)

    def _finish(self, flight: _InFlight) -> StepResult:
        """Wait for the step's end and return its result."""
        step, awaited, cold = flight.step, flight.awaited, flight.cold
        try:
            if cold is not None:
                cold.end()
            result = flight.result()
        except Exception as error:
            self._sequences.forget(flight.expected)
            return self._failed(step, error, flight.began)
        done = result.done
        if awaited is not None:
            done.invalid = awaited.invalid()
            done.stall_s = awaited.stall_s
        self._sequences.settle(flight.expected, [tokens[0] for _, tokens in done.tokens])
        done.device_s = self._step_s(flight.began)
        if cold is not None:
            cold.fill_in(done)
        return result

    def _failed(self, step: commands.RunStep, error: Exception, began: float) -> StepResult:
        _log.error("step %d failed", step.step, exc_info=error)
        with contextlib.suppress(RuntimeError):
            # Work of the step that was issued must end before the policy gives the step's pages to other
            # sequences.
            self._device.synchronize()
        return StepResult(events.StepDone(step.step, False, (), self._step_s(began), one_line(error)), {})

    def _step_s(self, began: float) -> float:
        """Return the seconds of a step that ends now, counted from when it was issued or from the previous
        step's end, whichever is later."""
        now = time.perf_counter()
        seconds, self._ended_s = now - max(began, self._ended_s), now
        return seconds

    def end_sequence(self, command: commands.EndSequence) -> None:
        """Carry out EndSequence."""
        self._sequences.end(command.sequence)

    def copy_pages(self, command: commands.CopyPages) -> None:
        """Carry out CopyPages."""
        self._arena.copy_pages(command.pairs)
        self._copier.settle()

    # ------------------------------------------------------------ adapters

    def inspect_adapter(self, command: commands.InspectAdapter) -> None:
        """Carry out InspectAdapter on the caller's thread."""
        self._report(self.inspections.inspect(command))

    def verify_adapter(self, command: commands.VerifyAdapter) -> None:
        """Carry out VerifyAdapter on the caller's thread."""
        self._report(self.inspections.verify(command))

    def forget_adapter(self, command: commands.ForgetAdapter) -> None:
        """Carry out ForgetAdapter."""
        self.inspections.forget(command.adapter)

    def pretend_adapter(self, adapter: AdapterId, rank: int) -> bool:
        """Enter an adapter of scale 0 on all projections, without pages of its own, until ``evict_adapter``.
        Steps with it run the kernels for adapters, and compute the same as the base model. Return False where
        the pool has no room for an adapter of this rank."""
        layout = pretended_layout(rank, self._geometry)
        if layout.num_pages > self._arena.num_pages:
            return False
        # All cells of the adapter are at the beginning of the pool.
        self._tables.put(adapter, layout, np.zeros(layout.num_cells, np.int64))
        return True

    def read_adapter(self, command: commands.ReadAdapter) -> None:
        """Carry out ReadAdapter."""
        try:
            self._arrivals.claim(command)
            self._reader.start(self.inspections.spec(command.adapter), command, self._report)
        except AdapterError as error:
            self._report(events.AdapterRead(command.adapter, False, str(error)))
        except (RuntimeError, ValueError) as error:
            # The reader is closed, or the device is broken: no thread will answer.
            self._report(events.AdapterRead(command.adapter, False, one_line(error)))

    def evict_adapter(self, command: commands.EvictAdapter) -> None:
        """Carry out EvictAdapter."""
        self._arrivals.leave(command.adapter)

    def swap_pages(self, command: commands.SwapPages) -> None:
        """Carry out SwapPages."""
        self._arrivals.swap(command, self._report)

    def report_state(self, command: commands.ReportState) -> None:
        """Carry out ReportState."""
        self._report(self.state())

    def state(self) -> ExecutorState:
        """Return the worker's state. May be called from any thread."""
        return ExecutorState(self._host.pages_pinned, PREPARATION.seconds())

    # ------------------------------------------------------------ the end

    def synchronize(self) -> None:
        """Wait until the device has done all work issued so far."""
        self._device.synchronize()

    def close(self, *, frees: bool = True) -> None:
        if self._forward is None:
            return
        self._reader.close()
        self._registry.close()
        self._forward.close()
        if self._cpu_lora is not None:
            self._cpu_lora.close()
        if not frees:
            return
        if self._merging is not None:
            self._merging.close()
        self._copier.close()
        try:
            self._device.synchronize()
        except RuntimeError:
            _log.exception("the device failed before it was closed")
        if self._handover is not None:
            self._handover.close()
        self._forward = self._graphs = None
        del self._inputs  # it holds tensors of the last step
        self._tables.close()
        self._arena.close()
        self._host.close()
        self._device.release_memory()


def unheard(answer: DeviceEvent) -> None:
    """Log an answer that arrives before the executor is connected."""
    _log.warning("an answer has nowhere to go: %s", type(answer).__name__)
