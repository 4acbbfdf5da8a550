"""The executor of one device: obeys commands on the model, the pool and the adapters. Decides nothing.

Owns the order in which a step touches sequences, tables, model and sampler, and that a step which fails
leaves no trace in them.
"""

from __future__ import annotations

import collections
import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from manylora.adapters.pack import layout_of, load_adapter
from manylora.adapters.peft import AdapterSpec
from manylora.adapters.registry import Registry
from manylora.devices.device import Device
from manylora.executor.inputs import InputBuilder, StepInputs
from manylora.executor.reader import AdapterReader, Landed
from manylora.executor.sampler import sample
from manylora.executor.sequences import SequenceTable, Undo
from manylora.executor.shards import Shards
from manylora.executor.tables import AdapterTables
from manylora.kernels.shapes import AdapterGeometry
from manylora.memory.arena import Arena
from manylora.memory.copier import Copier, one_line
from manylora.memory.host import HostPool
from manylora.models.decoder import Decoder
from manylora.protocol import (
    AdapterError,
    AdapterRead,
    CopyDone,
    ReadAdapter,
    RunStep,
    StepDone,
    StepResult,
    StepRow,
    SwapPages,
)
from manylora.types import AdapterId, PageId, SequenceId, TokenLogprobs

_log = logging.getLogger(__name__)

Drawn = dict[int, tuple[list[int], list[TokenLogprobs | None]]]
"""By row of the step: its tokens, and their log-probabilities where asked for."""


