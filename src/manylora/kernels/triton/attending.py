"""Attention over the paged pool by our Triton kernels: launches and block sizes."""

from __future__ import annotations

import dataclasses
import math

import torch

from manylora.kernels.flashinfer_attention import PromptAttention
from manylora.kernels.ops import AttentionRows
from manylora.kernels.shapes import PageShape
from manylora.kernels.triton.attention import attend_kernel, combine_kernel
from manylora.kernels.triton.attention_plans import (
    BLOCK_TOKENS,
    PREFILL_TILE,
    DecodePieces,
    FixedAttention,
    PrefillTiles,
    TritonAttentionPlan,
    attention_plan,
)
from manylora.kernels.triton.counters import Counters
from manylora.kernels.triton.decode import decode_kernel
from manylora.kernels.triton.decode_table import DecodeConfig, DecodeTable
from manylora.kernels.triton.dependent import launch_options
from manylora.kernels.triton.plans import power_of_two


def precision(dtype: torch.dtype) -> str:
    """float32 products are exact (no TF32): tests ask for token-for-token equality."""
    return "ieee" if dtype == torch.float32 else "tf32"


def flat_heads(x: torch.Tensor) -> torch.Tensor:
    """x ``[T, heads, D]`` with each token's heads side by side: itself, or a copy where it must be."""
    if x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    return x.contiguous()


class PagedAttention:
    """Attention on one device. Calls must be ordered on the device: they share counters.

    ``programs``: how many programs keep the device busy. ``prompts``: serves long ones in steps that are not
    captured, if given. ``dependent``: decoding begins while the kernel before it ends.
    """

    def __init__(
        self,
        programs: int,
        decoding: DecodeTable | None = None,
        prompts: PromptAttention | None = None,
        dependent: bool = False,
    ) -> None:
        self._programs = programs
        self._decoding = decoding or DecodeTable()
        self._prompts = prompts
        self._launching = launch_options(dependent)
        self._counters = Counters()

    def plan(self, rows: AttentionRows, page: PageShape, device: torch.device) -> TritonAttentionPlan:
        plan = attention_plan(rows, page, device, self._programs, self._decoding)
        if self._prompts is None:
            return plan
        return dataclasses.replace(plan, prompts=self._prompts.plan(rows, page))

    def fixed(
        self,
        num_rows: int,
        max_context: int,
        page: PageShape,
        device: torch.device,
        num_tokens: int | None = None,
    ) -> FixedAttention:
        return FixedAttention(num_rows, max_context, page, device, self._programs, self._decoding, num_tokens)

    def __call__(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        plan: TritonAttentionPlan,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """As ``Ops.attention``. The first call takes memory for counters: not under capture."""
        num_tokens, heads, dim = q.shape
        q = flat_heads(q)
        # Tokens of no row must not carry NaN onwards.
        fresh = torch.empty if plan.num_tokens == num_tokens else torch.zeros
        out = fresh((num_tokens, heads * dim), dtype=q.dtype, device=q.device)
        # Prompts first: some write what lies between them too.
        if plan.prompts is not None and plan.prompts.serves(q, scale, window):
            plan.prompts.run(q, pool, layer, out)
        elif plan.prefill is not None:
            _prefill(q, pool, layer, plan.page_table, plan.prefill, scale, window, out)
        if plan.decode is not None:
            self._decode(q, pool, layer, plan.page_table, plan.decode, scale, window, out)
        return out

    def _decode(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        page_table: torch.Tensor,
        pieces: DecodePieces,
        scale: float,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        _, num_heads, dim = q.shape
        page_tokens, kv_heads = pool.shape[3:5]
        heads, config = num_heads // kv_heads, pieces.config
        if dim > 128 or q.dtype == torch.float32:
            # Blocks that fit the registers: float32 products run without tensor cores.
            config = DecodeConfig(16 if q.dtype == torch.float32 else 32, 4, 2)
        if BLOCK_TOKENS % config.block_n:
            raise ValueError(f"pieces are whole blocks of {BLOCK_TOKENS}, not of {config.block_n}")
        partial = statistics = out
        if pieces.places:
            shape = (pieces.places, num_heads)
            partial = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
            statistics = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
        decode_kernel[(pieces.num_pieces, kv_heads)](
            q,
            pool,
            page_table,
            pieces.records,
            out,
            partial,
            statistics,
            self._counters.take(pieces.places * kv_heads, q.device),
            q.stride(0),
            layer * pool.stride(1),
            pool.stride(2),
            pool.stride(0),
            pool.stride(3),
            scale * math.log2(math.e),
            window or 0,
            HEADS=heads,
            BLOCK_M=max(16, power_of_two(heads)),
            DIM=dim,
            DIM_PADDED=max(16, power_of_two(dim)),
            PAGE_TOKENS=page_tokens,
            BLOCK_N=config.block_n,
            STAGES=config.stages,
            WINDOWED=window is not None,
            PRECISION=precision(q.dtype),
            num_warps=config.warps,
            num_stages=config.stages,
            **self._launching,
        )


def _prefill(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    tiles: PrefillTiles,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> None:
    num_tokens, num_heads, dim = q.shape
    page_tokens, kv_heads = pool.shape[3:5]
    heads = num_heads // kv_heads
    heads_padded, dim_padded = power_of_two(heads), max(16, power_of_two(dim))
    # Blocks that fit the registers: float32 products run without tensor cores and need the smallest.
    exact = q.dtype == torch.float32
    narrow = not exact and dim_padded <= 128
    wanted = 16 if exact else (128 if narrow else 64)
    block_q = max(1, wanted // heads_padded)
    block_m = max(16, block_q * heads_padded)
    partial = statistics = out
    if tiles.places:
        shape = (tiles.places, num_heads)
        partial = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
        statistics = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
    attend_kernel[(len(tiles.records) * (PREFILL_TILE // block_q), kv_heads)](
        q,
        pool,
        page_table,
        tiles.records,
        tiles.sizes,
        out,
        partial,
        statistics,
        q.stride(0),
        num_heads,
        layer * pool.stride(1),
        pool.stride(2),
        pool.stride(0),
        pool.stride(3),
        scale * math.log2(math.e),
        window or 0,
        HEADS=heads,
        HEADS_PADDED=heads_padded,
        DIM=dim,
        DIM_PADDED=dim_padded,
        PAGE_TOKENS=page_tokens,
        TILE=PREFILL_TILE,
        BLOCK_Q=block_q,
        BLOCK_M=block_m,
        BLOCK_N=64 if narrow else 16 if exact else 32,
        WINDOWED=window is not None,
        PRECISION=precision(q.dtype),
        num_warps=8 if block_m >= 128 else 4,
        num_stages=3 if narrow else 2,
    )
    if tiles.places:
        combine_kernel[(num_tokens, num_heads)](
            out,
            partial,
            statistics,
            tiles.joined,
            tiles.sizes,
            num_heads,
            window or 0,
            DIM=dim,
            DIM_PADDED=dim_padded,
            BLOCK_Q=block_q,
            JOINED=len(tiles.joined),
            WINDOWED=window is not None,
            num_warps=1,
        )
