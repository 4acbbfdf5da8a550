"""What a router is told of a simulated replica when it comes up: sizes from its config, seconds from its costs."""

from __future__ import annotations

from manylora.config.policy import PolicyConfig
from manylora.protocol.routing import ReplicaFacts, StepPlane
from manylora_lab.pricing.costs import StepCosts, StepWork, prefill_pairs
from manylora_lab.sim.device import Kernel

_ROWS, _MANY_ROWS = 16, 32
_KV_TOKENS = 512
"""Of each row, where a decode step is asked for."""
_PROMPT, _LONG_PROMPT = 256, 768
_ADAPTERS = 8
_ADAPTER_PAGES = 8


def facts_of(
    config: PolicyConfig,
    costs: StepCosts,
    numerics: str = "",
    kernel: Kernel = "shared",
    rank_pages: float = 0.0,
) -> ReplicaFacts:
    """The facts of a replica with these settings and costs. ``rank_pages``: pages of an adapter for each unit of
    its rank, where the ``kernel`` does not read each distinct adapter once."""
    page_bytes = config.page_bytes
    copy_s = costs.copy_s(_ADAPTER_PAGES * page_bytes)
    read_s = costs.read_s(_ADAPTER_PAGES * page_bytes)
    return ReplicaFacts(
        num_pages=config.num_pages,
        page_tokens=config.page_tokens,
        max_model_len=config.max_model_len,
        max_seqs=config.max_num_seqs,
        planes=(_by_rank(decode_plane(costs, page_bytes, config.max_num_seqs), kernel, rank_pages),),
        token_s=token_s(costs),
        page_in_s=copy_s / _ADAPTER_PAGES,
        page_read_s=read_s / _ADAPTER_PAGES,
        page_bytes=page_bytes,
        num_host_pages=config.num_host_pages,
        numerics=numerics,
    )


def _by_rank(plane: StepPlane, kernel: Kernel, rank_pages: float) -> StepPlane:
    if kernel == "shared":
        return plane
    rank_s = plane.adapter_page_s * rank_pages
    unshared = plane._replace(adapter_s=0.0, adapter_page_s=0.0)
    if kernel == "mbgmv":
        return unshared._replace(rank_s=rank_s)
    return unshared._replace(padded_rank_s=rank_s)


def token_s(costs: StepCosts) -> float:
    """Seconds of one more token of a prompt."""

    def prompt_s(num_tokens: int) -> float:
        return costs.step_s(StepWork(0, num_tokens, num_tokens, 0, 0, prefill_pairs(0, num_tokens)))

    return (prompt_s(_LONG_PROMPT) - prompt_s(_PROMPT)) / (_LONG_PROMPT - _PROMPT)


def decode_plane(costs: StepCosts, page_bytes: int, max_seqs: int) -> StepPlane:
    """A decode step as a plane, by what each of its numbers adds to a step of some rows with adapters."""
    rows = min(_ROWS, max_seqs)

    def step_s(num_rows: int, kv_tokens: int, num_adapters: int, pages: int) -> float:
        num_bytes = pages * page_bytes
        token_bytes = num_rows * num_bytes // max(num_adapters, 1)
        return costs.step_s(StepWork(num_rows, 0, kv_tokens, num_bytes, num_adapters, 0, token_bytes))

    kv, pages = rows * _KV_TOKENS, _ADAPTERS * _ADAPTER_PAGES
    here_s = step_s(rows, kv, _ADAPTERS, pages)
    row_s = max(step_s(_MANY_ROWS, kv, _ADAPTERS, pages) - here_s, 0.0) / (_MANY_ROWS - rows or 1)
    kv_s = max(step_s(rows, 2 * kv, _ADAPTERS, pages) - here_s, 0.0) / kv
    adapter_s = max(step_s(rows, kv, 2 * _ADAPTERS, pages) - here_s, 0.0) / _ADAPTERS
    page_s = max(step_s(rows, kv, _ADAPTERS, 2 * pages) - here_s, 0.0) / pages
    base_s = here_s - rows * row_s - kv * kv_s - _ADAPTERS * adapter_s - pages * page_s
    return StepPlane(max(base_s, 0.0), row_s, kv_s, adapter_s, page_s)
