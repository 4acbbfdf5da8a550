"""Runs steps at fixed sizes, captured once and replayed, so that the host makes one launch instead of
hundreds.

These are decoding steps, and steps with prompts whose kernels take less time than their launches. A step is
padded to its bucket. Padding tokens read and write a page that holds no data, belong to no row and no
adapter, and their outputs are discarded. Everything that changes between steps is in device memory at fixed
addresses: numbers in one tensor, tables in the operations' plans. Only steps with prompts have gates. Owns the
buckets and their captures; only the device knows how to capture.

With several ranks, all ranks capture the same steps, or all stop capturing together. A captured step is
padded, so its exchanges have other sizes than an eager step's. If one rank replayed a step while another ran
it eagerly, the sizes of their exchanges would not match. So everything is captured before serving, in one
order, and a bucket is kept only where every rank has captured it. Later, the step alone determines its
bucket. Ranks agree between two buckets; within a bucket they cannot, since they already wait in each other's
exchanges there.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from manylora.config.policy import PolicyConfig
from manylora.devices.device import Device, Tensors
from manylora.devices.peers import Exchange, Peers
from manylora.executor.batch import StepInputs
from manylora.executor.forward import Forward, Numbers, Outputs
from manylora.executor.sampling import Best
from manylora.executor.tables import AdapterTables
from manylora.kernels.ops import (
    AttentionLimits,
    AttentionPlan,
    AttentionRows,
    LoraLimits,
    LoraPlan,
    LoraSegments,
    Ops,
)
from manylora.memory.gates import Awaited, LandedWords
from manylora.types import first_line

RANK_CLASSES = (16, 64, 256)
"""Upper limits of adapter ranks. A step belongs to the first class that its largest rank fits; a step beyond
the last class runs eagerly."""

COMMON_RANK = 64
"""The largest rank class that is captured before serving. Higher classes are captured when a step needs
them."""

MIXED_TOKENS: tuple[int, ...] = (
    16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 896, 1024, 1152, 1280, 1408, 1536,
)  # fmt: skip
"""The numbers of tokens to which steps with prompts are padded. The kernels of larger steps take longer than
their launches, so a capture would gain nothing."""

MAX_BYTES = 2**30
"""The bytes of device memory at which capturing stops. Several ranks use ``graph_bytes`` instead."""

_RANKED_LAYER_BYTES = 48 * 2**20
"""The bytes for captures per layer with several ranks. There a capture holds about twice as much, since
products run beside exchanges (11 MiB for 32 layers, of 108 captures)."""

_MOST_CELLS = 2**22
"""The most cells reserved at the start for a table that may still grow: 32 MiB."""

Progress = Callable[[int, int], None]

Rehearse = Callable[[Sequence[Callable[[], object]], int], bool]
"""A function that compiles the kernels that steps lack, ahead of time. Its arguments are the steps and a
number n: where the first n steps lack no kernel, it skips the others. Returns whether anything was
compiled."""

_NO_ROWS = AttentionRows(np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros((0, 1), np.int32))
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """A fixed size of steps: ``num_tokens`` tokens in at most ``num_rows`` rows, with adapters of ranks up to
    ``max_rank`` (0: no adapters).

    A bucket with as many rows as tokens is for decoding steps, in which every row has one token.
    """

    num_tokens: int
    num_rows: int
    max_rank: int

    @property
    def is_decoding(self) -> bool:
        return self.num_tokens == self.num_rows


@dataclasses.dataclass(frozen=True, slots=True)
class GraphLimits:
    """The limits of steps: rows, tokens, tokens of a context, and adapter ranks (None: any). ``num_groups``:
    the groups of layers in which awaited copies land; 0: steps await nothing. ``max_bytes``: the device
    memory that captures may hold. ``scratch_page``: the pool's page for padding alone."""

    max_num_seqs: int
    max_batch_tokens: int
    max_model_len: int
    max_adapter_rank: int | None
    num_groups: int
    max_bytes: int
    scratch_page: int

    @classmethod
    def of(cls, limits: PolicyConfig, max_adapter_rank: int | None, max_bytes: int) -> GraphLimits:
        """Return the limits of the steps that a policy with ``limits`` composes."""
        steps = limits.max_num_seqs, limits.max_batch_tokens, limits.max_model_len, max_adapter_rank
        return cls(*steps, limits.cold_start.num_groups, max_bytes, limits.num_pages)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Captured:
    """A bucket's plans and the function that runs a step of it, launch by launch until it is captured.
    ``cells``: the cell table that the step reads."""

    attention: AttentionPlan
    lora: LoraPlan | None
    cells: torch.Tensor
    pending_index: torch.Tensor
    run: Callable[[], Tensors]


