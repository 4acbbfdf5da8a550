"""What ``LLM`` and ``AsyncLLM`` give: whole results, and news of results that grow."""

from __future__ import annotations

import dataclasses

from manylora.text.generate import TextOutput
from manylora.text.tokenizer import Tokenizer
from manylora.types import SamplingParams, TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability; ``rank`` counts from 1, or is None where it is not among the top."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished sample. ``logprobs``: per token, token id -> Logprob, the chosen token included."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt's results: ``n`` samples, in order. ``adapter`` is None for the base model."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    adapter: str | None
    outputs: list[CompletionOutput]
    finished: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class StreamOutput:
    """News of one sample of one prompt while it runs: what is new, not what came before.

    With a prompt's first news only: how many of its tokens were reused, and how long it waited for admission,
    then for its adapter, then for its cached KV.
    """

    request_id: str
    prompt_index: int
    sample: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    adapter_s: float = 0.0
    kv_s: float = 0.0


def completion_of(
    output: TextOutput, params: SamplingParams, tokenizer: Tokenizer | None
) -> CompletionOutput:
    """A sample as callers get it."""
    logprobs = None
    if params.logprobs is not None:
        logprobs = [_logprobs_at(position, tokenizer) for position in output.logprobs]
    return CompletionOutput(
        output.index, output.text, output.token_ids, logprobs, output.finish_reason, output.stop_reason
    )


def _logprobs_at(position: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    def text(token: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_text(token)

    found = {
        token: Logprob(logprob, rank, text(token)) for rank, (token, logprob) in enumerate(position.top, start=1)
    }
    found.setdefault(position.token, Logprob(position.logprob, None, text(position.token)))
    return found
