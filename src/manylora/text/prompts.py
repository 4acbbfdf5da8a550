"""Checks a request against the engine's limits and features, before the engine receives it.

Each refusal is an InvalidRequest in the wording that OpenAI's clients know.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from manylora.text.tokenizer import Tokenizer
from manylora.types import EngineInfo, InvalidRequest, SamplingParams

# Encoding more characters than this takes milliseconds, which is too long on the shared event loop.
_MAX_INLINE_CHARS = 4096


def require_tokenizer(tokenizer: Tokenizer | None, param: str) -> Tokenizer:
    """Return the tokenizer. Raises InvalidRequest where there is none: then only prompts of token ids can be
    served."""
    if tokenizer is None:
        raise InvalidRequest("this model has no tokenizer: send the prompt as token ids", param)
    return tokenizer


async def encode_texts(
    tokenizer: Tokenizer | None,
    texts: Sequence[str],
    *,
    add_special_tokens: bool = True,
    param: str = "prompt",
    info: EngineInfo,
) -> list[tuple[int, ...]]:
    """Return the token ids of texts; long or many texts are encoded on another thread.

    Raises InvalidRequest where there is no tokenizer, or where a text holds a lone surrogate. A text that
    must give more tokens than ``info`` has room for is refused, too, before it costs any time.
    """
    known = require_tokenizer(tokenizer, param)
    longest = max(map(len, texts), default=0)
    if longest > info.max_model_len * known.longest_token_chars:
        num_least = longest // known.longest_token_chars
        raise InvalidRequest(
            f"This model's maximum context length is {info.max_model_len} tokens. However, you requested at least "
            f"{num_least} tokens (a text of {longest} characters). "
            f"Please reduce the length of the prompt.{_over_pool(num_least, info)}",
            param,
        )

    def encode_all() -> list[tuple[int, ...]]:
        try:
            for text in texts:
                text.encode()
        except UnicodeEncodeError as error:
            found = f"U+{ord(error.object[error.start]):04X} at {error.start}"
            fault = f"{param} holds half a character (a lone surrogate, {found})"
            raise InvalidRequest(fault, param) from None
        return [tuple(known.encode(text, add_special_tokens)) for text in texts]

    if sum(map(len, texts)) <= _MAX_INLINE_CHARS:
        return encode_all()
    return await asyncio.to_thread(encode_all)


def fit_params(
    prompt: Sequence[int],
    params: SamplingParams,
    info: EngineInfo,
    *,
    is_max_tokens_explicit: bool,
    param: str = "prompt",
) -> SamplingParams:
    """Return the parameters with which this prompt can run. Raises InvalidRequest where it cannot.

    A default ``max_tokens`` shrinks to the context's remaining room; an explicit ``max_tokens`` that does not
    fit is refused.
    """
    if not prompt:
        raise InvalidRequest("the prompt must hold at least one token", param)
    # Length first, so that the ids of a prompt of millions are not checked one by one.
    room = info.max_model_len - len(prompt)
    num_least = min(1, 1 if params.max_tokens is None else params.max_tokens)
    if room < num_least:
        raise _over_context(len(prompt), f"at least {num_least}", len(prompt) + num_least, info, param)
    _check_token_ids(prompt, info.vocab_size, param)
    _check_token_ids(params.stop_token_ids, info.vocab_size, "stop_token_ids")
    _check_token_ids([token for token, _ in params.logit_bias], info.vocab_size, "logit_bias")
    # Values too large to have a further effect become small ones of the same meaning, which any message can carry.
    max_tokens = params.max_tokens
    fitted: dict[str, Any] = {"min_tokens": min(params.min_tokens, room)}
    if params.top_k > info.vocab_size:
        fitted["top_k"] = 0
    if max_tokens is not None and max_tokens > room:
        if is_max_tokens_explicit:
            raise _over_context(len(prompt), str(max_tokens), len(prompt) + max_tokens, info, "max_tokens")
        fitted["max_tokens"] = room
    is_same = all(getattr(params, name) == value for name, value in fitted.items())
    return params if is_same else dataclasses.replace(params, **fitted)


def _over_context(
    num_prompt: int, completion: str, num_total: int, info: EngineInfo, param: str
) -> InvalidRequest:
    return InvalidRequest(
        f"This model's maximum context length is {info.max_model_len} tokens. However, you requested "
        f"{num_total} tokens ({num_prompt} in the prompt, {completion} for the completion). "
        f"Please reduce the length of the prompt or the completion.{_over_pool(num_total, info)}",
        param,
    )


def _over_pool(num_tokens: int, info: EngineInfo) -> str:
    """Return the sentence that a refusal adds where the pool sets the limit. The last token's KV is never
    needed."""
    num_pages = -(-(num_tokens - 1) // info.page_tokens)
    if num_pages <= info.num_pages:
        return ""
    return f" The request needs {num_pages} pages but the pool has {info.num_pages}."


def _check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    for token in token_ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise InvalidRequest(f"{param} must be made of integer token ids", param)
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"token id {token} is not in the vocabulary of {vocab_size} tokens", param)


_MOST_PRIORITY = 2**31 - 1  # as in vLLM


def check_priority(priority: Any, info: EngineInfo) -> int:
    """Return a request's priority; None stands for the usual one, 0. Raises InvalidRequest."""
    if priority is None:
        return 0
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidRequest(f"priority must be an integer, got {priority!r}", "priority")
    if priority and not info.has_priorities:
        fault = "other than 0 needs an engine that was started with --scheduling-policy priority"
        raise InvalidRequest(f"priority {fault}", "priority")
    if not info.priority_floor <= priority <= _MOST_PRIORITY:
        span = f"between {info.priority_floor} (--priority-floor) and {_MOST_PRIORITY}"
        raise InvalidRequest(f"priority must be {span}, got {priority}", "priority")
    return priority
