"""Request bodies: their fields and types, and which fields are not supported.

Types are strict (a string is no number), null means the default, unknown fields are ignored.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from manylora.server.bodies import check_contents, run_beside
from manylora.server.errors import ApiError, clipped
from manylora.server.naming import AdapterFields, Name
from manylora.types import InvalidRequest

Body = TypeVar("Body")


class StreamOptions(msgspec.Struct):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(AdapterFields, kw_only=True):
    """What both generation routes take."""

    model: str
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: Name | None = None
    priority: int | None = None
    user: str | None = None
    # Named so that asking for them is refused rather than ignored.
    best_of: Any = None
    use_beam_search: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    logits_processors: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    truncate_prompt_tokens: Any = None
    return_token_ids: Any = None
    kv_transfer_params: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    structural_tag: Any = None
    grammar: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    stop_regex: Any = None
    custom_logit_processor: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    thinking_token_budget: Any = None
    detokenize: Any = None
    spaces_between_special_tokens: Any = None


class CompletionBody(SamplingFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Any = None
    prompt_embeds: Any = None
    messages: Any = None
    max_completion_tokens: Any = None
    top_logprobs: Any = None


class ChatBody(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    web_search_options: Any = None
    documents: Any = None
    echo: Any = None
    prompt: Any = None


class LoadAdapterBody(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter."""

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool | None = None


class UnloadAdapterBody(msgspec.Struct, kw_only=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str | None = None


class LoraSource(msgspec.Struct, kw_only=True):
    """Where POST /v1/loras is to take an adapter from."""

    uri: str | None = None


class LoraBody(msgspec.Struct, kw_only=True):
    """POST /v1/loras."""

    lora_name: str | None = None
    source: LoraSource | None = None


_PARAM = re.compile(r"`\$\.(\w+)|field `(\w+)`")


async def read_body(request: Request, kind: type[Body]) -> tuple[Body, bytes]:
    """Read the JSON body as ``kind``; returns it as it came, too. Raises ApiError 400, and 415 for a body
    that says that it is something else.

    Browsers send JSON to another site only after asking it, but a form's body, or one of no type, at once.
    """
    headers = request.headers
    coding = headers.get("content-encoding", "identity")
    if coding.strip().lower() != "identity":
        message = f"a body in {clipped(coding)} is not read; send it as it is"
        raise ApiError(415, message, headers={"Accept-Encoding": "identity"})
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    media_type = headers.get("content-type", "")
    if has_body and media_type.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"the body needs content-type: application/json, not {clipped(media_type)!r}")
    # The request, which lives until it is answered, would keep what its ``body`` gives.
    raw = b"".join([piece async for piece in request.stream()])
    return await run_beside(raw, _decode, raw, kind), raw


def _decode(raw: bytes, kind: type[Body]) -> Body:
    check_contents(raw)
    try:
        return msgspec.json.decode(raw.removeprefix(codecs.BOM_UTF8), type=kind)
    except msgspec.ValidationError as error:
        found = _PARAM.search(str(error))
        raise ApiError(400, str(error), param=found and (found[1] or found[2])) from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error


def _is_off(value: Any) -> bool:
    """Absent, false, zero or empty: nothing was asked for."""
    return not value


def _is_on(value: Any) -> bool:
    return value is None or value is True


def _is_plain_text(value: Any) -> bool:
    return value is None or value == {"type": "text"}


def _is_absent(value: Any) -> bool:
    return value is None


# What each unsupported field may hold without asking for anything. An empty schema is a schema: any JSON.
_HARMLESS: dict[str, Callable[[Any], bool]] = {
    "use_beam_search": _is_off,
    "response_format": _is_plain_text,
    "structured_outputs": _is_off,
    "guided_json": _is_absent,
    "guided_regex": _is_off,
    "guided_choice": _is_off,
    "guided_grammar": _is_off,
    "logits_processors": _is_off,
    "allowed_token_ids": _is_absent,
    "bad_words": _is_off,
    "truncate_prompt_tokens": _is_absent,
    "return_token_ids": _is_off,
    "kv_transfer_params": _is_off,
    "guided_decoding_backend": _is_off,
    "guided_whitespace_pattern": _is_absent,
    "structural_tag": _is_off,
    "grammar": _is_off,
    "regex": _is_off,
    "ebnf": _is_off,
    "json_schema": _is_absent,
    "stop_regex": _is_off,
    "custom_logit_processor": _is_off,
    "length_penalty": lambda value: value is None or value == 1,
    "early_stopping": _is_off,
    "thinking_token_budget": _is_absent,
    "detokenize": _is_on,
    "spaces_between_special_tokens": _is_on,
    "suffix": _is_off,
    "prompt_embeds": _is_off,
    "functions": _is_off,
    "function_call": lambda value: value in (None, "none"),
    "audio": _is_off,
    "modalities": lambda value: value in (None, ["text"]),
    "prediction": _is_off,
    "web_search_options": _is_absent,
    "documents": _is_off,
}


# Fields that one of the two generation routes has and the other has not: of completions, of chat.
_OTHER_ROUTE: tuple[dict[str, str], dict[str, str]] = (
    {
        "messages": "use /v1/chat/completions",
        "max_completion_tokens": "use max_tokens",
        "top_logprobs": "use logprobs, the number of alternatives",
    },
    {"echo": "use /v1/completions", "prompt": "use /v1/completions"},
)


def check_supported(body: SamplingFields) -> None:
    """Raise InvalidRequest, naming the field, where a body asks for what this server cannot do."""
    for name, is_harmless in _HARMLESS.items():
        if not is_harmless(getattr(body, name, None)):
            raise InvalidRequest(f"{name} is not supported by this server", name)
    if body.best_of not in (None, 1 if body.n is None else body.n):
        raise InvalidRequest("best_of other than n is not supported by this server", "best_of")
    other_route = _OTHER_ROUTE[isinstance(body, ChatBody)]
    for name, advice in other_route.items():
        if getattr(body, name):
            raise InvalidRequest(f"{name} is not a field of this route: {advice}", name)
    if isinstance(body, ChatBody):
        if body.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest(
                "tool_choice other than 'none' is not supported by this server", "tool_choice"
            )
        if body.tools and body.tool_choice != "none":
            raise InvalidRequest("tools are not supported by this server; set tool_choice to 'none'", "tools")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs may be given with stream=false only", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options may be given with stream=true only", "stream_options")
