"""Declares the operations that a decoder needs from a device, and the inputs that they share in a step.

Each kind of device has its subclass of Ops: ``cpu`` (compiled loops and torch), ``triton`` (CUDA). Once a
step, the executor describes the batch in numpy arrays on the host (AttentionRows, LoraSegments). An
implementation fills its plans from them, in whatever form its kernels read, and all layers of the step use
these plans.
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
    """A matrix ``data`` ``[out, in]`` of the base model. ``version`` counts its rewrites.

    The memory stays the same for the weight's whole life: captured graphs hold its address, and operations
    read it anew at every call. An operation that caches a result derived from the numbers keeps the version
    beside it.
    """

    data: torch.Tensor
    version: int = 0

    def plain(self) -> torch.Tensor | None:
        """Return the matrix, in the dtype of the activations. Return None where it is stored in another form,
        into which no adapter can be merged."""
        return self.data

    def rewrite(self, data: torch.Tensor) -> None:
        """Overwrite the weight with these numbers, in order with the device's other work. For its owner only.

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
        """Lend the memory to its owner for writing, in order with the device's other work. The version rises
        afterwards, even where the writing has failed."""
        try:
            yield self.data
        finally:
            self.version += 1


@dataclasses.dataclass(frozen=True)
class AttentionRows:
    """The R rows (one for each scheduled sequence) of a flat batch of T tokens, in batch order.

    ``query_start`` int32 [R+1]: row i's tokens are ``[query_start[i], query_start[i+1])``.
    ``kv_len`` int32 [R]: the context length after this step, with this step's tokens. The row's first query
    is at position ``kv_len - num_queries``.
    ``page_table`` int32 [R, W]: page ids. Entries past ``ceil(kv_len / page_tokens)`` are arbitrary
    valid ids, and the pages' contents must not be used.
    """

    query_start: np.ndarray
    kv_len: np.ndarray
    page_table: np.ndarray


@dataclasses.dataclass(frozen=True)
class LoraSegments:
    """The S runs of neighbouring tokens of a batch that share an adapter.

    Tokens in no segment are computed with the weights alone: by the base model, or by the merged adapter.
    P counts projections in the order of AdapterGeometry.projections, and L counts layers.

    ``start``, ``length`` int32 [S]: token ranges of the flat batch, ascending, disjoint.
    ``records`` int64 [S, P, 3]: where in ``cells`` the adapter's A begins, where its B begins, and its rank;
    rank 0: not adapted.
    ``scales`` float32 [S, P, L]: lora_alpha / r, or rsLoRA's lora_alpha / sqrt(r); finite.
    ``cells`` int64, on the device, shared by all steps: for each cell, at how many adapter elements into the
    pool it begins in *layer 0*, a multiple of ``geometry.alignment``. In layer l, it begins
    ``l * geometry.slab_elements`` further on.

    Row j of A takes the ``n = geometry.cells(in_features)`` entries of ``cells`` from where A begins, plus
    ``j * n``. B is stored transposed, as rows of length ``out_features``, which are placed in the same way.
    """

    start: np.ndarray
    length: np.ndarray
    records: np.ndarray
    scales: np.ndarray
    cells: torch.Tensor

    def part(self, first: int, end: int) -> LoraSegments:
        """Return the segments with projections ``first`` to ``end - 1`` alone."""
        records, scales = (np.ascontiguousarray(array[:, first:end]) for array in (self.records, self.scales))
        return dataclasses.replace(self, records=records, scales=scales)

    def of_tokens(self, tokens: np.ndarray) -> LoraSegments | None:
        """Return the segments of a batch of these tokens alone, ascending int [M]. Return None where no token
        among them has an adapter."""
        segment = np.searchsorted(self.start, tokens, side="right") - 1
        ends = np.append(self.start + self.length, 0)  # -1: before all segments
        adapted = np.flatnonzero(tokens < ends[segment])
        if len(adapted) == 0:
            return None
        kept, first, count = np.unique(segment[adapted], return_index=True, return_counts=True)
        start, length = adapted[first].astype(np.int32), count.astype(np.int32)
        return LoraSegments(start, length, self.records[kept], self.scales[kept], self.cells)