def bucket_sizes(most: int) -> list[int]:
    """Return the numbers of rows to which steps are padded, ascending, up to ``most``. They are closer
    together where one more row costs relatively more."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32)]
    return [*[size for size in sizes if size < most], most]


def graph_bytes(num_layers: int, num_ranks: int) -> int:
    """Return the bytes of each device's memory that captures of a model may hold."""
    return MAX_BYTES if num_ranks == 1 else max(MAX_BYTES, _RANKED_LAYER_BYTES * num_layers)


# ---------------------------------------------------------------- gates

NUMBERS = 2
"""The count of numbers that a step's gates read (``Awaited.numbers``)."""


class StepGates:
    """The gates on the device, shared by all captures, which run one after another."""

    def __init__(self, ops: Ops, words: LandedWords, device: Device) -> None:
        self._ops = ops
        self._words = words
        self._device = device
        self._told = device.zeros((2,), torch.int64)

    def before_layer(self, wanted: torch.Tensor) -> Callable[[int], None]:
        """Return the ``before_layer`` of a StepBatch, which passes a gate before each group's first layer.
        ``wanted``: the step's ``NUMBERS`` on the device."""
        group_of = {first: group for group, (first, _) in enumerate(self._words.groups)}

        def pass_gate(layer: int) -> None:
            group = group_of.get(layer)
            if group is not None:
                self._ops.pass_gate(self._words.words[group : group + 1], wanted, self._told, group == 0)

        return pass_gate

    def told(self) -> Callable[[], np.ndarray]:
        """Start to download the reports of the last issued step's gates, for ``Awaited.told``."""
        return self._device.download(self._told)


# ---------------------------------------------------------------- steps


