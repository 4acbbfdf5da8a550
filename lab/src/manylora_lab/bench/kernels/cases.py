"""The cases of the small operations, attention and the base products, held against exact results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from manylora.kernels.ops import AttentionLimits, Ops, Rotary, Scores, Summands, Weight
from manylora.kernels.shapes import PageShape
from manylora_lab.bench import rounding
from manylora_lab.bench.kernels.pool import PAGE_TOKENS, pages_of, random_pool
from manylora_lab.bench.kernels.rig import COPIES, Errors, KernelCase, KernelRig, errors
from manylora_lab.bench.kernels.settings import KernelSizes, Queries
from manylora_lab.bench.kernels.timing import Step
from manylora_lab.bench.rounding import Bounded

EPS = 1e-5
MAX_CONTEXT = 4096
"""Longest position, and the context that a captured decoding step is made for, unless a case's own is longer."""


def _each(calls: Sequence[Step]) -> Step:
    def step() -> None:
        for call in calls:
            call()

    return step


def _case(
    rig: KernelRig, kernel: str, setting: dict[str, Any], num_bytes: int, flop: int,
    check: Callable[[], Errors], calls: Sequence[Step],
) -> KernelCase:  # fmt: skip
    return KernelCase(kernel, setting, num_bytes, flop, check, _each(calls), len(calls))


# ---- small operations ----------------------------------------------------------------------------------


def norm_cases(rig: KernelRig, sizes: KernelSizes) -> Iterator[list[KernelCase]]:
    hidden = rig.decoder.hidden
    weight = rig.normal(hidden)

    def case(tokens: int) -> KernelCase:
        inputs = [(rig.normal(tokens, hidden), rig.normal(tokens, hidden)) for _ in range(COPIES)]

        def check() -> Errors:
            x, residual = inputs[0]
            out, total = rig.ops.add_rms_norm(Summands(x.clone()), residual.clone(), weight, EPS)
            # Of the sum as it is stored: the residual stream's rounding is part of the operation.
            normed = rounding.rms_norm(Bounded.given(total), weight, EPS, rig.dtype).rounded(rig.dtype)
            return errors([(out, normed), (total, rounding.added(x, residual))])

        calls = [partial(rig.ops.add_rms_norm, Summands(x), residual, weight, EPS) for x, residual in inputs]
        num_bytes = 4 * inputs[0][0].nbytes + weight.nbytes
        return _case(rig, "add_rms_norm", {"tokens": tokens}, num_bytes, 0, check, calls)

    yield [case(tokens) for tokens in sizes.tokens]