def no_segments(geometry: AdapterGeometry, cells: torch.Tensor) -> LoraSegments:
    """Return the segments of a batch in which no token has an adapter."""
    projections, layers = len(geometry.projections), geometry.page.layers
    empty = np.zeros(0, dtype=np.int32)
    records = np.zeros((0, projections, 3), dtype=np.int64)
    return LoraSegments(empty, empty, records, np.zeros((0, projections, layers), dtype=np.float32), cells)


class AttentionLimits(NamedTuple):
    """The largest step that a plan has room for: its tokens, rows, and tokens of a context. With as many rows
    as tokens, every row has one token."""

    num_tokens: int
    num_rows: int
    max_context: int


class LoraLimits(NamedTuple):
    """The largest step that a plan has room for: its tokens, rows, and an adapter's rank. With as many rows
    as tokens, every row has one token. ``cells``: as in LoraSegments; must not move while the plan is
    used."""

    num_tokens: int
    num_rows: int
    max_rank: int
    cells: torch.Tensor


class Scores(NamedTuple):
    """How a layer scores keys. ``scale``: the factor of products. ``window``: a query at position p sees
    positions above p - window; None: no such limit. ``soft_cap`` (above 0): a score s becomes
    soft_cap * tanh(s / soft_cap); None: no cap."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None


class AttentionPlan(Protocol):
    """A step's rows, in the form in which ``Ops.attention`` reads them."""

    def fill(self, rows: AttentionRows) -> None:
        """Point the plan at a step's rows.

        Does not wait for the device, and does not disturb steps in flight. Attention writes zeros for tokens
        past the last row. Raises ValueError where the plan has no room for the rows.
        """


class LoraPlan(Protocol):
    """A step's segments, in the form in which the LoRA operations read them."""

    def fill(self, segments: LoraSegments | None, num_tokens: int) -> None:
        """Point the plan at the segments of a batch of ``num_tokens``; None: no token has an adapter.

        Does not wait for the device, and does not disturb steps in flight. Raises ValueError where the plan
        has no room for the segments.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class MergePlan:
    """One pass over the base's weights that merges an adapter: which projections it writes, and the adapter.

    ``wanted`` bool [P]: the projections that are written; the others stay as they are.
    ``records`` int64 [P, 3], ``scales`` float32 [P, L]: the adapter's, as of one segment in LoraSegments.
    Rank 0: the projection becomes the pristine one, bit for bit. ``cells``: as in LoraSegments.
    """

    wanted: np.ndarray
    records: np.ndarray
    scales: np.ndarray
    cells: torch.Tensor
    geometry: AdapterGeometry

    def parts(self, group: ProjectionGroup, layer: int) -> list[MergePart]:
        """Return the group's projections that are written, with the adapter's cells and scale in this
        layer."""
        found = []
        for place, projection in enumerate(group.projections):
            index = self.geometry.projections.index(projection)
            if self.wanted[index]:
                first_a, first_b, rank = self.records[index].tolist()
                scale = float(self.scales[index, layer])
                found.append(MergePart(place, projection, first_a, first_b, rank, scale))
        return found


class MergedLayer(NamedTuple):
    """A fused linear into which an adapter is merged. ``merged`` is written from ``pristine``; both are
    ``[sum(out), in]``, contiguous, of the adapter's dtype, and may be the same memory."""

    layer: int
    merged: torch.Tensor
    pristine: torch.Tensor


class MergePart(NamedTuple):
    """One projection of a MergePlan in one layer. ``place``: its index in its group. ``first_a``,
    ``first_b``: positions in the plan's ``cells``."""

    place: int
    projection: Projection
    first_a: int
    first_b: int
    rank: int
    scale: float


@dataclasses.dataclass(frozen=True)
class SampledRows:
    """A mark that the last layer, after its attention, computes the rows of ``sample_index`` alone, because
    nothing reads the others' results. ``lora``: the LoRA plan of these rows; None: they have no adapter."""

    lora: Any | None


class ColdProducts(Protocol):
    """The LoRA products of cold rows, computed beside the device while their adapters are being copied."""

    def post(self, x: torch.Tensor, group: ProjectionGroup) -> bool:
        """Begin the cold rows' products of the group, from x ``[T, in]``. Return whether there are any."""

    def add(self, y: torch.Tensor, group: ProjectionGroup) -> None:
        """Wait for the products that were begun last, and add them to y ``[T, sum(out)]`` in place."""