class StepGraphs:
    """The captured steps by bucket, and the way to run a step in its bucket. Used by the step loop's
    thread."""

    def __init__(
        self,
        forward: Forward,
        tables: AdapterTables,
        limits: GraphLimits,
        words: LandedWords | None,
        peers: Peers | None,
    ) -> None:
        """Prepare the buckets without capturing any. ``words``: the words that gates in steps with prompts
        read; None: no gates. ``peers``: the connection to the other ranks, on one of several; then the tables'
        cells must stay in place (``AdapterTables.fix``). Raises ValueError where the operations' kernels
        cannot be captured."""
        ops, device = forward.decoder.ops, forward.device
        if device.captures and not ops.captures:
            raise ValueError(f"{ops.name} kernels cannot be captured")
        self._forward = forward
        self._tables = tables
        self._device = device
        self._limits = limits
        self._peers = peers
        self._scratch_slot = limits.scratch_page * forward.geometry.page.page_tokens
        self._sizes = bucket_sizes(limits.max_num_seqs)
        largest = limits.max_adapter_rank
        self._ranks = sorted({rank if largest is None else min(rank, largest) for rank in RANK_CLASSES})
        # Maps a step's number of rows to its bucket's.
        self._size_of = [next(s for s in self._sizes if s >= n) for n in range(limits.max_num_seqs + 1)]
        self._mixed = [size for size in MIXED_TOKENS if size <= limits.max_batch_tokens]
        most_tokens = max([limits.max_num_seqs, *self._mixed])
        most = 3 * most_tokens + 2 * limits.max_num_seqs + NUMBERS
        self._numbers, self._numbers_here = device.zeros((most,), torch.int64), np.zeros(most, np.int64)
        # Not every kernel can wait on the device.
        self._gates = None if words is None or not ops.waits else StepGates(ops, words, device)
        self._attention: dict[tuple[int, int], AttentionPlan] = {}
        self.captured: dict[Bucket, Captured] = {}
        self.is_full = False
        """Whether no more buckets are captured."""
        self._segments: LoraSegments | None = None
        self._rank = 0
        self.ran: Bucket | None = None
        """The bucket of the last step, or None where it ran eagerly."""

    def capture_all(self, progress: Progress | None = None) -> None:
        """Capture the buckets that steps are likely to need. ``progress(done, total)`` is called before each.

        Stops with one warning where the device refuses or its memory is short; other steps then run eagerly.
        Several ranks capture in the same order, and nothing afterwards. Raises CapturingFailed.
        """
        began = time.perf_counter()
        buckets = self._ahead_of_time()
        gc.collect()  # garbage of now might be freed in the middle of a capture
        for done, bucket in enumerate(buckets):
            if progress is not None:
                progress(done, len(buckets))
            if self._get(bucket) is None:
                break
        if progress is not None:
            progress(len(buckets), len(buckets))
        self._device.synchronize()
        self._device.release_memory()
        _log.info(
            "captured %d of %d steps of up to %d decoding rows or %d tokens, ranks %s, in %.1f s and %.0f MiB",
            len(self.captured),
            len(buckets),
            self._sizes[-1],
            max(self._mixed, default=0),
            ", ".join(str(rank) for rank in self._common_ranks),
            time.perf_counter() - began,
            self._device.captured_bytes() / 2**20,
        )
        self.is_full = self.is_full or self._peers is not None

    def rehearsals(self, forward: Forward) -> tuple[list[Callable[[], object]], int]:
        """Return functions that run the steps of ``capture_all`` on padding, with ``forward``, a forward pass
        of fewer layers. Also return how many of these come first, one for each rank class, to show whether
        any kernels are missing."""
        buckets = self._ahead_of_time()
        firsts = {bucket.max_rank: bucket for bucket in reversed(buckets)}
        ordered = [*firsts.values(), *(bucket for bucket in buckets if bucket not in firsts.values())]

        def rehearse(bucket: Bucket) -> None:
            with torch.inference_mode():
                self._prepared(bucket, forward).run()

        return [functools.partial(rehearse, bucket) for bucket in ordered], len(firsts)

    @property
    def _common_ranks(self) -> list[int]:
        return [0, *(rank for rank in self._ranks if rank <= COMMON_RANK)]

    def _ahead_of_time(self) -> list[Bucket]:
        """Return the buckets to capture at the start, in order. Decoding steps come first, since they gain
        most where there is no room for all. Within each kind the largest come first, since the others reuse
        their memory."""
        sizes = [*((size, size) for size in self._sizes), *map(self._mixed_size, self._mixed)]
        wanted = {Bucket(*size, rank) for rank in self._common_ranks for size in sizes}
        return sorted(wanted, key=lambda each: (each.is_decoding, dataclasses.astuple(each)), reverse=True)

    def run(self, inputs: StepInputs, awaited: Awaited | None = None) -> Outputs | None:
        """Run the step in its bucket, and return its outputs, whose first M rows are the drawing rows. Return
        None, with nothing run, where the step has to run eagerly. ``awaited``: the copies that must land
        before the step's layers begin."""
        self.ran = None
        bucket = self._bucket(inputs)
        captured = None if bucket is None else self._get(bucket)
        if bucket is None or captured is None:
            return None
        num_tokens = len(inputs.token_ids)
        gates = self._gates_of(bucket)
        try:
            with self._device.sending_together():
                self._tables.send()
                captured.attention.fill(inputs.attention)
                if captured.lora is not None:
                    captured.lora.fill(inputs.layout.lora, num_tokens)
                self._send(inputs, bucket, awaited)
        except ValueError as error:
            # For example, the step has more prompts than the plan's tables have room for.
            _log.debug("a step of %d tokens runs eagerly: %s", num_tokens, error)
            return None
        if awaited is not None:
            awaited.pass_all(but_marked=gates is not None)
        logits, best, last = captured.run()
        self.ran = bucket
        if awaited is not None and gates is not None:
            awaited.told = gates.told()
        return Outputs(logits, Best.within(best), last, captured.pending_index)

    # ------------------------------------------------------------ buckets

    def _bucket(self, inputs: StepInputs) -> Bucket | None:
        lora = inputs.layout.lora
        if inputs.scored is not None or inputs.layout.head is not None:
            return None
        size = self._size(len(inputs.token_ids), len(inputs.attention.kv_len))
        if size is None:
            return None
        if lora is None:
            return Bucket(*size, 0)
        if lora is not self._segments:
            self._segments, self._rank = lora, int(lora.records[:, :, 2].max(initial=0))
        fitting = next((rank for rank in self._ranks if self._rank <= rank), None)
        return None if fitting is None else Bucket(*size, fitting)

    def _size(self, num_tokens: int, num_rows: int) -> tuple[int, int] | None:
        if num_rows > self._limits.max_num_seqs:
            return None
        if num_tokens == num_rows:
            return self._size_of[num_rows], self._size_of[num_rows]
        return next((self._mixed_size(size) for size in self._mixed if num_tokens <= size), None)

    def _mixed_size(self, num_tokens: int) -> tuple[int, int]:
        """Return the tokens and the most rows of a bucket for steps with prompts. It has fewer rows than
        tokens, so it is never a decoding bucket."""
        return num_tokens, min(num_tokens - 1, self._limits.max_num_seqs)

    def _gates_of(self, bucket: Bucket) -> StepGates | None:
        """Return the gates of the bucket's steps, or None where they have none."""
        return None if bucket.is_decoding else self._gates

    def _send(self, inputs: StepInputs | None, bucket: Bucket, awaited: Awaited | None = None) -> None:
        """Send all numbers of the step, in the order in which ``_numbers_of`` splits them. With ``inputs`` None,
        send padding alone. With ``awaited`` None, the gates have nothing to wait for."""
        tokens, rows = bucket.num_tokens, bucket.num_rows
        length = 3 * tokens + 2 * rows
        has_gates = self._gates_of(bucket) is not None
        numbers = self._numbers_here[: length + NUMBERS * has_gates]
        numbers.fill(0)
        of_tokens = numbers[: 3 * tokens].reshape(3, tokens)
        of_rows = numbers[3 * tokens : length].reshape(2, rows)
        if has_gates and awaited is not None:
            numbers[length:] = awaited.numbers()
        of_tokens[2] = self._scratch_slot
        if inputs is not None:
            count, drawing = len(inputs.token_ids), len(inputs.layout.sample_index)
            of_tokens[0, :count] = inputs.token_ids
            of_tokens[1, :count] = inputs.positions
            of_tokens[2, :count] = inputs.slots
            of_rows[0, :drawing] = inputs.layout.sample_index
            of_rows[1, :drawing] = inputs.layout.pending_index
        self._device.send(numbers, self._numbers[: len(numbers)])

    def _numbers_of(self, bucket: Bucket) -> tuple[Numbers, torch.Tensor]:
        """Return views of ``_numbers`` for the bucket: the step's numbers, and the numbers for its gates."""
        tokens, rows = bucket.num_tokens, bucket.num_rows
        sizes = [tokens, tokens, tokens, rows, rows, NUMBERS]
        *numbers, wanted = torch.split(self._numbers[: sum(sizes)], sizes)
        return Numbers(*numbers), wanted

    # ------------------------------------------------------------ captures

    def _get(self, bucket: Bucket) -> Captured | None:
        """Return the bucket's capture, made now if necessary. Return None where no more buckets are
        captured."""
        captured = self.captured.get(bucket)
        if captured is not None and (captured.lora is None or captured.cells is self._tables.cells):
            return captured
        # There is none, or the cell table that it reads has moved.
        self.captured.pop(bucket, None)
        if self.is_full:
            return None
        try:
            with torch.inference_mode():
                captured = self._capture(bucket)
        except RuntimeError as error:
            self.is_full = True
            count, why = len(self.captured), first_line(error)
            _log.warning("steps other than the %d captured ones run eagerly: %s", count, why)
            return None
        self.captured[bucket] = captured
        return captured

    def _capture(self, bucket: Bucket) -> Captured:
        """Capture a bucket. Raises RuntimeError where the device refuses or there is no room."""
        if self._peers is not None:
            return self._capture_together(bucket, self._peers)
        prepared = self._with_room(bucket)
        return dataclasses.replace(prepared, run=self._device.capture(prepared.run))

    def _capture_together(self, bucket: Bucket, peers: Peers) -> Captured:
        """Capture a bucket on all ranks. Raises RuntimeError on all ranks where one cannot capture it. Raises
        CapturingFailed where this rank could not even run the step, so that the others wait for its
        exchanges."""
        prepared: Captured | None = None
        why = ELSEWHERE
        try:
            prepared = self._with_room(bucket)
        except RuntimeError as error:
            why = first_line(error)
        if not _all(peers, prepared is not None) or prepared is None:
            raise RuntimeError(why)

        exchanges: list[Exchange] = []
        num_runs = 0

        def run() -> Tensors:
            nonlocal num_runs
            with peers.listed(exchanges):
                tensors = prepared.run()
            num_runs += 1
            return tensors

        replay: Callable[[], Tensors] | None = None
        try:
            replay = self._device.capture(run)
        except RuntimeError as error:
            why = first_line(error)
            if not num_runs:
                raise CapturingFailed(
                    f"a step could not be run to be captured, and --cuda-graphs auto does without: {why}"
                ) from error
        if not _all(peers, replay is not None) or replay is None:
            raise RuntimeError(why)
        made = replay

        def noted() -> Tensors:
            try:
                return made()
            finally:
                peers.note_all(exchanges)

        return dataclasses.replace(prepared, run=noted)

    def _with_room(self, bucket: Bucket) -> Captured:
        """Prepare a bucket. Raises RuntimeError where there is no room for another capture."""
        if self._device.captured_bytes() >= self._limits.max_bytes:
            raise RuntimeError(f"captures hold {self._limits.max_bytes >> 20} MiB")
        return self._prepared(bucket, self._forward)

    def _prepared(self, bucket: Bucket, forward: Forward) -> Captured:
        """Prepare a bucket to be captured, with plans that hold padding alone. Nothing has run yet."""
        ops, geometry = self._forward.decoder.ops, self._forward.geometry.of_layers
        device = self._device.torch_device
        tokens, rows = bucket.num_tokens, bucket.num_rows
        attention = self._attention.get((tokens, rows))
        if attention is None:
            attention_room = AttentionLimits(tokens, rows, self._limits.max_model_len)
            attention = ops.attention_plan(geometry.page, device, attention_room)
            self._attention[tokens, rows] = attention
        cells = self._tables.cells
        lora = None
        if bucket.max_rank:
            lora = ops.lora_plan(geometry, device, LoraLimits(tokens, rows, bucket.max_rank, cells))
        numbers, wanted = self._numbers_of(bucket)
        gates = self._gates_of(bucket)
        before_layer = None if gates is None else gates.before_layer(wanted)

        def run() -> Tensors:
            found = forward.compute(numbers, attention, lora, before_layer=before_layer)
            return found.logits, found.best.packed, found.last

        # The plans hold padding alone: a capture also runs the step, which must change no data.
        attention.fill(_NO_ROWS)
        if lora is not None:
            lora.fill(None, tokens)
        self._send(None, bucket)
        return Captured(attention, lora, cells, numbers.pending_index, run)