def silu_cases(rig: KernelRig, sizes: KernelSizes) -> Iterator[list[KernelCase]]:
    def case(tokens: int) -> KernelCase:
        inputs = [rig.normal(tokens, 2 * rig.decoder.intermediate) for _ in range(COPIES)]

        def check() -> Errors:
            truth = rounding.silu_mul(Bounded.given(inputs[0]), rig.dtype).rounded(rig.dtype)
            return errors([(rig.ops.gate_mul(inputs[0].clone()), truth)])

        calls = [partial(rig.ops.gate_mul, x) for x in inputs]
        return _case(rig, "silu_mul", {"tokens": tokens}, inputs[0].nbytes * 3 // 2, 0, check, calls)

    yield [case(tokens) for tokens in sizes.tokens]


def _rotary(rig: KernelRig) -> Rotary:
    half = rig.decoder.head_dim // 2
    angles = torch.outer(torch.arange(float(MAX_CONTEXT)), 1e4 ** -(torch.arange(half) / half))
    return Rotary(angles.cos().to(rig.device), angles.sin().to(rig.device))


def placing_cases(rig: KernelRig, sizes: KernelSizes) -> Iterator[list[KernelCase]]:
    decoder, rotary = rig.decoder, _rotary(rig)
    heads = (decoder.heads, decoder.kv_heads, decoder.kv_heads)

    def parts(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of one product's result, as in a decoder layer."""
        split = qkv.split_with_sizes([count * decoder.head_dim for count in heads], dim=-1)
        q, k, v = (part.view(len(qkv), -1, decoder.head_dim) for part in split)
        return q, k, v

    def case(tokens: int) -> KernelCase:
        inputs = [rig.normal(tokens, sum(heads) * decoder.head_dim) for _ in range(COPIES)]
        positions = torch.randint(MAX_CONTEXT, (tokens,), device=rig.device)
        slots = torch.randperm(pages_of(tokens) * PAGE_TOKENS, device=rig.device)[:tokens]

        def check() -> Errors:
            page = PageShape(2, PAGE_TOKENS, decoder.kv_heads, decoder.head_dim, rig.dtype.itemsize)
            pool = random_pool(page, pages_of(tokens), rig.dtype, rig.device)
            given = [Bounded.given(part) for part in parts(inputs[0])]
            # The pool as a whole: where nothing is written it must be as before.
            truth = rounding.rotate_and_store(
                (given[0], given[1], given[2]), pool, 1, rotary, positions, slots, None
            )
            q, k, v = parts(inputs[0].clone())
            out = rig.ops.rotate_and_store(q, k, v, pool, 1, rotary, positions, slots, None)
            return errors(zip((out, pool), truth))

        def call(qkv: torch.Tensor, layer: int) -> object:
            q, k, v = parts(qkv)
            return rig.ops.rotate_and_store(q, k, v, rig.pool, layer, rotary, positions, slots, None)

        calls = [partial(call, qkv, number % rig.layers) for number, qkv in enumerate(inputs)]
        return _case(rig, "rotate_and_store", {"tokens": tokens}, 2 * inputs[0].nbytes, 0, check, calls)

    yield [case(tokens) for tokens in sizes.tokens]


# ---- attention -----------------------------------------------------------------------------------------


class AttentionProblem:
    """Queries of so many rows over pages scattered in the pool, and what comes out exactly.

    ``tokens``: of the step that is padded to so many; 0: as many as the rows have."""

    def __init__(self, rig: KernelRig, queries: Queries, tokens: int = 0) -> None:
        self._rig = rig
        self.queries = queries
        self.rows = rig.rows(queries)
        self._num_tokens = sum(number for number, _ in queries)
        self.tokens = tokens or self._num_tokens
        # Large queries: with small ones every key weighs the same, and it would not show which was read.
        self._q = rig.normal(self.tokens, rig.decoder.heads, rig.decoder.head_dim) * 20

    @property
    def _scores(self) -> Scores:
        return Scores(float(self._rig.decoder.head_dim**-0.5))

    @cached_property
    def _truth(self) -> Bounded:
        """Of the last layer."""
        rig, q = self._rig, self._q[: self._num_tokens]
        exact = rounding.attention(q, rig.pool, rig.layers - 1, self.rows, rig.page, self._scores)
        return exact.rounded(rig.dtype)

    def fixed(self, ops: Ops, num_rows: int, max_context: int) -> Any:
        """The plan that a captured step for so many rows has, where the operations know such."""
        rig = self._rig
        plan = ops.attention_plan(rig.page, rig.device, AttentionLimits(self.tokens, num_rows, max_context))
        plan.fill(self.rows)
        return plan

    def eager(self, ops: Ops) -> Any:
        return ops.plan_attention(self.rows, self._rig.page, self._rig.device)

    def case(self, kernel: str, setting: dict[str, Any], ops: Ops, plan: Any) -> KernelCase:
        rig, decoder, q = self._rig, self._rig.decoder, self._q

        def check() -> Errors:
            out = ops.attention(q.clone(), rig.pool, rig.layers - 1, plan, self._scores)
            padding = out[self._num_tokens :]
            return errors(
                [(out[: self._num_tokens], self._truth), (padding, Bounded.given(torch.zeros_like(padding)))]
            )

        context = sum(context for _, context in self.queries)
        kv_bytes = 2 * context * decoder.kv_heads * decoder.head_dim * rig.dtype.itemsize
        # A query at the end of n others sees all the context but what comes after it.
        seen = sum(n * context - n * (n - 1) // 2 for n, context in self.queries)
        calls = [
            partial(ops.attention, q, rig.pool, layer, plan, self._scores) for layer in range(rig.layers)
        ]
        return _case(
            rig, kernel, setting, kv_bytes + 2 * q.nbytes, 4 * seen * decoder.heads * decoder.head_dim,
            check, calls,
        )  # fmt: skip


def decode_cases(rig: KernelRig, sizes: KernelSizes) -> Iterator[list[KernelCase]]:
    """Cases with the plans that captured steps have."""
    for name, queries in sizes.decode:
        attention = AttentionProblem(rig, queries)
        most = max(MAX_CONTEXT, int(attention.rows.kv_len.max()))
        plan = attention.fixed(rig.ops, len(queries), most)
        yield [attention.case("decode", {"batch": len(queries), "rows": name}, rig.ops, plan)]


def prefill_cases(rig: KernelRig, sizes: KernelSizes) -> Iterator[list[KernelCase]]:
    for name, queries in sizes.prefill:
        attention = AttentionProblem(rig, queries)
        setting = {"batch": len(queries), "rows": name}
        yield [attention.case("prefill", setting, rig.ops, attention.eager(rig.ops))]


# ---- base products -------------------------------------------------------------------------------------


class ProductProblem:
    """So many rows times one of the base model's matrices of each layer, and what comes out exactly."""

    def __init__(self, rig: KernelRig, matrices: Sequence[Weight], batch: int) -> None:
        self._rig = rig
        self.matrices = matrices
        self.outputs, self.inputs = matrices[0].data.shape
        self.x = rig.normal(batch, self.inputs)

    @cached_property
    def _truth(self) -> Bounded:
        return rounding.linear(self.x, self.matrices[-1].data, None).rounded(self._rig.dtype)

    def case(
        self, setting: dict[str, Any], linear: Callable[[torch.Tensor, Weight], torch.Tensor]
    ) -> KernelCase:
        rig, x, inputs, outputs = self._rig, self.x, self.inputs, self.outputs
        num_bytes = (outputs * inputs + len(x) * (outputs + inputs)) * rig.dtype.itemsize
        return _case(
            rig, "linear", setting, num_bytes, 2 * len(x) * outputs * inputs,
            lambda: errors([(linear(x, self.matrices[-1]), self._truth)]),
            [partial(linear, x, matrix) for matrix in self.matrices],
        )  # fmt: skip


def products(rig: KernelRig, batches: Sequence[int]) -> Iterator[tuple[str, ProductProblem]]:
    """Each of the model's products with so many rows, by name."""
    weights = {group.name: [layer[group.name] for layer in rig.weights] for group in rig.groups}
    weights["head"] = [rig.weight(rig.shape.vocab, rig.decoder.hidden)]
    for name, batch in itertools.product(weights, batches):
        yield name, ProductProblem(rig, weights[name], batch)


def linear_cases(rig: KernelRig, sizes: KernelSizes) -> Iterator[list[KernelCase]]:
    for name, product in products(rig, sizes.products):
        setting = {"product": name, "batch": len(product.x)}
        yield [product.case(setting, partial(rig.ops.linear, bias=None))]
