"""Request fields to SamplingParams."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from manylora.server.errors import clipped
from manylora.server.schemas import ChatBody, CompletionBody, SamplingFields
from manylora.types import MAX_LOGPROBS, InvalidRequest, SamplingParams

_COUNTS = {"max_tokens", "logprobs", "prompt_logprobs"}
_SAME_NAME = {field.name for field in dataclasses.fields(SamplingParams)} - _COUNTS
"""What bodies and parameters call alike, and mean alike."""

# Every stop string costs time for each character that this process, shared by all requests, sends.
MAX_STOP_STRINGS = 128
# Preparing them, and looking through token ids, costs time for each.
MAX_STOP_CHARS = 65_536
MAX_STOP_TOKEN_IDS = 65_536
MAX_BIASED_TOKENS = 300_000  # more than today's vocabularies have
# Of all of these together, each prompt of a request having its own.
MAX_PARAMETERS = 500_000

_TOKEN_ID = re.compile("0|[1-9][0-9]*")


def completion_params(body: CompletionBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a /v1/completions body, over the model's ``defaults``; raises InvalidRequest."""
    usual = SamplingParams().max_tokens or 0
    most = _max_tokens(body, body.max_tokens, min(usual, defaults.get("max_tokens", usual)))
    scored = body.prompt_logprobs
    if body.echo and (body.logprobs is not None or body.max_tokens == 0) and (scored or 0) >= 0:
        scored = max(scored or 0, body.logprobs or 0)
    return _params(
        body, {**defaults, "logprobs": body.logprobs, "prompt_logprobs": scored, "max_tokens": most}
    )


def chat_params(body: ChatBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a /v1/chat/completions body, over the model's ``defaults``; raises InvalidRequest.

    Without a default for them as many tokens as the context allows.
    """
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs may be given with logprobs=true only", "top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be between 0 and {MAX_LOGPROBS}", "top_logprobs")
    return _params(
        body,
        {
            **defaults,
            "max_tokens": _max_tokens(body, max_chat_tokens(body), defaults.get("max_tokens")),
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
            "prompt_logprobs": body.prompt_logprobs,
        },
    )


def _max_tokens(body: SamplingFields, asked: int | None, default: int | None) -> int | None:
    if asked is not None or default is None:
        return asked
    # The default length must not make a valid minimum invalid.
    return max(default, body.min_tokens or 0)


def check_parameters(params: SamplingParams, num_prompts: int) -> None:
    """Raise InvalidRequest where the parameters of all prompts together are more than one request may bring."""
    num_each = len(params.logit_bias) + len(params.stop_token_ids) + sum(map(len, params.stop))
    if num_prompts * num_each > MAX_PARAMETERS:
        raise InvalidRequest(
            f"{num_prompts} prompts with {num_each} biased tokens, stop ids and characters of stop strings each "
            f"are more than {MAX_PARAMETERS} in all",
            "prompt",
        )


def max_chat_tokens(body: ChatBody) -> int | None:
    """``max_completion_tokens`` is the newer name of ``max_tokens`` and wins."""
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _params(body: SamplingFields, given: dict[str, Any]) -> SamplingParams:
    for name in _SAME_NAME:
        value = getattr(body, name)
        if value is not None:
            given[name] = value
    if isinstance(body.stop, list) and len(body.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop may hold at most {MAX_STOP_STRINGS} strings", "stop")
    if sum(map(len, body.stop or ())) > MAX_STOP_CHARS:
        raise InvalidRequest(f"stop may hold at most {MAX_STOP_CHARS} characters in all", "stop")
    if len(body.stop_token_ids or ()) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids", "stop_token_ids")
    if len(body.logit_bias or ()) > MAX_BIASED_TOKENS:
        raise InvalidRequest(f"logit_bias may name at most {MAX_BIASED_TOKENS} tokens", "logit_bias")
    for key in body.logit_bias or ():
        if not _TOKEN_ID.fullmatch(key):  # one spelling for each id, so that no two keys are the same token
            raise InvalidRequest(
                f"logit_bias: {clipped(key)!r} is not a token id in decimal digits", "logit_bias"
            )
    return SamplingParams(**given)
