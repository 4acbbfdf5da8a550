"""The operations on CUDA devices: launches of the Triton kernels beside this file.

Owns: block sizes and grids. No call here waits for the device or copies to it, save the two ``plan_*``, which
send their tables in one asynchronous copy each; so everything between them can be captured in a CUDA graph.
"""

from __future__ import annotations

import math

import torch
import triton

from manylora.kernels.ops import AttentionRows, LoraSegments
from manylora.kernels.shapes import AdapterGeometry, PageShape, ProjectionGroup
from manylora.kernels.triton.attention import attend_kernel, combine_kernel
from manylora.kernels.triton.elementwise import (
    rms_norm_kernel,
    rope_kernel,
    silu_mul_kernel,
    write_kv_kernel,
)
from manylora.kernels.triton.lora import expand_kernel, shrink_kernel
from manylora.kernels.triton.plans import (
    AttentionTiles,
    TritonAttentionPlan,
    TritonLoraPlan,
    attention_plan,
    lora_plan,
    power_of_two,
)

# Programs that keep a large GPU busy: 4 on each of 132 multiprocessors.
BUSY_PROGRAMS = 528


def precision(dtype: torch.dtype) -> str:
    """float32 products are exact (no TF32): tests ask for token-for-token equality."""
    return "ieee" if dtype == torch.float32 else "tf32"


def flat_heads(x: torch.Tensor) -> torch.Tensor:
    """x ``[T, heads, D]`` with each token's heads side by side: itself, or a copy where it must be."""
    if x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    return x.contiguous()