class Worker:
    """``protocol.Executor`` on one device. All but ``add_adapter`` and ``remove_adapter``: one thread."""

    def __init__(
        self,
        decoder: Decoder,
        arena: Arena,
        host: HostPool,
        geometry: AdapterGeometry,
        device: Device,
        registry: Registry,
        max_adapter_rank: int | None = None,
        shards: Shards | None = None,
    ) -> None:
        """``geometry`` must be made of the pools' page shape and the decoder's groups.

        ``shards``, if any, run parts of large enough batches side by side. The worker closes what it is given.
        """
        self._decoder: Decoder | None = decoder
        self._arena = arena
        self._host = host
        self._geometry = geometry
        self._device = device
        self._registry = registry
        self._max_adapter_rank = max_adapter_rank
        self._specs: dict[AdapterId, AdapterSpec] = {}
        self._sequences = SequenceTable()
        self._tables = AdapterTables(device, len(geometry.projections), geometry.page.layers)
        self._shards = shards
        # One builder a shard: each remembers the plan of the step before.
        self._inputs = [
            InputBuilder(self._sequences, self._tables, geometry, decoder.ops, device)
            for _ in range(shards.num_threads if shards else 1)
        ]
        self._landed: collections.deque[Landed] = collections.deque()
        self._reader = AdapterReader(arena, host, geometry, device, self._landed.append)
        self._copier = Copier(arena, host, device)

    # ------------------------------------------------------------ steps

    def run_step(self, step: RunStep) -> StepResult:
        began = time.perf_counter()
        started: list[SequenceId] = []
        changes: Undo = []
        try:
            self._enter_landed()
            for start in step.starts:
                self._sequences.start(start)
                started.append(start.sequence)
            self._sequences.update_pages(step.rows, changes)
            return self._result(step, self._run(step.rows), began)
        except Exception as error:
            self._sequences.undo(changes)
            for sequence in started:
                self._sequences.end(sequence)
            _log.exception("step %d failed", step.step)
            done = StepDone(step.step, False, (), time.perf_counter() - began, one_line(error))
            return StepResult(done, {})

    def _run(self, rows: tuple[StepRow, ...]) -> Drawn:
        parts = None if self._shards is None else self._split(rows, self._shards)
        if parts is None or self._shards is None:
            return self._run_part(self._inputs[0], rows)
        results = self._shards.run(
            [
                functools.partial(self._run_part, inputs, [rows[index] for index in part])
                for inputs, part in zip(self._inputs, parts)
            ]
        )
        return {part[index]: drawn for part, found in zip(parts, results) for index, drawn in found.items()}

    def _split(self, rows: tuple[StepRow, ...], shards: Shards) -> list[list[int]] | None:
        """Indices of each shard's rows; those of one adapter stay together unless a cut falls among them."""
        adapters = self._sequences.adapters[self._sequences.slots(rows)]
        order = np.argsort(adapters, kind="stable").tolist()
        ranges = shards.split([rows[index].num_tokens for index in order])
        return None if ranges is None else [[order[place] for place in part] for part in ranges]

    def _run_part(self, inputs: InputBuilder, rows: Sequence[StepRow]) -> Drawn:
        if self._decoder is None:
            raise RuntimeError("the executor is closed")
        with torch.inference_mode():
            built: StepInputs = inputs.build(rows)
            logits = self._decoder.forward(built.batch, self._arena.pool)
            if not built.sampled:
                self._device.synchronize()
                return {}
            tokens, logprobs = sample(logits, built.sampled)
        return dict(zip(built.sampled_rows, zip(tokens, logprobs)))

    def _result(self, step: RunStep, drawn: Drawn, began: float) -> StepResult:
        rows = [row for row in step.rows if row.num_samples]
        results = [drawn[index] for index in sorted(drawn)]
        # What other samples drew comes back as their own SequenceStart.
        self._sequences.append(rows, [ids[0] for ids, _ in results])
        logprobs: dict[tuple[SequenceId, int], TokenLogprobs] = {}
        for row, (_, found) in zip(rows, results):
            if found[0] is not None:
                logprobs.update(((row.sequence, i), item) for i, item in enumerate(found) if item is not None)
        tokens = tuple((row.sequence, tuple(ids)) for row, (ids, _) in zip(rows, results))
        return StepResult(StepDone(step.step, True, tokens, time.perf_counter() - began), logprobs)

    def end_sequence(self, sequence: SequenceId) -> None:
        self._sequences.end(sequence)

    def copy_pages(self, pairs: tuple[tuple[PageId, PageId], ...]) -> None:
        self._arena.copy_pages(pairs)

    # ------------------------------------------------------------ adapters

    def add_adapter(self, adapter: AdapterId, path: str, verify: bool = False) -> tuple[int, int]:
        spec = self._registry.inspect(Path(path), self._max_adapter_rank)
        layout = layout_of(spec, self._geometry)
        if verify:
            # All that a read does, for nobody: finds weights that are damaged or not finite.
            load_adapter(spec, layout, self._geometry, self._arena.pool.dtype, lambda page, image: None)
        self._specs[adapter] = spec
        return layout.num_pages, spec.rank

    def remove_adapter(self, adapter: AdapterId) -> None:
        self._specs.pop(adapter, None)

    def read_adapter(self, command: ReadAdapter, done: Callable[[AdapterRead], None]) -> None:
        try:
            self._reader.start(self._specs.get(command.adapter), command, done)
        except RuntimeError as error:
            # Closed, or the device is broken: no thread will answer.
            done(AdapterRead(command.adapter, False, one_line(error)))

    def evict_adapter(self, adapter: AdapterId) -> None:
        self._enter_landed()
        self._tables.drop(adapter)

    def swap_pages(self, command: SwapPages, done: Callable[[CopyDone], None]) -> None:
        try:
            self._copier.start(command, self._landing(command), done)
        except (AdapterError, RuntimeError, ValueError) as error:
            # Removed meanwhile, closed, or a wrong command: no thread will answer.
            done(CopyDone(command.copy, False, error=one_line(error)))

    def _landing(self, command: SwapPages) -> Callable[[], None]:
        """What to do on the copier's thread once the pages have landed."""
        adapter = command.adapter
        if adapter is None or not command.to_device:
            return lambda: None
        pages = [destination for _, destination in command.pairs]
        landed = Landed.at(adapter, layout_of(self._spec(adapter), self._geometry), self._geometry, pages)

        def enter() -> None:
            self._spec(adapter)
            self._landed.append(landed)

        return enter

    def _spec(self, adapter: AdapterId) -> AdapterSpec:
        spec = self._specs.get(adapter)
        if spec is None:
            raise AdapterError("the adapter is not known")
        return spec

    def _enter_landed(self) -> None:
        """Enter what has landed into the tables. It is among it before its ``done`` is heard of."""
        while self._landed:
            landed = self._landed.popleft()
            self._tables.put(landed.adapter, landed.layout, landed.offsets)

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        if self._decoder is None:
            return
        self._reader.close()
        self._copier.close()
        try:
            self._device.synchronize()
        except RuntimeError:
            _log.exception("the device failed before it was closed")
        if self._shards is not None:
            self._shards.close()
        self._decoder = None
        self._inputs = []
        self._arena.close()
        self._host.close()
        self._registry.close()
        self._device.release_memory()
