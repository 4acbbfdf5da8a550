"""Implements the operations on CUDA devices by launching the Triton kernels of this package.

Owns the small kernels' block sizes and grids, and the order of products and LoRA. Only the plans' ``fill``
and ``merge_linears`` send tables to the device, in asynchronous copies. All other calls just launch work and
never wait for the device, so a CUDA graph can capture everything between the calls of ``fill``.
"""

from __future__ import annotations

import torch

from manylora.kernels import ops
from manylora.kernels.flashinfer_attention import PreparedPrompts, PromptAttention
from manylora.kernels.shapes import Activation, AdapterGeometry, PageShape
from manylora.kernels.triton.attention_plan import TritonAttentionPlan, flat_heads
from manylora.kernels.triton.cold import await_words, bring_groups, pass_gate
from manylora.kernels.triton.decode_table import DecodeTable
from manylora.kernels.triton.launch import LaunchCounters, ceil_div, power_of_two, report_compilation
from manylora.kernels.triton.lora import LoraKernels, SideStream, gate_mul, lora_kernels_on, planned
from manylora.kernels.triton.lora_plan import TritonLoraPlan
from manylora.kernels.triton.merging import merge_linears
from manylora.kernels.triton.products import Products
from manylora.kernels.triton.small import rms_norm_kernel, rotate_and_store_kernel, write_kv_kernel

# The number of programs that keeps a large GPU busy: 4 on each of 132 multiprocessors.
BUSY_PROGRAMS = 528