# ---------------------------------------------------------------- several ranks

ELSEWHERE = "another rank could not capture more"


class CapturingFailed(Exception):
    """The error of a rank that has failed where other ranks wait for it."""


def _all(peers: Peers, can: bool) -> bool:
    """Return whether ``can`` is true on every rank."""
    found = peers.gather(torch.tensor([int(can)], dtype=torch.int64), "start")
    return all(bool(one.item()) for one in found)


# ---------------------------------------------------------------- construction


def steps_of_fixed_sizes(
    forward: Forward,
    tables: AdapterTables,
    limits: GraphLimits,
    words: LandedWords | None,
    progress: Progress | None,
    rehearse: Rehearse | None,
    peers: Peers | None,
) -> StepGraphs | None:
    """Make and capture the steps for ``Worker.use_graphs``. Return None, with a warning, where the
    operations' kernels cannot be captured. Raises CapturingFailed."""
    arena, geometry, device = forward.arena, forward.geometry, forward.device
    try:
        graphs = StepGraphs(forward, tables, limits, words, peers)
    except ValueError as error:
        _log.warning("decoding steps run eagerly: %s", error)
        return None
    num_cells = arena.num_pages * geometry.cells_per_page
    if peers is not None:
        tables.fix(num_cells)
    elif device.captures:
        # When the table moves, its captures must be made again. So reserve room for all cells of the pool, up
        # to a limit.
        tables.reserve(min(num_cells, _MOST_CELLS))
    else:
        return graphs
    if rehearse is not None:
        decoder = forward.decoder.rehearsal()
        rehearse(*graphs.rehearsals(Forward(decoder, arena, geometry, device, forward.ranked)))
    graphs.capture_all(progress)
    return graphs