@dataclasses.dataclass(frozen=True)
class StepBatch:
    """The inputs of one forward pass over T tokens: tensors on the device, and the plans of its operations.

    ``token_ids`` int64 [T]. ``positions`` int64 [T]: the tokens' rows in the tables of positions.
    ``slots`` int64 [T]: where each token's K and V are stored, page * page_tokens + offset. Nothing is stored
    for a negative slot, which only padding of a captured batch has, on CUDA only.
    ``sample_index`` int64 [M]: the tokens whose logits are wanted.
    ``attention``, ``lora``: the plans of the batch's rows and segments, which models only pass on. ``lora``
    None: no adapter changes the layers.
    ``head``: the LoRA plan of the tokens of ``sample_index`` at the output head; None: no adapter changes it.
    ``sampled``: given where the last layer may leave the other tokens out.
    ``before_layer``: called with each layer's number before its first operation; None: no layer has to wait.
    ``cold``: given where the products of cold rows are computed beside the device. Then ``lora`` is the plan
    of the other rows, and ``sampled`` is None.
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
    """The tables of a rotary embedding, float32 ``[max_positions, head_dim / 2]``. Layers with the same
    configuration share them."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class HeadNorm:
    """The RMSNorm of each head of q and of k (Qwen3), with weights ``[head_dim]``."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class Summands(NamedTuple):
    """A linear's result as two summands ``[T, out]``: the base's product, and the adapters' update.
    ``adapted`` None: there is no update, or the product includes it."""

    product: torch.Tensor
    adapted: torch.Tensor | None = None

    @property
    def whole(self) -> torch.Tensor:
        return self.product if self.adapted is None else self.product + self.adapted

    def of(self, rows: torch.Tensor) -> Summands:
        """Return the summands of these rows, int64 [M]."""
        return Summands(self.product[rows], None if self.adapted is None else self.adapted[rows])


class Shrunk(NamedTuple):
    """The result of ``Ops.lora_shrink``: contiguous ``values``, and how they are divided into ``parts``,
    which only ``lora_expand`` reads. Ranks that multiply parts of one input add up their ``values``."""

    values: torch.Tensor
    parts: Any


@dataclasses.dataclass(frozen=True, eq=False)
class LoraSite:
    """A place where adapters act: a group's projections in one layer."""

    group: ProjectionGroup
    layer: int


@dataclasses.dataclass(frozen=True, eq=False)
class AdaptedLinear(LoraSite):
    """A fused linear, weight ``[sum(out), in]`` and bias ``[sum(out)]``, that adapters may change."""

    weight: Weight
    bias: torch.Tensor | None


class LoraStep(NamedTuple):
    """The inputs of LoRA in a step: the pool with the adapters' pages, and the plan that assigns adapters to
    tokens. ``plan`` None: no token has an adapter."""

    pool: torch.Tensor
    plan: Any | None


