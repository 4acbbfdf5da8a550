"""The operations that a decoder needs from a device, and the per-step inputs they share.

One subclass of Ops a device: ``cpu`` (compiled loops and torch), ``triton`` (CUDA). Host-side descriptions (numpy)
are built once a step by the executor; a plan is filled with them, whatever an implementation wants to hold, once
a step; every layer then reuses the plans.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn import functional

from manylora.kernels.shapes import Activation, AdapterGeometry, PageShape, Projection, ProjectionGroup

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


@dataclasses.dataclass(eq=False)
class Weight:
    """``data`` ``[out, in]``; ``version`` counts the rewrites.

    The memory stays the same for the weight's whole life: captured graphs hold its address, and operations read it
    anew at every call. An operation that keeps something derived from the numbers keeps the version beside it.
    """

    data: torch.Tensor
    version: int = 0

    def plain(self) -> torch.Tensor | None:
        """The matrix itself, in the dtype of the activations; None where it is held otherwise, and nothing can be
        merged into it."""
        return self.data

    def rewrite(self, data: torch.Tensor) -> None:
        """Copy these numbers over the weight's, ordered with the device's other work; for the weight's owner.

        Raises ValueError where shape or dtype differ from the weight's, which then stays as it is.
        """
        mine = self.data
        if data.shape != mine.shape or data.dtype != mine.dtype:
            raise ValueError(
                f"a weight of shape {list(mine.shape)} and {mine.dtype} cannot hold "
                f"shape {list(data.shape)} and {data.dtype}"
            )
        with self.rewriting():
            mine.copy_(data)

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[torch.Tensor]:
        """The memory, for its owner to write to; ordered with the device's other work. A new version afterwards,
        whether or not all went well."""
        try:
            yield self.data
        finally:
            self.version += 1


@dataclasses.dataclass(frozen=True)
class AttentionRows:
    """The rows (one per scheduled sequence) of a flat batch of T tokens, in batch order.

    ``query_start`` int32 [R+1]: row i's tokens are ``[query_start[i], query_start[i+1])``.
    ``kv_len`` int32 [R]: context length at the end of this step, this step's tokens included; the row's
    first query sits at position ``kv_len - num_queries``.
    ``page_table`` int32 [R, W]: page ids; entries past ``ceil(kv_len / page_tokens)`` are arbitrary valid
    ids (0) and must not be read as data.
    """

    query_start: np.ndarray
    kv_len: np.ndarray
    page_table: np.ndarray


@dataclasses.dataclass(frozen=True)
class LoraSegments:
    """Runs of tokens that share an adapter; tokens in no segment belong to the base model.

    ``start``, ``length`` int32 [S]: token ranges of the flat batch, ascending, disjoint.
    ``records`` int64 [S, P, 3]: per segment and projection (table order of AdapterGeometry.projections):
    (position of its first A cell in ``cells``, position of its first B cell, rank); rank 0: not adapted.
    A row j (0 <= j < rank) of A takes ``geometry.cells(in_features)`` consecutive entries of ``cells`` from
    ``first + j * that``; B likewise with ``out_features`` (B is stored transposed: rank rows of length out).
    ``scales`` float32 [S, P, L]: lora_alpha / r (or rsLoRA's) per layer; finite.
    ``cells`` int64 tensor on the device: at how many adapter elements into the pool a cell's *layer 0* begins, a
    multiple of ``geometry.alignment``; layer l lies ``l * geometry.slab_elements`` further. Shared by all steps.
    """

    start: np.ndarray
    length: np.ndarray
    records: np.ndarray
    scales: np.ndarray
    cells: torch.Tensor

    def part(self, first: int, end: int) -> LoraSegments:
        """The same of these projections alone."""
        records, scales = (np.ascontiguousarray(array[:, first:end]) for array in (self.records, self.scales))
        return dataclasses.replace(self, records=records, scales=scales)

    def of_tokens(self, tokens: np.ndarray) -> LoraSegments | None:
        """The segments of these tokens alone, ascending int [M]; None where none of them has an adapter."""
        segment = np.searchsorted(self.start, tokens, side="right") - 1
        ends = np.append(self.start + self.length, 0)  # -1: before all segments
        adapted = np.flatnonzero(tokens < ends[segment])
        if len(adapted) == 0:
            return None
        kept, first, count = np.unique(segment[adapted], return_index=True, return_counts=True)
        start, length = adapted[first].astype(np.int32), count.astype(np.int32)
        return LoraSegments(start, length, self.records[kept], self.scales[kept], self.cells)


def no_segments(geometry: AdapterGeometry, cells: torch.Tensor) -> LoraSegments:
    """Of a batch in which no token has an adapter."""
    projections, layers = len(geometry.projections), geometry.page.layers
    empty = np.zeros(0, dtype=np.int32)
    records = np.zeros((0, projections, 3), dtype=np.int64)
    return LoraSegments(empty, empty, records, np.zeros((0, projections, layers), dtype=np.float32), cells)


class AttentionRoom(NamedTuple):
    """The largest step that a plan is for: tokens, in so many rows (of one token each, if these are as many), and
    tokens of a context."""

    num_tokens: int
    num_rows: int
    max_context: int


class LoraRoom(NamedTuple):
    """The largest step that a plan is for: tokens, in so many rows (of one token each, if these are as many), and
    an adapter's rank. ``cells``: LoraSegments', which must stay where it is."""

    num_tokens: int
    num_rows: int
    max_rank: int
    cells: torch.Tensor


class AttentionPlan(Protocol):
    """What ``Ops.attention`` reads of a step's rows."""

    def fill(self, rows: AttentionRows) -> None:
        """Point the plan at a step's rows. Does not wait for the device; steps in flight are not disturbed.

        Tokens past the rows' get zeros. Raises ValueError where the plan has no room for the rows.
        """


class LoraPlan(Protocol):
    """What the LoRA operations read of a step's segments."""

    def fill(self, segments: LoraSegments | None, num_tokens: int) -> None:
        """Point the plan at the segments of a batch of so many tokens; None: no token has an adapter.

        Otherwise as ``AttentionPlan.fill``.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class MergePlan:
    """One pass over the base's weights: which projections' rows are written, and of which adapter.

    ``wanted`` bool [P]: others keep theirs. ``records`` int64 [P, 3] and ``scales`` float32 [P, L]: a
    segment's, as in LoraSegments. Rank 0: the rows become the pristine ones,
    bit for bit. ``cells``: LoraSegments'.
    """

    wanted: np.ndarray
    records: np.ndarray
    scales: np.ndarray
    cells: torch.Tensor
    geometry: AdapterGeometry

    def parts(self, group: ProjectionGroup, layer: int) -> list[MergePart]:
        """The group's projections whose rows are written."""
        found = []
        for place, projection in enumerate(group.projections):
            index = self.geometry.projections.index(projection)
            if self.wanted[index]:
                first_a, first_b, rank = self.records[index].tolist()
                scale = float(self.scales[index, layer])
                found.append(MergePart(place, projection, first_a, first_b, rank, scale))
        return found


class MergedLayer(NamedTuple):
    """A fused linear whose rows are written: ``merged`` from ``pristine``, both ``[sum(out), in]``, contiguous, of
    the adapter's dtype. They may be the same memory."""

    layer: int
    merged: torch.Tensor
    pristine: torch.Tensor


class MergePart(NamedTuple):
    """One projection of a MergePlan in one layer; ``place``: in its group."""

    place: int
    projection: Projection
    first_a: int
    first_b: int
    rank: int
    scale: float


@dataclasses.dataclass(frozen=True)
class SampledRows:
    """The last layer goes on after its attention with the rows of ``sample_index`` alone, ``lora`` their plan:
    nothing reads what the others would give."""

    lora: Any | None


class ColdProducts(Protocol):
    """What is computed beside the device, of rows whose adapters are on their way."""

    def post(self, x: torch.Tensor, group: ProjectionGroup) -> bool:
        """Begin with the rows' products; whether there are any."""

    def add(self, y: torch.Tensor, group: ProjectionGroup) -> None:
        """Wait for what was begun last, and add it to y ``[T, sum(out)]`` in place."""


@dataclasses.dataclass(frozen=True)
class StepBatch:
    """All tensors that one forward pass reads, on the device.

    token_ids, positions, slots: int64 [T]; ``slots`` = page * page_tokens + offset, where a token's K and V go.
    A negative slot (padding of a captured batch, on CUDA only): nothing is stored.
    sample_index: int64 [M], the tokens whose logits are wanted. Plans are opaque to models.
    head: the plan of those tokens at the output head; None: no adapter changes it there.
    before_layer: called with each layer's number before its first operation; None: nothing is to be waited for.
    cold: where something computes adapters' products beside the device; ``lora`` is the plan of the other rows
    and ``sampled`` None then.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sample_index: torch.Tensor
    attention: Any
    lora: Any | None
    head: Any | None = None
    sampled: SampledRows | None = None
    before_layer: Callable[[int], None] | None = None
    cold: ColdProducts | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Rotary:
    """cos, sin: float32 ``[max_positions, head_dim / 2]``, one pair shared by all layers."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMSNorm of each head of q and of k (Qwen3): weights ``[head_dim]``."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class Summands(NamedTuple):
    """A linear's result in two parts, ``[T, out]`` each: the product, and what adapters add to it. None: nothing,
    or it is in the product already."""

    product: torch.Tensor
    adapted: torch.Tensor | None = None

    @property
    def whole(self) -> torch.Tensor:
        return self.product if self.adapted is None else self.product + self.adapted

    def of(self, rows: torch.Tensor) -> Summands:
        """The summands of these rows, int64 [M]."""
        return Summands(self.product[rows], None if self.adapted is None else self.adapted[rows])


class Shrunk(NamedTuple):
    """What ``Ops.lora_shrink`` gives: ``values``, contiguous, whose sum over the ranks is the shrunk batch
    where each rank multiplies a part of the input; ``parts`` say where in it what lies."""

    values: torch.Tensor
    parts: Any


@dataclasses.dataclass(frozen=True, eq=False)
class LoraSite:
    """Where adapters act: on the group's projections in this layer."""

    group: ProjectionGroup
    layer: int


@dataclasses.dataclass(frozen=True, eq=False)
class AdaptedLinear(LoraSite):
    """A fused linear, weight ``[sum(out), in]``, that adapters may be on."""

    weight: Weight
    bias: torch.Tensor | None


class LoraStep(NamedTuple):
    """What LoRA reads in a step: the pool with the adapters' pages, and whose tokens have which. Plan None: no
    token has an adapter."""

    pool: torch.Tensor
    plan: Any | None


def of_adapters(pool: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The pool's memory as elements of the adapters' dtype; a view."""
    return pool if pool.dtype == dtype else pool.view(dtype)


class Side(Protocol):
    """Where something may run beside what a device is told next."""

    def fork(self) -> None:
        """What is issued in ``use`` from now on waits for all that was issued before, and for nothing later."""

    def use(self) -> contextlib.AbstractContextManager[object]:
        """What is issued meanwhile may run beside all that is issued between ``fork`` and ``join``."""

    def join(self) -> None:
        """What is issued from now on waits for all that was issued in ``use``."""


class InLine:
    """``Side`` where there is none: everything runs in the order in which it is issued."""

    def fork(self) -> None:
        return

    def use(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def join(self) -> None:
        return


IN_LINE = InLine()


# ---------------------------------------------------------------- the table of copies in groups of layers

BRING_PROGRAMS = 16
"""More move no more over PCIe (docs/decisions.md), and take more of the device from its steps."""

MOST_WORDS = 1024
"""Of a table: head, groups, pages."""

HEAD, PER_GROUP = 4, 2


def table_words(num_groups: int, num_pages: int) -> int:
    """int64 numbers of a table."""
    return HEAD + PER_GROUP * num_groups + 2 * num_pages


def bring_table(
    number: int, groups: Sequence[tuple[int, int]], targets: Sequence[int], sources: Sequence[int]
) -> list[int]:
    """int64 [``table_words``]: its length, pages, groups, the number to write; for each group where it begins
    within a page, and its length there; for each page where it begins in the target, and for each where in the
    source."""
    head = (table_words(len(groups), len(targets)), len(targets), len(groups), number)
    return [*head, *itertools.chain.from_iterable(groups), *targets, *sources]


# ---------------------------------------------------------------- the operations


class Ops(abc.ABC):
    """Device operations. ``pool`` is always ``[num_pages, layers, 2, page_tokens, kv_heads, head_dim]``.

    Its dtype is that of keys and values. Adapters in its pages have the dtype of x. What a device does no
    better than by other operations is composed of these here.
    """

    name: str

    captures = False
    """Whether launches with plans that have a room depend on that room alone, so that a graph may hold them."""

    waits = False
    """Whether kernels wait on the device: ``pass_gate``, ``await_words``."""

    brings = False
    """Whether a kernel copies pages in groups of layers: ``bring_groups``."""

    def close(self) -> None:
        """End what goes on beside the steps. Idempotent; with no step in flight."""
        return

    @abc.abstractmethod
    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """x ``[T, in]`` times weight ``[out, in]`` transposed, plus bias ``[out]``, rounded once."""

    # ---- attention -------------------------------------------------------------------------------------

    @abc.abstractmethod
    def attention_plan(
        self, page: PageShape, device: torch.device, room: AttentionRoom | None = None
    ) -> AttentionPlan:
        """A plan to be filled for each step, of all layers. ``room``: as it is captured; None: for any step."""

    def plan_attention(self, rows: AttentionRows, page: PageShape, device: torch.device) -> Any:
        """A plan of this step alone."""
        plan = self.attention_plan(page, device)
        plan.fill(rows)
        return plan

    @abc.abstractmethod
    def write_kv(
        self, pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Store k, v ``[T, kv_heads, head_dim]`` at ``slots`` of the layer."""

    @abc.abstractmethod
    def attention(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        plan: Any,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention of q ``[T, heads, head_dim]`` over the rows' pages (this step's K, V are already
        written); ``window``: a query at position p sees positions > p - window. ``soft_cap`` (above 0): a score s
        becomes soft_cap * tanh(s / soft_cap). Returns [T, heads*head_dim]."""

    # ---- LoRA ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def lora_plan(
        self, geometry: AdapterGeometry, device: torch.device, room: LoraRoom | None = None
    ) -> LoraPlan:
        """A plan to be filled, as ``attention_plan``."""

    def plan_lora(
        self, segments: LoraSegments, geometry: AdapterGeometry, device: torch.device
    ) -> Any | None:
        """A plan of these segments alone; None where there are none."""
        if len(segments.start) == 0:
            return None
        plan = self.lora_plan(geometry, device)
        plan.fill(segments, int(segments.start[-1] + segments.length[-1]))
        return plan

    @abc.abstractmethod
    def lora_shrink(self, x: torch.Tensor, site: LoraSite, step: LoraStep) -> Shrunk:
        """The first half of ``lora``: x A of every projection of the group, as ``lora_expand`` of the same
        plan takes it. Between the two, ranks whose inputs are parts of one add up ``values``."""

    @abc.abstractmethod
    def lora_expand(self, y: torch.Tensor, shrunk: Shrunk, site: LoraSite, step: LoraStep) -> None:
        """The second half, in place: y[t, columns of p] += (x[t] A_p) B_p, scaled. y may be some of the
        columns of a contiguous tensor."""

    def lora(self, y: torch.Tensor, x: torch.Tensor, site: LoraSite, step: LoraStep) -> None:
        """In place: y[t, columns of p] += scale_p * (x[t] A_p) B_p for every projection p of the site, with
        t's adapter. x ``[T, in]``, y ``[T, sum(out)]``, both contiguous in the last dimension."""
        self.lora_expand(y, self.lora_shrink(x, site, step), site, step)

    def lora_side(self, plan: Any) -> Side:
        """Where the base's product may run, beside ``lora_shrink`` of this plan and what ranks do with it."""
        return IN_LINE

    def lora_summands(self, x: torch.Tensor, linear: AdaptedLinear, step: LoraStep) -> Summands:
        """``linear`` of a group's projections side by side, and ``lora`` in it or beside it, whatever is fastest;
        ``[T, sum(out)]``."""
        y = self.linear(x, linear.weight, linear.bias)
        if step.plan is not None:
            self.lora(y, x, linear, step)
        return Summands(y)

    def lora_gated(
        self, x: torch.Tensor, linear: AdaptedLinear, step: LoraStep, activation: Activation = "silu"
    ) -> torch.Tensor:
        """``gate_mul`` of ``lora_summands``, whose group is gate and up; ``[T, I]``."""
        return self.gate_mul(self.lora_summands(x, linear, step).whole, activation)

    @abc.abstractmethod
    def merge_linears(
        self, layers: Sequence[MergedLayer], pool: torch.Tensor, group: ProjectionGroup, plan: MergePlan
    ) -> None:
        """In place, in every layer: the rows of ``merged`` of each projection p of the group that the plan wants
        become ``pristine + scale_p * B_p^T A_p``, summed in float32 and rounded once. Waits for nothing."""

    # ---- small operations ------------------------------------------------------------------------------

    @abc.abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last dimension, variance in float32, as transformers' LlamaRMSNorm: rounded before the
        weight is applied. A float32 weight of 16-bit x is applied before: Gemma's."""

    @abc.abstractmethod
    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        adapted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual); may reuse its arguments' memory. ``adapted``: of the summands
        ``[T, hidden]`` that x is the product of."""

    @abc.abstractmethod
    def gate_mul(self, gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
        """activation(gate) * up for ``[T, 2 * I]`` with gate first; returns ``[T, I]``."""

    def rotate_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        rotary: Rotary,
        positions: torch.Tensor,
        slots: torch.Tensor,
        norm: HeadNorm | None,
        adapted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``rms_norm`` of the heads of q ``[T, heads, D]`` and k ``[T, kv_heads, D]`` where ``norm`` is given, a
        rotation by ``rotary`` at ``positions`` (two halves, not interleaved), and ``write_kv``, in this order and
        each rounded. Returns the turned q; may work in place on q and k. ``adapted``: of the summands
        ``[T, (heads + 2 kv_heads) * D]`` that q, k and v side by side are the product of."""
        if adapted is not None:
            heads = adapted.view(len(q), -1, q.shape[-1])
            of_q, of_k, of_v = heads.split_with_sizes([q.shape[1], k.shape[1], v.shape[1]], dim=1)
            q, k, v = q + of_q, k + of_k, v + of_v
        if norm is not None:
            q, k = self.rms_norm(q, norm.query, norm.eps), self.rms_norm(k, norm.key, norm.eps)
        q, k = self._rope(q, k, rotary.cos, rotary.sin, positions)
        self.write_kv(pool, layer, k, v, slots)
        return q

    def _rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotation of ``rotate_and_store`` where that is composed; may work in place."""
        raise NotImplementedError

    # ---- what not every device has ---------------------------------------------------------------------

    def pass_gate(
        self, landed: torch.Tensor, wanted: torch.Tensor, told: torch.Tensor, is_first: bool
    ) -> None:
        """What is issued after it begins once ``landed`` [1] is at least ``wanted[1]``, or the step's gates were
        shut for ``wanted[0]`` nanoseconds. ``told`` [2]: for how many they were, and 1 where that was too long;
        the first gate begins it anew. All int64."""
        raise NotImplementedError

    def await_words(
        self, words: torch.Tensor, wanted: torch.Tensor, told: torch.Tensor, is_first: bool
    ) -> None:
        """What is issued after it begins once each of ``words[:, 0]``, which others write, is at least
        ``wanted[1:]``, or the step's waits have lasted ``wanted[0]`` nanoseconds. ``told`` [2]: how long they
        have, and 1 where that was too long; the first wait begins it anew. All int64; words in pinned memory."""
        raise NotImplementedError

    def bring_groups(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        table: torch.Tensor,
        scratch: torch.Tensor,
        words: torch.Tensor,
        done: torch.Tensor,
    ) -> None:
        """Copy pages of ``source``, pinned, to ``target``, both int64 and flat.

        ``table``, pinned too: see ``bring_table``. ``words`` int64 [G], of any stride: a group's is written once
        it and all before it have landed. ``scratch`` int64 [BRING_PROGRAMS, MOST_WORDS]; ``done`` int32 [G],
        zeros.
        """
        raise NotImplementedError