class TritonOps:
    """The Ops protocol on CUDA (or, under TRITON_INTERPRET=1, on the CPU), in float32, bfloat16, float16."""

    name = "triton"

    def __init__(self, programs: int = BUSY_PROGRAMS) -> None:
        self._programs = programs

    # ---- attention -------------------------------------------------------------------------------------

    def plan_attention(
        self, rows: AttentionRows, page: PageShape, device: torch.device
    ) -> TritonAttentionPlan:
        return attention_plan(rows, page, device, self._programs)

    def write_kv(
        self, pool: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        page_tokens, kv_heads, dim = pool.shape[3:]
        if len(slots) == 0:
            return
        k, v = flat_heads(k), flat_heads(v)
        write_kv_kernel[(len(slots),)](
            k,
            v,
            pool,
            slots,
            k.stride(0),
            v.stride(0),
            layer * pool.stride(1),
            pool.stride(2),
            pool.stride(0),
            PAGE_TOKENS=page_tokens,
            WIDTH=kv_heads * dim,
            BLOCK=power_of_two(kv_heads * dim),
        )

    def attention(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        plan: TritonAttentionPlan,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        num_tokens, heads, dim = q.shape
        q = flat_heads(q)
        # Tokens of no row (padding of a captured batch) must not carry NaN onwards.
        fresh = torch.empty if plan.num_tokens == num_tokens else torch.zeros
        out = fresh((num_tokens, heads * dim), dtype=q.dtype, device=q.device)
        for tiles in plan.tiles:
            self._attend(q, pool, layer, plan.page_table, tiles, scale, window, out)
        return out

    @staticmethod
    def _attend(
        q: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        page_table: torch.Tensor,
        tiles: AttentionTiles,
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
        wanted = 16 if tiles.tile == 1 or exact else (128 if narrow else 64)
        block_q = min(tiles.tile, max(1, wanted // heads_padded))
        block_m = max(16, block_q * heads_padded)
        final = tiles.splits == 1
        partial = statistics = out
        if not final:
            shape = (tiles.splits, num_tokens, num_heads)
            partial = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
            statistics = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
        attend_kernel[(tiles.num_tiles * (tiles.tile // block_q), kv_heads, tiles.splits)](
            q,
            pool,
            page_table,
            tiles.records,
            out,
            partial,
            statistics,
            q.stride(0),
            num_tokens,
            num_heads,
            layer * pool.stride(1),
            pool.stride(2),
            pool.stride(0),
            pool.stride(3),
            tiles.chunk,
            scale * math.log2(math.e),
            window or 0,
            HEADS=heads,
            HEADS_PADDED=heads_padded,
            DIM=dim,
            DIM_PADDED=dim_padded,
            PAGE_TOKENS=page_tokens,
            TILE=tiles.tile,
            BLOCK_Q=block_q,
            BLOCK_M=block_m,
            BLOCK_N=64 if narrow else 16 if exact else 32,
            WINDOWED=window is not None,
            FINAL=final,
            PRECISION=precision(q.dtype),
            num_warps=8 if block_m >= 128 else 4,
            num_stages=3 if narrow else 2,
        )
        if not final:
            combine_kernel[(tiles.num_tiles * tiles.tile, num_heads)](
                out,
                partial,
                statistics,
                tiles.records,
                num_tokens,
                num_heads,
                tiles.chunk,
                window or 0,
                DIM=dim,
                DIM_PADDED=dim_padded,
                TILE=tiles.tile,
                BLOCK_Q=block_q,
                WINDOWED=window is not None,
                num_warps=1,
            )

    # ---- LoRA ------------------------------------------------------------------------------------------

    def plan_lora(
        self, segments: LoraSegments, geometry: AdapterGeometry, device: torch.device
    ) -> TritonLoraPlan | None:
        if len(segments.start) == 0:
            return None
        return lora_plan(segments, geometry, device, self._programs)

    def lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: TritonLoraPlan,
    ) -> None:
        shape = plan.groups[group.name]
        num_tokens = x.shape[0]
        planes = (shape.splits, num_tokens, shape.num_slots)
        partial = torch.empty(planes, dtype=torch.float32, device=x.device)
        layer_offset = layer * plan.geometry.page.slab_elements
        common = {
            "PROJECTIONS": shape.projections,
            "CELL": plan.geometry.cell_elements,
            "ALIGN": plan.align,
            "BLOCK_T": plan.block_t,
            "BLOCK_R": shape.block_r,
            "VECTOR": plan.vector,
            "MATRIX": plan.matrix,
            "PRECISION": precision(x.dtype),
        }
        shrink_kernel[(plan.num_tiles, shape.projections * shape.rank_blocks, shape.splits)](
            x,
            pool,
            plan.cells,
            shape.records,
            partial,
            x.stride(0),
            num_tokens,
            shape.num_slots,
            layer_offset,
            shape.rank_blocks,
            group.in_features,
            plan.geometry.cells(group.in_features),
            BLOCK_K=shape.block_k,
            STEPS=shape.steps,
            **common,
        )
        expand_kernel[(shape.projections * shape.column_blocks, plan.num_tiles)](
            y,
            pool,
            plan.cells,
            shape.records,
            plan.scales,
            partial,
            y.stride(0),
            num_tokens,
            shape.num_slots,
            layer_offset,
            layer,
            plan.num_layers,
            shape.column_blocks,
            OUT_ALIGN=shape.out_align,
            BLOCK_N=shape.block_n,
            SPLITS=shape.splits,
            SPLITS_PADDED=power_of_two(shape.splits),
            **common,
        )

    # ---- small operations ------------------------------------------------------------------------------

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual.contiguous()
        return self._norm(x, residual, weight, eps), residual

    @staticmethod
    def _norm(
        x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        size = x.shape[-1]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.stride(-1) != 1 or x.dim() > 3 or residual is not None:
            x = x.reshape(-1, size).contiguous()
        rows = x.numel() // size
        if rows:
            rms_norm_kernel[(rows,)](
                x,
                out if residual is None else residual,
                weight,
                out,
                x.shape[1] if x.dim() == 3 else 1,
                x.stride(0),
                x.stride(1) if x.dim() == 3 else 0,
                size,
                eps,
                ADD=residual is not None,
                BLOCK=power_of_two(size),
                num_warps=8 if size > 4096 else 4 if size > 256 else 1,
            )
        return out

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = flat_heads(q), flat_heads(k)
        heads, kv_heads, half = q.shape[1], k.shape[1], q.shape[2] // 2
        block = min(8, power_of_two(heads))
        if len(positions):
            rope_kernel[(len(positions), triton.cdiv(heads, block) + triton.cdiv(kv_heads, block))](
                q,
                k,
                cos,
                sin,
                positions,
                q.stride(0),
                k.stride(0),
                HEADS=heads,
                KV_HEADS=kv_heads,
                HALF=half,
                BLOCK_HEADS=block,
                BLOCK_HALF=power_of_two(half),
            )
        return q, k

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        size = gate_up.shape[-1] // 2
        out = torch.empty((gate_up.shape[0], size), dtype=gate_up.dtype, device=gate_up.device)
        block = min(1024, power_of_two(size))
        if gate_up.shape[0]:
            silu_mul_kernel[(gate_up.shape[0], triton.cdiv(size, block))](
                gate_up, out, gate_up.stride(0), size, BLOCK=block
            )
        return out
