"""Attention over the paged pool by our Triton kernel: its launch and block sizes."""

from __future__ import annotations

import dataclasses
import math

import torch

from manylora.kernels.flashinfer_attention import ComingPrompts, PromptAttention
from manylora.kernels.ops import AttentionRows
from manylora.kernels.shapes import PageShape
from manylora.kernels.triton.attention import attend_kernel
from manylora.kernels.triton.attention_plans import (
    TritonAttentionPlan,
    TritonFixedAttention,
    attention_plan,
)
from manylora.kernels.triton.attention_tables import BLOCK_TOKENS
from manylora.kernels.triton.counters import LaunchCounters
from manylora.kernels.triton.decode_table import AttentionTileConfig, DecodeConfig, DecodeTable
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
    captured, if given.
    """

    def __init__(
        self,
        programs: int,
        decoding: DecodeTable | None = None,
        prompts: ComingPrompts | PromptAttention | None = None,
    ) -> None:
        self._programs = programs
        self._decoding = decoding or DecodeTable()
        self._prompts = prompts
        self._counters = LaunchCounters()

    def close(self) -> None:
        """Idempotent."""
        if isinstance(self._prompts, ComingPrompts):
            self._prompts.close()

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
    ) -> TritonFixedAttention:
        return TritonFixedAttention(
            num_rows, max_context, page, device, self._programs, self._decoding, num_tokens
        )

    def __call__(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        plan: TritonAttentionPlan,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> torch.Tensor:
        """Computes ``Ops.attention``. The first call takes memory for counters: not under capture."""
        num_tokens, heads, dim = q.shape
        q = flat_heads(q)
        # Tokens of no row must not carry NaN onwards.
        fresh = torch.empty if plan.num_tokens == num_tokens else torch.zeros
        out = fresh((num_tokens, heads * dim), dtype=q.dtype, device=q.device)
        records, tile = plan.records, plan.tile
        if plan.prompts is not None and plan.prompts.serves(q, scale, window, soft_cap):
            # First: some write what lies between them too.
            plan.prompts.run(q, pool, layer, out)
            records, tile = records[plan.of_prompts :], 1
        if len(records):
            self._attend(q, pool, layer, plan, records, tile, scale, window, soft_cap, out)
        return out

    def _attend(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        plan: TritonAttentionPlan,
        records: torch.Tensor,
        tile: int,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        out: torch.Tensor,
    ) -> None:
        _, num_heads, dim = q.shape
        page_tokens, kv_heads = pool.shape[3:5]
        heads = num_heads // kv_heads
        sizes = _launch_sizes(q.dtype, dim, heads, tile, plan.config, self._decoding.tiles)
        parts = tile // sizes["BLOCK_Q"]
        # Also where nothing is joined: a pointer of another type would be another kernel to compile.
        shape = (max(1, plan.places), num_heads)
        partial = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
        statistics = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
        grid = (len(records) * parts, kv_heads)
        attend_kernel[grid if tile == 1 else grid[::-1]](
            q,
            pool,
            plan.page_table,
            records,
            out,
            partial,
            statistics,
            self._counters.take(plan.counters * parts * kv_heads, q.device),
            q.stride(0),
            layer * pool.stride(1),
            pool.stride(2),
            pool.stride(0),
            pool.stride(3),
            (scale if soft_cap is None else soft_cap) * math.log2(math.e),
            0.0 if soft_cap is None else scale / soft_cap,
            window or 0,
            HEADS=heads,
            HEADS_PADDED=power_of_two(heads),
            DIM=dim,
            DIM_PADDED=max(16, power_of_two(dim)),
            PAGE_TOKENS=page_tokens,
            TILE=tile,
            WINDOWED=window is not None,
            CAPPED=soft_cap is not None,
            PRECISION=precision(q.dtype),
            **sizes,
        )


def _launch_sizes(
    dtype: torch.dtype, dim: int, heads: int, tile: int, config: DecodeConfig, tiles: AttentionTileConfig
) -> dict[str, int]:
    """``attend_kernel``'s, for ``heads`` to a key head; ``config`` and ``tiles`` where they are for such heads."""
    if dim > 128 or dtype == torch.float32:
        # Blocks that fit the registers: float32 products run without tensor cores.
        block, rows = (16, 16) if dtype == torch.float32 else (32, 64)
        config, tiles = DecodeConfig(block, 4, 2), AttentionTileConfig(rows, block, 4, 2, None)
    if BLOCK_TOKENS % config.block_n or BLOCK_TOKENS % tiles.block_n:
        raise ValueError(f"pieces are whole blocks of {BLOCK_TOKENS}: {config} or {tiles} cannot take them")
    sizes = {
        "BLOCK_Q": min(tile, max(1, tiles.rows // power_of_two(heads))),
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "TILE_BLOCK_N": tiles.block_n,
        "TILE_STAGES": tiles.stages,
    }
    if tile == 1:
        return sizes | {"num_warps": config.warps, "num_stages": config.stages}
    limit = {"maxnreg": tiles.registers} if tiles.registers else {}
    return sizes | {"num_warps": tiles.warps, "num_stages": tiles.stages} | limit
