"""How large things are: what weights and steps take, and what the policy may use of pools of some size.

Owns the defaults that depend on the kind of device and on the model. Does not load or allocate.
"""

from __future__ import annotations

from typing import Literal

import torch

from manylora.config import ConfigError, EngineSettings, PolicyConfig
from manylora.kernels.flashinfer_attention import AttentionShape
from manylora.kernels.shapes import PageShape
from manylora.memory.budget import in_mib
from manylora.models.spec import ModelConfig
from manylora.types import EngineInfo, RankInfo

Kind = Literal["cpu", "cuda"]

_WORKSPACE_BYTES = 512 * 2**20
"""Libraries' own workspaces, kernels' partial results, fragmentation."""

_SAMPLER_BYTES = 48
"""Per logit: float32 logits and their copies, int64 weights and running sums, a sort's values and indices."""


def activation_bytes(config: ModelConfig, dtype: torch.dtype, num_seqs: int, batch_tokens: int) -> int:
    """A generous estimate of what a step takes beside weights and pool: the widest layer's tensors, the
    sampler's, and workspaces."""
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    widest = 6 * config.hidden_size + 3 * qkv + 4 * config.intermediate_size
    layer = batch_tokens * widest * max(dtype.itemsize, 4)
    return layer + num_seqs * config.vocab_size * _SAMPLER_BYTES + _WORKSPACE_BYTES


def policy_limits(
    settings: EngineSettings,
    config: ModelConfig,
    kind: Kind,
    page: PageShape,
    num_pages: int,
    num_host_pages: int = 0,
) -> PolicyConfig:
    """What the policy may use of pools of so many pages."""
    num_seqs, batch_tokens, pipeline_depth = settings.scheduler.limits_on(kind)
    return PolicyConfig(
        num_pages=num_pages,
        page_tokens=page.page_tokens,
        max_model_len=_model_len(settings.model.max_model_len, config, num_pages, page),
        max_num_seqs=num_seqs,
        max_batch_tokens=batch_tokens,
        num_host_pages=num_host_pages,
        page_bytes=page.page_bytes,
        cache=settings.cache.policy,
        admission=settings.scheduler.admission,
        slo_ttft_s=settings.scheduler.slo_ttft_s,
        max_waiting=settings.scheduler.max_waiting,
        max_prefills_per_step=settings.scheduler.max_prefills,
        kept_share=settings.scheduler.kept_share,
        pipeline_depth=pipeline_depth,
        queue=settings.scheduler.queue,
        merge=settings.scheduler.merge,
        cold_start=settings.scheduler.cold_start,
        long_from=config.long_from,
    )


def _model_len(asked: int | None, config: ModelConfig, num_pages: int, page: PageShape) -> int:
    """The longest context: as asked, else the model's own, cut to what one base request finds in the pool.

    Raises ConfigError when what was asked for is more than the model or the pool can hold.
    """
    in_pool = num_pages * page.page_tokens
    if asked is None:
        return min(config.context, in_pool)
    if asked > config.longest_context:
        scaling = "" if config.rope is None else f" (rope type {config.rope.kind})"
        raise ConfigError(
            f"max_model_len {asked} is more than the model's {config.longest_context} positions{scaling}"
        )
    if asked > in_pool:
        pages = -(-asked // page.page_tokens)
        raise ConfigError(
            f"max_model_len {asked} needs a pool of {in_mib(pages * page.page_bytes)}, but it has "
            f"{in_mib(num_pages * page.page_bytes)}, for {in_pool} tokens: lower max_model_len or raise "
            "device_pool"
        )
    return asked


def engine_info(
    settings: EngineSettings,
    config: ModelConfig,
    limits: PolicyConfig,
    device: str,
    dtype: torch.dtype,
    pristine_bytes: int = 0,
    ranks: tuple[RankInfo, ...] = (),
    lora_sharding: str = "",
) -> EngineInfo:
    """What stays true while the engine lives; see EngineInfo."""
    return EngineInfo(
        model=settings.model.name,
        vocab_size=config.vocab_size,
        eos_ids=config.eos_ids,
        max_model_len=limits.max_model_len,
        num_pages=limits.num_pages,
        page_tokens=limits.page_tokens,
        page_bytes=limits.page_bytes,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        max_num_seqs=limits.max_num_seqs,
        max_batch_tokens=limits.max_batch_tokens,
        num_host_pages=limits.num_host_pages,
        cache_policy=limits.cache.policy,
        has_priorities=limits.queue.has_priorities,
        priority_floor=limits.queue.priority_floor,
        pristine_bytes=pristine_bytes,
        ranks=ranks,
        lora_sharding=lora_sharding,
        cold_start=limits.cold_start.mode,
        cold_start_kinds=limits.cold_start.begins(limits.num_host_pages > 0),
        seed=settings.seed,
    )


def attention_shape(config: ModelConfig, dtype: torch.dtype, max_model_len: int) -> AttentionShape:
    """A window as long as the longest context is none."""
    windows = [layer.attention.window for layer in config.layers]
    sees_all = any(window is None or window >= max_model_len for window in windows)
    return AttentionShape(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        dtype,
        sees_all,
        config.own_attention_scale,
        config.score_cap,
    )