class TritonOps(ops.Ops):
    """The operations on CUDA (or, under TRITON_INTERPRET=1, on the CPU), in float32, bfloat16, float16."""

    name = "triton"
    captures = waits = brings = True

    def __init__(
        self,
        products: Products | None = None,
        decoding: DecodeTable | None = None,
        prompts: PreparedPrompts | PromptAttention | None = None,
        lora: LoraKernels | None = None,
    ) -> None:
        """Set up the operations, by default for any model on any device.

        ``products``: by default, all products are the library's. ``decoding``, ``prompts``: launch sizes and
        FlashInfer for the one model that is served; by default, sizes for any model and no FlashInfer.
        ``lora``: by default, the LoRA kernels with the sizes stored for the device.
        """
        report_compilation()
        self._decoding = decoding or DecodeTable()
        self._prompts = prompts
        self._counters = LaunchCounters()
        self._products = products or Products({}, 1)
        self._lora = lora
        self._before: ops.Side = ops.IN_LINE
        self._behind: ops.Side = ops.IN_LINE
        """Side streams: the first has high priority, the second the normal priority of the main stream."""

    def close(self) -> None:
        """End the compilation that runs beside the steps. May be called again; no step may be in flight."""
        if isinstance(self._prompts, PreparedPrompts):
            self._prompts.close()

    def linear(self, x: torch.Tensor, weight: ops.Weight, bias: torch.Tensor | None) -> torch.Tensor:
        return self._products(x, weight, bias)

    # ---- attention -------------------------------------------------------------------------------------

    def attention_plan(
        self, page: PageShape, device: torch.device, limits: ops.AttentionLimits | None = None
    ) -> TritonAttentionPlan:
        return TritonAttentionPlan(page, device, BUSY_PROGRAMS, self._decoding, self._prompts, limits)

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
        self, q: torch.Tensor, pool: torch.Tensor, layer: int, plan: TritonAttentionPlan, scores: ops.Scores
    ) -> torch.Tensor:
        return plan.run(q, pool, layer, scores, self._counters)

    # ---- LoRA ------------------------------------------------------------------------------------------

    def _kernels(self, device: torch.device) -> LoraKernels:
        """Return the LoRA kernels of the only device. The first call makes them and the side streams."""
        if self._lora is None:
            self._lora = lora_kernels_on(device)
        if self._before is ops.IN_LINE:
            self._before, self._behind = SideStream(device, True), SideStream(device, False)
        return self._lora

    def lora_plan(
        self, geometry: AdapterGeometry, device: torch.device, limits: ops.LoraLimits | None = None
    ) -> TritonLoraPlan:
        return TritonLoraPlan(self._kernels(device).config, geometry, device, limits)

    def lora_side(self, plan: TritonLoraPlan) -> ops.Side:
        """Return a side stream of normal priority for the product, because ranks wait for the shrink."""
        return ops.IN_LINE if plan.beside is None else self._behind

    def lora(self, y: torch.Tensor, x: torch.Tensor, site: ops.LoraSite, step: ops.LoraStep) -> None:
        kernels = self._kernels(x.device)
        kernels.expand(y, kernels.shrink(x, site, step), site, step)

    def lora_shrink(self, x: torch.Tensor, site: ops.LoraSite, step: ops.LoraStep) -> ops.Shrunk:
        """Compute ``Ops.lora_shrink``, with the splits already added up."""
        planes = self._kernels(x.device).shrink(x, site, step)
        sums = [part[0] if len(part) == 1 else part.sum(0) for part in planes]
        values = sums[0] if len(sums) == 1 else torch.cat(sums)
        return ops.Shrunk(values, [len(part) for part in sums])

    def lora_expand(
        self, y: torch.Tensor, shrunk: ops.Shrunk, site: ops.LoraSite, step: ops.LoraStep
    ) -> None:
        planes = [part.view(1, -1) for part in torch.split(shrunk.values, shrunk.parts)]
        self._kernels(y.device).expand(y, planes, site, step)

    def lora_summands(self, x: torch.Tensor, linear: ops.AdaptedLinear, step: ops.LoraStep) -> ops.Summands:
        if step.plan is None:
            return ops.Summands(self.linear(x, linear.weight, linear.bias))
        kernels, plan = self._kernels(x.device), planned(step)
        if plan.beside is None:
            return ops.Summands(self._in_turn(x, linear, step))
        adapted = self._empty(x, linear)
        product_first = linear.group.name in plan.beside.product_first
        side = self._behind if product_first else self._before
        side.fork()
        # A captured graph starts work in the order of its launches.
        y = self.linear(x, linear.weight, linear.bias) if product_first else None
        with side.use():
            partial = kernels.shrink(x, linear, step)
            kernels.expand(adapted, partial, linear, step, add=False)
        if y is None:
            y = self.linear(x, linear.weight, linear.bias)
        side.join()
        return ops.Summands(y, adapted)

    def _in_turn(self, x: torch.Tensor, linear: ops.AdaptedLinear, step: ops.LoraStep) -> torch.Tensor:
        """Return the sum of the product and LoRA, computed one after the other on one stream."""
        plan = planned(step)
        if linear.bias is None and plan.is_first:
            y, kernels = self._empty(x, linear), self._kernels(x.device)
            y[plan.covered :].zero_()
            kernels.expand(y, kernels.shrink(x, linear, step), linear, step, add=False)
            return y.addmm_(x, linear.weight.data.T)
        y = self.linear(x, linear.weight, linear.bias)
        self.lora(y, x, linear, step)
        return y

    @staticmethod
    def _empty(x: torch.Tensor, linear: ops.AdaptedLinear) -> torch.Tensor:
        return torch.empty((x.shape[0], linear.weight.data.shape[0]), dtype=x.dtype, device=x.device)

    def lora_gated(
        self, x: torch.Tensor, linear: ops.AdaptedLinear, step: ops.LoraStep, activation: Activation = "silu"
    ) -> torch.Tensor:
        return gate_mul(*self.lora_summands(x, linear, step), activation)

    merge_linears = staticmethod(merge_linears)

    # ---- gates -----------------------------------------------------------------------------------------

    pass_gate = staticmethod(pass_gate)
    await_words = staticmethod(await_words)
    bring_groups = staticmethod(bring_groups)

    # ---- small operations ------------------------------------------------------------------------------

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(
        self, x: ops.Summands, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual.contiguous()
        return self._norm(x.product, residual, weight, eps, x.adapted), residual

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
        rotary: ops.Rotary,
        positions: torch.Tensor,
        slots: torch.Tensor,
        norm: ops.HeadNorm | None,
        adapted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q, k, v = flat_heads(q), flat_heads(k), flat_heads(v)
        heads, kv_heads, half = q.shape[1], k.shape[1], q.shape[2] // 2
        block = min(8, power_of_two(heads))
        blocks = ceil_div(heads, block) + 2 * ceil_div(kv_heads, block)
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
        return gate_mul(gate_up, None, activation)
