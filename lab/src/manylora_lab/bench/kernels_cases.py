"""The cases of the small operations, attention and the base products, held against exact results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from manylora.executor.fixed import fixed_attention
from manylora.kernels.ops import Rotary
from manylora.kernels.shapes import PageShape
from manylora_lab.bench import rounding
from manylora_lab.bench.interleaved import Step
from manylora_lab.bench.kernels import PAGE_TOKENS, pages_of, random_pool
from manylora_lab.bench.kernels_rig import COPIES, Errors, KernelCase, KernelRig, errors
from manylora_lab.bench.kernels_settings import KernelSizes, Queries
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
            out, total = rig.ops.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
            # Of the sum as it is stored: the residual stream's rounding is part of the operation.
            normed = rounding.rms_norm(Bounded.given(total), weight, EPS, rig.dtype).rounded(rig.dtype)
            return errors([(out, normed), (total, rounding.added(x, residual))])

        calls = [partial(rig.ops.add_rms_norm, x, residual, weight, EPS) for x, residual in inputs]
        num_bytes = 4 * inputs[0][0].nbytes + weight.nbytes
        return _case(rig, "add_rms_norm", {"tokens": tokens}, num_bytes, 0, check, calls)

    yield [case(tokens) for tokens in sizes.tokens]


def silu_cases(rig: KernelRig, sizes: KernelSizes) -> Iterator[list[KernelCase]]:
    def case(tokens: int) -> KernelCase:
        inputs = [rig.normal(tokens, 2 * rig.decoder.intermediate) for _ in range(COPIES)]

        def check() -> Errors:
            truth = rounding.silu_mul(Bounded.given(inputs[0]), rig.dtype).rounded(rig.dtype)
            return errors([(rig.ops.silu_mul(inputs[0].clone()), truth)])

        calls = [partial(rig.ops.silu_mul, x) for x in inputs]
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


def decode_cases(rig: KernelRig, sizes: KernelSizes) -> Iterator[list[KernelCase]]:
    """With the plans that captured steps have, where the operations know such."""
    for name, queries in sizes.decode:
        rows = rig.rows(queries)
        most = max(MAX_CONTEXT, int(rows.kv_len.max()))
        fixed = fixed_attention(rig.ops, len(queries), len(queries), most, rig.page, rig.device)
        fixed.fill(rows)
        yield [_attention(rig, "decode", name, queries, fixed.plan)]


def prefill_cases(rig: KernelRig, sizes: KernelSizes) -> Iterator[list[KernelCase]]:
    for name, queries in sizes.prefill:
        plan = rig.ops.plan_attention(rig.rows(queries), rig.page, rig.device)
        yield [_attention(rig, "prefill", name, queries, plan)]


def _attention(rig: KernelRig, kernel: str, name: str, queries: Queries, plan: Any) -> KernelCase:
    decoder = rig.decoder
    scale = decoder.head_dim**-0.5
    tokens = sum(number for number, _ in queries)
    # Large queries: with small ones every key weighs the same, and it would not show which was read.
    q = rig.normal(tokens, decoder.heads, decoder.head_dim) * 20

    def check() -> Errors:
        layer = rig.layers - 1
        out = rig.ops.attention(q.clone(), rig.pool, layer, plan, scale, None)
        truth = rounding.attention(q, rig.pool, layer, rig.rows(queries), rig.page, scale, None)
        return errors([(out, truth.rounded(rig.dtype))])

    context = sum(context for _, context in queries)
    kv_bytes = 2 * context * decoder.kv_heads * decoder.head_dim * rig.dtype.itemsize
    # A query at the end of n others sees all the context but what comes after it.
    seen = sum(n * context - n * (n - 1) // 2 for n, context in queries)
    calls = [partial(rig.ops.attention, q, rig.pool, layer, plan, scale, None) for layer in range(rig.layers)]
    return _case(
        rig, kernel, {"batch": len(queries), "rows": name}, kv_bytes + 2 * q.nbytes,
        4 * seen * decoder.heads * decoder.head_dim, check, calls,
    )  # fmt: skip


# ---- base products -------------------------------------------------------------------------------------


def linear_cases(rig: KernelRig, sizes: KernelSizes) -> Iterator[list[KernelCase]]:
    names = [group.name for group in rig.groups]
    weights = {name: [layer[name] for layer in rig.weights] for name in names}
    weights["head"] = [rig.weight(rig.shape.vocab, rig.decoder.hidden)]

    def case(batch: int, name: str) -> KernelCase:
        matrices = weights[name]
        outputs, inputs = matrices[0].data.shape
        x = rig.normal(batch, inputs)

        def check() -> Errors:
            out = rig.ops.linear(x, matrices[-1], None)
            return errors([(out, rounding.linear(x, matrices[-1].data, None).rounded(rig.dtype))])

        num_bytes = (outputs * inputs + batch * (outputs + inputs)) * rig.dtype.itemsize
        calls = [partial(rig.ops.linear, x, matrix, None) for matrix in matrices]
        setting = {"product": name, "batch": batch}
        return _case(rig, "linear", setting, num_bytes, 2 * batch * outputs * inputs, check, calls)

    for name, batch in itertools.product(weights, sizes.products):
        yield [case(batch, name)]
