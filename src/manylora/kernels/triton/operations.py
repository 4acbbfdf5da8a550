"""The operations on CUDA devices: launches of the Triton kernels beside this file.

Owns: block sizes and grids. No call here waits for the device or copies to it, save the two ``plan_*``, which
send their tables in one asynchronous copy each; so everything between them can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton

from manylora.kernels.flashinfer_attention import ComingPrompts, PromptAttention
from manylora.kernels.ops import (
    AttentionRows,
    HeadNorm,
    LoraSegments,
    Rotary,
    Shrunk,
    Side,
    Summands,
)
from manylora.kernels.shapes import Activation, AdapterGeometry, PageShape, ProjectionGroup
from manylora.kernels.triton.attention_plan import (
    PagedAttention,
    TritonAttentionPlan,
    TritonFixedAttention,
    flat_heads,
)
from manylora.kernels.triton.cold import await_words, bring_groups, pass_gate
from manylora.kernels.triton.decode_table import DecodeTable
from manylora.kernels.triton.launch import power_of_two, report_compilation
from manylora.kernels.triton.lora import (
    AdaptedLinears,
    LoraKernels,
    TritonFixedLora,
    gate_mul,
    lora_kernels_on,
)
from manylora.kernels.triton.lora_plan import LoraPlan
from manylora.kernels.triton.merging import merge_linears
from manylora.kernels.triton.products import Products
from manylora.kernels.triton.small import rms_norm_kernel, rotate_and_store_kernel, write_kv_kernel
from manylora.kernels.weight import Weight

# Programs that keep a large GPU busy: 4 on each of 132 multiprocessors.
BUSY_PROGRAMS = 528


class TritonOps:
    """The Ops protocol on CUDA (or, under TRITON_INTERPRET=1, on the CPU), in float32, bfloat16, float16."""

    name = "triton"

    def __init__(
        self,
        programs: int = BUSY_PROGRAMS,
        products: Products | None = None,
        decoding: DecodeTable | None = None,
        prompts: ComingPrompts | PromptAttention | None = None,
        lora: LoraKernels | None = None,
    ) -> None:
        """``decoding``, ``prompts``: of the one model that is served; defaults for any where not given.
        ``lora``: others than those of what is stored for the device.
        """
        report_compilation()
        self._attention = PagedAttention(programs, decoding, prompts)
        self._products = products or Products({}, 1)
        self._lora = lora
        self._linears: AdaptedLinears | None = None

    def close(self) -> None:
        """End what compiles beside the steps. Idempotent; with no step in flight."""
        self._attention.close()

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        return self._products(x, weight, bias)

    # ---- attention -------------------------------------------------------------------------------------

    def plan_attention(
        self, rows: AttentionRows, page: PageShape, device: torch.device
    ) -> TritonAttentionPlan:
        return self._attention.plan(rows, page, device)

    def fixed_attention(
        self,
        num_rows: int,
        max_context: int,
        page: PageShape,
        device: torch.device,
        num_tokens: int | None = None,
    ) -> TritonFixedAttention:
        """A plan for captured steps of at most so many rows: of one token each, or of ``num_tokens`` in all."""
        return self._attention.fixed(num_rows, max_context, page, device, num_tokens)

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
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        return self._attention(q, pool, layer, plan, scale, window, soft_cap)

    # ---- LoRA ------------------------------------------------------------------------------------------

    def _adapted(self, device: torch.device) -> AdaptedLinears:
        """Made for the first device that a plan is asked for; there is only one."""
        if self._linears is None:
            self._linears = AdaptedLinears(self._lora or lora_kernels_on(device), self.linear, device)
        return self._linears

    def plan_lora(
        self, segments: LoraSegments, geometry: AdapterGeometry, device: torch.device
    ) -> LoraPlan | None:
        if len(segments.start) == 0:
            return None
        return self._adapted(device).plan(segments, geometry, device)

    def fixed_lora(
        self,
        num_tokens: int,
        max_rank: int,
        geometry: AdapterGeometry,
        cells: torch.Tensor,
        device: torch.device,
        num_rows: int | None = None,
    ) -> TritonFixedLora:
        """A plan for captured steps of at most so many tokens, in at most ``num_rows`` segments of any length
        (None: decoding, one a token), and ranks up to ``max_rank``; ``cells`` must stay where it is."""
        kernels = self._adapted(device).kernels
        return TritonFixedLora(kernels, num_tokens, max_rank, geometry, cells, num_rows)

    def lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: LoraPlan,
    ) -> None:
        self._adapted(x.device).add(y, x, pool, layer, group, plan)

    def lora_side(self, plan: LoraPlan) -> Side:
        return self._adapted(plan.cells.device).side(plan)

    def lora_shrink(
        self, x: torch.Tensor, pool: torch.Tensor, layer: int, group: ProjectionGroup, plan: LoraPlan
    ) -> Shrunk:
        return self._adapted(x.device).shrink(x, pool, layer, group, plan)

    def lora_expand(
        self,
        y: torch.Tensor,
        shrunk: Shrunk,
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: LoraPlan,
    ) -> None:
        self._adapted(y.device).expand(y, shrunk, pool, layer, group, plan)

    def lora_summands(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: LoraPlan | None,
    ) -> Summands:
        if plan is None:
            return Summands(self.linear(x, weight, bias))
        return self._adapted(x.device).summands(x, weight, bias, pool, layer, group, plan)

    def lora_gated(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        pool: torch.Tensor,
        layer: int,
        group: ProjectionGroup,
        plan: LoraPlan | None,
        activation: Activation = "silu",
    ) -> torch.Tensor:
        if plan is None:
            return gate_mul(self.linear(x, weight, bias), activation)
        return self._adapted(x.device).gated(x, weight, bias, pool, layer, group, plan, activation)

    merge_linears = staticmethod(merge_linears)

    # ---- gates -----------------------------------------------------------------------------------------

    pass_gate = staticmethod(pass_gate)  # executor.graphs
    await_words = staticmethod(await_words)  # executor.cold_rows
    bring_groups = staticmethod(bring_groups)  # memory.bringing

    # ---- small operations ------------------------------------------------------------------------------

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        adapted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual.contiguous()
        return self._norm(x, residual, weight, eps, adapted), residual

    def _norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        adapted: torch.Tensor | None = None,
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
                out if adapted is None else adapted.contiguous(),
                weight,
                out,
                x.shape[1] if x.dim() == 3 else 1,
                x.stride(0),
                x.stride(1) if x.dim() == 3 else 0,
                size,
                eps,
                ADD=residual is not None,
                ADAPTED=adapted is not None,
                BLOCK=power_of_two(size),
                num_warps=8 if size > 4096 else 4 if size > 256 else 1,
            )
        return out

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
        q, k, v = flat_heads(q), flat_heads(k), flat_heads(v)
        heads, kv_heads, half = q.shape[1], k.shape[1], q.shape[2] // 2
        block = min(8, power_of_two(heads))
        blocks = triton.cdiv(heads, block) + 2 * triton.cdiv(kv_heads, block)
        if len(positions):
            rotate_and_store_kernel[(len(positions), blocks)](
                q,
                k,
                v,
                q if adapted is None else adapted,
                pool,
                rotary.cos,
                rotary.sin,
                positions,
                slots,
                q if norm is None else norm.query,
                k if norm is None else norm.key,
                0.0 if norm is None else norm.eps,
                q.stride(0),
                k.stride(0),
                v.stride(0),
                0 if adapted is None else adapted.stride(0),
                layer * pool.stride(1),
                pool.stride(2),
                pool.stride(0),
                PAGE_TOKENS=pool.shape[3],
                HEADS=heads,
                KV_HEADS=kv_heads,
                HALF=half,
                BLOCK_HEADS=block,
                BLOCK_HALF=power_of_two(half),
                NORMED=norm is not None,
                ADAPTED=adapted is not None,
            )
        return q

    def gate_mul(self, gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
        return gate_mul(gate_up, activation)