def of_adapters(pool: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a view of the pool as elements of the adapters' ``dtype``."""
    return pool if pool.dtype == dtype else pool.view(dtype)


class Side(Protocol):
    """A second stream of a device's work, which may run beside the main stream."""

    def fork(self) -> None:
        """Make later work in ``use`` wait for all work issued so far, and for no work issued afterwards."""

    def use(self) -> contextlib.AbstractContextManager[object]:
        """Return a context. Work issued in it may run beside the main stream's work up to ``join``."""

    def join(self) -> None:
        """Make later work of the main stream wait for all work issued in ``use``."""


class InLine:
    """A ``Side`` without a second stream: all work runs in the order in which it is issued."""

    def fork(self) -> None:
        return

    def use(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def join(self) -> None:
        return


IN_LINE = InLine()


# ---------------------------------------------------------------- the table of copies in groups of layers

BRING_PROGRAMS = 16
"""Programs of the kernel that copies pages. More programs copy no faster over PCIe (docs/decisions.md), and
take more of the device from its steps."""

MOST_WORDS = 1024
"""The most int64 numbers in a table. A power of two, because each program loads the whole table at once."""

HEAD, PER_GROUP = 4, 2
"""The int64 numbers in the head of a table, and those for each group."""


def table_words(num_groups: int, num_pages: int) -> int:
    """Return how many int64 numbers a table has."""
    return HEAD + PER_GROUP * num_groups + 2 * num_pages


def bring_table(
    number: int, groups: Sequence[tuple[int, int]], targets: Sequence[int], sources: Sequence[int]
) -> list[int]:
    """Return the table of a copy, for ``Ops.bring_groups``: ``table_words`` numbers of int64.

    First come the table's length, the numbers of pages and of groups, and the ``number`` to write. Then, for
    each group: where it begins within a page, and its length there. Then where each page begins in the
    target, and where each begins in the source. Places and lengths count int64 elements.
    """
    head = (table_words(len(groups), len(targets)), len(targets), len(groups), number)
    return [*head, *itertools.chain.from_iterable(groups), *targets, *sources]


# ---------------------------------------------------------------- the operations


class Ops(abc.ABC):
    """The operations of a device.

    ``pool`` is always ``[num_pages, layers, 2, page_tokens, kv_heads, head_dim]``, of the dtype of keys and
    values. Adapters in its pages have the dtype of x. This class composes some operations from others; a
    subclass overrides these where its device can do better.
    """

    name: str

    captures = False
    """Whether launches depend on the limits of their plan alone, if it has any, so that a graph may hold
    them."""

    waits = False
    """Whether the device has kernels that wait: ``pass_gate``, ``await_words``."""

    brings = False
    """Whether the device has a kernel that copies pages in groups of layers: ``bring_groups``."""

    def close(self) -> None:
        """End the work that runs beside the steps. May be called again; no step may be in flight."""
        return

    @abc.abstractmethod
    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x ``[T, in]`` times weight ``[out, in]`` transposed, plus bias ``[out]``, rounded once."""

    # ---- attention -------------------------------------------------------------------------------------

    @abc.abstractmethod
    def attention_plan(
        self, page: PageShape, device: torch.device, limits: AttentionLimits | None = None
    ) -> AttentionPlan:
        """Return a plan for all layers, to be filled for each step. ``limits``: the largest step, given where a
        graph captures launches with the plan; None: the plan takes a step of any size."""

    def plan_attention(self, rows: AttentionRows, page: PageShape, device: torch.device) -> Any:
        """Return a new plan, filled with this step's rows."""
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
        self, q: torch.Tensor, pool: torch.Tensor, layer: int, plan: Any, scores: Scores
    ) -> torch.Tensor:
        """Return the causal attention ``[T, heads * head_dim]`` of q ``[T, heads, head_dim]`` over the rows'
        pages, where this step's K and V are stored already."""

    # ---- LoRA ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def lora_plan(
        self, geometry: AdapterGeometry, device: torch.device, limits: LoraLimits | None = None
    ) -> LoraPlan:
        """Return a plan for all layers, to be filled for each step. ``limits``: as in ``attention_plan``."""

    def plan_lora(
        self, segments: LoraSegments, geometry: AdapterGeometry, device: torch.device
    ) -> Any | None:
        """Return a new plan, filled with these segments, or None where there are no segments."""
        if len(segments.start) == 0:
            return None
        plan = self.lora_plan(geometry, device)
        plan.fill(segments, int(segments.start[-1] + segments.length[-1]))
        return plan

    @abc.abstractmethod
    def lora_shrink(self, x: torch.Tensor, site: LoraSite, step: LoraStep) -> Shrunk:
        """Compute the first half of ``lora``: x A of every projection of the group, for ``lora_expand`` with
        the same plan. Between the two halves, ranks that have parts of one input add up ``values``."""

    @abc.abstractmethod
    def lora_expand(self, y: torch.Tensor, shrunk: Shrunk, site: LoraSite, step: LoraStep) -> None:
        """Compute the second half of ``lora``, and add it to y in place. The scale is applied in either half.
        y may be some of the columns of a contiguous tensor."""

    def lora(self, y: torch.Tensor, x: torch.Tensor, site: LoraSite, step: LoraStep) -> None:
        """Add LoRA to y in place: y[t, columns of p] += scale_p * (x[t] A_p) B_p for every projection p of
        the site, with the adapter of token t. x ``[T, in]`` and y ``[T, sum(out)]`` are contiguous in the
        last dimension."""
        self.lora_expand(y, self.lora_shrink(x, site, step), site, step)

    def lora_side(self, plan: Any) -> Side:
        """Return the side on which the base's product may run, beside ``lora_shrink`` with this plan and the
        ranks' exchange of its result."""
        return IN_LINE

    def lora_summands(self, x: torch.Tensor, linear: AdaptedLinear, step: LoraStep) -> Summands:
        """Compute ``linear`` of a group's projections side by side, ``[T, sum(out)]``, with ``lora`` added to
        it or as a second summand, whichever is faster on the device."""
        y = self.linear(x, linear.weight, linear.bias)
        if step.plan is not None:
            self.lora(y, x, linear, step)
        return Summands(y)

    def lora_gated(
        self, x: torch.Tensor, linear: AdaptedLinear, step: LoraStep, activation: Activation = "silu"
    ) -> torch.Tensor:
        """Compute ``gate_mul`` of ``lora_summands``, where the group is gate and up. Returns ``[T, I]``."""
        return self.gate_mul(self.lora_summands(x, linear, step).whole, activation)

    @abc.abstractmethod
    def merge_linears(
        self, layers: Sequence[MergedLayer], pool: torch.Tensor, group: ProjectionGroup, plan: MergePlan
    ) -> None:
        """Merge the plan's adapter in place, in every layer. For each projection p of the group that the plan
        wants, the rows of ``merged`` become ``pristine + scale_p * B_p^T A_p``, summed in float32 and rounded
        once. Does not wait for the device."""

    # ---- small operations ------------------------------------------------------------------------------

    @abc.abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Apply RMSNorm over the last dimension, with the variance in float32. The result is rounded before
        it is multiplied by the weight, as in transformers' LlamaRMSNorm. Where x has 16 bits and the weight
        is float32 (Gemma), it is multiplied first and rounded afterwards."""

    @abc.abstractmethod
    def add_rms_norm(
        self, x: Summands, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (rms_norm(x + residual), x + residual). May reuse its arguments' memory."""

    @abc.abstractmethod
    def gate_mul(self, gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
        """Return activation(gate) * up ``[T, I]`` of ``gate_up`` ``[T, 2 * I]``, whose first half is gate."""

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
        """Rotate q and k, store k and v in the pool, and return the rotated q. May work in place on q and k.

        Takes q ``[T, heads, D]``, k and v ``[T, kv_heads, D]``. Applies, in this order and rounding each
        time: ``rms_norm`` of the heads of q and k where ``norm`` is given; the rotation by ``rotary`` at
        ``positions`` (two halves, not interleaved); ``write_kv``. ``adapted`` ``[T, (heads + 2 kv_heads) *
        D]``: the adapters' update of q, k and v side by side (see Summands), which is added first.
        """
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
        """Return q and k rotated, for the ``rotate_and_store`` of this class; subclasses that override it do
        not need it. May work in place."""
        raise NotImplementedError

    # ---- what not every device has ---------------------------------------------------------------------

    def pass_gate(
        self, landed: torch.Tensor, wanted: torch.Tensor, told: torch.Tensor, is_first: bool
    ) -> None:
        """Make later work wait until the number in ``landed`` [1] is at least ``wanted[1]``.

        The wait ends early once all gates of the step have waited ``wanted[0]`` nanoseconds together.
        ``told`` [2] receives the nanoseconds that they have waited, and 1 where a gate timed out. The first
        gate of a step (``is_first``) resets it. All tensors are int64.
        """
        raise NotImplementedError

    def await_words(
        self, words: torch.Tensor, wanted: torch.Tensor, told: torch.Tensor, is_first: bool
    ) -> None:
        """Make later work wait until each of ``words[:, 0]``, which others write, is at least its number in
        ``wanted[1:]``.

        The wait ends early once all such waits of the step have lasted ``wanted[0]`` nanoseconds together.
        ``told`` [2] receives the nanoseconds that they have lasted, and 1 where a wait timed out. The first
        wait of a step (``is_first``) resets it. All tensors are int64; ``words`` is in pinned memory.
        """
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
        """Copy pages of ``source``, which is pinned, to ``target``, one group of layers after the other.

        Both are int64 and flat. ``table``, also pinned: from ``bring_table``. ``words`` int64 [G], of any
        stride: a group's word receives the table's number once this group and all groups before it have
        landed.
        ``scratch`` int64 [BRING_PROGRAMS, MOST_WORDS]; ``done`` int32 [G], zeros before and after.
        """
        raise NotImplementedError
