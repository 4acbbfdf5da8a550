"""Reads request bodies: their fields, the refused ones among them, and the parameters that they ask for.

Types are strict (a string is no number), null means the default, and unknown fields are ignored. A field that
names an adapter in a form that cannot be served is refused. So a request never gets another model's answer
because a field was not read. Decoding a body must not hold up other requests, so its content is bounded.
"""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import msgspec
from starlette.requests import Request

from manylora.server.errors import ApiError, clipped
from manylora.types import MAX_LOGPROBS, EngineInfo, InvalidRequest, SamplingParams

MAX_CONTAINERS = 2**17
MAX_STRINGS = 2**19
MAX_VALUES = 2**22
"""The most lists and objects, strings, and elements of a body. A valid request needs as much for the token
ids of many prompts, or for a ``logit_bias`` for each token of a vocabulary."""

# Whatever a body of this size holds takes milliseconds.
_SMALL_BYTES = 2**17

_MIN_BYTES = 4 * 2**20
_BYTES_PER_TOKEN = 64  # of a prompt: as text, with escapes, or as an id
_BYTES_PER_BIAS = 24  # an entry of logit_bias

Result = TypeVar("Result")
Body = TypeVar("Body", bound=msgspec.Struct)


def max_bytes(info: EngineInfo) -> int:
    """Compute the default limit in bytes: a prompt as long as the context, biases for the whole vocabulary,
    and 4 MiB more."""
    return _MIN_BYTES + _BYTES_PER_TOKEN * info.max_model_len + _BYTES_PER_BIAS * info.vocab_size


def is_large(raw: bytes) -> bool:
    """Return whether the work on the body may take longer than an event loop may be blocked."""
    return len(raw) > _SMALL_BYTES


async def run_beside(raw: bytes, function: Callable[..., Result], *args: object) -> Result:
    """Call a function, on another thread where the body is large, so that other requests are answered in that
    time."""
    if is_large(raw):
        return await asyncio.to_thread(function, *args)
    return function(*args)


def check_contents(raw: bytes) -> None:
    """Raise InvalidRequest where a large body has too many parts to be decoded in acceptable time.

    Counts the parts outside of strings, exactly for valid JSON. Of a body that is not valid, a decoder reads
    no more than the valid beginning.
    """
    if not is_large(raw):
        return
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # drops escaped quotes, which end no string
    num_strings = bare.count(b'"') // 2
    if num_strings > MAX_STRINGS:
        raise InvalidRequest(f"the body holds more than {MAX_STRINGS} strings")
    outside = b"".join(bare.split(b'"')[::2])
    if outside.count(b"[") + outside.count(b"{") > MAX_CONTAINERS:
        raise InvalidRequest(f"the body holds more than {MAX_CONTAINERS} lists and objects")
    if outside.count(b",") > MAX_VALUES:
        raise InvalidRequest(f"the body holds more than {MAX_VALUES} values")


Name = Annotated[str, msgspec.Meta(min_length=1)]


class LoraRequest(msgspec.Struct):
    """The object of vLLM and TensorRT-LLM. Only its name is used; number and path are for servers that load
    by them."""

    lora_name: Name | None = None


class AdapterParameters(msgspec.Struct, kw_only=True):
    """The fields of other engines' clients that name an adapter, in a body or in its ``parameters``.

    Each gives the name under which an adapter is served.
    """

    adapter_id: Name | None = None  # TGI, LoRAX
    adapter: Name | None = None
    adapter_name: Name | None = None  # LMDeploy
    lora_name: Name | None = None
    lora_path: Name | None = None  # SGLang, which takes a served name here
    lora_request: LoraRequest | None = None


class AdapterFields(AdapterParameters, kw_only=True):
    """The fields of a whole body that name an adapter. Of LoRAX's ``parameters`` nothing else is read."""

    parameters: AdapterParameters | None = None


class StreamOptions(msgspec.Struct):
    """The parts of a stream other than text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(AdapterFields, kw_only=True):
    """The fields of both generation routes."""

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
    best_of: Any = None


class CompletionBody(SamplingFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None


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


class LoadAdapterBody(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter."""

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool | None = None


class UnloadAdapterBody(msgspec.Struct, kw_only=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str | None = None


class LoraSource(msgspec.Struct, kw_only=True):
    """The place of an adapter for POST /v1/loras."""

    uri: str | None = None


class LoraBody(msgspec.Struct, kw_only=True):
    """POST /v1/loras."""

    lora_name: str | None = None
    source: LoraSource | None = None


_is_off = operator.not_  # absent, false, zero or empty
_is_absent = functools.partial(operator.is_, None)


class _Refused(NamedTuple):
    """A field that is refused rather than ignored, unless its value asks for nothing."""

    is_harmless: Callable[[Any], bool]
    says: str = "is not supported by this server"


def _refused(is_harmless: Callable[[Any], bool], *names: str) -> dict[str, _Refused]:
    return dict.fromkeys(names, _Refused(is_harmless))


def _other_adapter(reason: str) -> _Refused:
    return _Refused(lambda value: value in (None, [], {}), f"is not supported by this server: {reason}")


def _other_route(advice: str) -> _Refused:
    return _Refused(_is_off, f"is not a field of this route: {advice}")


_NO_NUMBER = _other_adapter("adapters are named, not numbered")
_OF_ADAPTERS = {
    "adapters": _other_adapter("a request has one adapter: name it as the model"),
    "adapter_source": _other_adapter("adapters are loaded before they are asked for, by name"),
    "adapter_parameters": _other_adapter("adapters cannot be merged in a request"),
    "lora": _other_adapter("a request has one adapter, at full scale: name it as the model"),
    **dict.fromkeys(("lora_id", "lora_int_id", "lora_task_id"), _NO_NUMBER),
}
# An empty schema is valid, and means any JSON.
_OF_BOTH = {
    **_refused(
        _is_off, "use_beam_search", "structured_outputs", "guided_regex", "guided_choice", "guided_grammar",
        "logits_processors", "bad_words", "return_token_ids", "kv_transfer_params", "guided_decoding_backend",
        "structural_tag", "grammar", "regex", "ebnf", "stop_regex", "custom_logit_processor", "early_stopping",
    ),
    **_refused(
        _is_absent, "guided_json", "allowed_token_ids", "truncate_prompt_tokens", "guided_whitespace_pattern",
        "json_schema", "thinking_token_budget",
    ),
    **_refused(lambda value: value is None or value is True, "detokenize", "spaces_between_special_tokens"),
    "response_format": _Refused(lambda value: value in (None, {"type": "text"})),
    "length_penalty": _Refused(lambda value: value in (None, 1)),
}  # fmt: skip
_OF_COMPLETIONS = {
    **_refused(_is_off, "suffix", "prompt_embeds"),
    "messages": _other_route("use /v1/chat/completions"),
    "max_completion_tokens": _other_route("use max_tokens"),
    "top_logprobs": _other_route("use logprobs, the number of alternatives"),
}
_OF_CHAT = {
    **_refused(_is_off, "functions", "audio", "prediction", "documents"),
    **_refused(_is_absent, "web_search_options"),
    "function_call": _Refused(lambda value: value in (None, "none")),
    "modalities": _Refused(lambda value: value in (None, ["text"])),
    "echo": _other_route("use /v1/completions"),
    "prompt": _other_route("use /v1/completions"),
}


def _with(kind: type, refused: Iterable[str], **others: Any) -> type:
    """Make a type with a further field for each refused name, and with ``others``."""
    fields = [(name, each, None) for name, each in {**dict.fromkeys(refused, Any), **others}.items()]
    doc = {"__doc__": kind.__doc__}
    return msgspec.defstruct(kind.__name__, fields, bases=(kind,), namespace=doc, kw_only=True)


_PARAMETERS = _with(AdapterParameters, _OF_ADAPTERS) | None
_AS_READ = {
    CompletionBody: _with(CompletionBody, _OF_ADAPTERS | _OF_BOTH | _OF_COMPLETIONS, parameters=_PARAMETERS),
    ChatBody: _with(ChatBody, _OF_ADAPTERS | _OF_BOTH | _OF_CHAT, parameters=_PARAMETERS),
}


def as_read(kind: type[Body]) -> type[Body]:
    """Return the type that a body is decoded to: ``kind``, with the refused fields where it has some."""
    return cast(type[Body], _AS_READ.get(kind, kind))


_PARAM = re.compile(r"`\$\.(\w+)|field `(\w+)`")


async def read_body(request: Request, kind: type[Body]) -> tuple[Body, bytes]:
    """Read the JSON body as ``kind``, and return it with its bytes. Raises ApiError 400, and 415 for a body
    of another content type or coding.

    Browsers send JSON to another site only after asking that site. They send a form's body, or one of no
    type, at once.
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
    # ``Request.body`` would keep the bytes until the request is answered.
    raw = b"".join([piece async for piece in request.stream()])
    return await run_beside(raw, _decode, raw, kind), raw


def _decode(raw: bytes, kind: type[Body]) -> Body:
    check_contents(raw)
    try:
        return msgspec.json.decode(raw.removeprefix(codecs.BOM_UTF8), type=as_read(kind))
    except msgspec.ValidationError as error:
        found = _PARAM.search(str(error))
        raise ApiError(400, str(error), param=found and (found[1] or found[2])) from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error


def _check_refused(body: msgspec.Struct, refused: Mapping[str, _Refused], within: str = "") -> None:
    for name, (is_harmless, says) in refused.items():
        if not is_harmless(getattr(body, name, None)):
            raise InvalidRequest(f"{within}{name} {says}", within + name)


def check_supported(body: CompletionBody | ChatBody) -> None:
    """Raise InvalidRequest, naming the field, where a body asks for what this server cannot do."""
    _check_refused(body, _OF_BOTH | (_OF_CHAT if isinstance(body, ChatBody) else _OF_COMPLETIONS))
    if body.best_of not in (None, 1 if body.n is None else body.n):
        raise InvalidRequest("best_of other than n is not supported by this server", "best_of")
    if isinstance(body, ChatBody) and body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice other than 'none' is not supported by this server", "tool_choice")
    if isinstance(body, ChatBody) and body.tools and body.tool_choice != "none":
        raise InvalidRequest("tools are not supported by this server; set tool_choice to 'none'", "tools")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs may be given with stream=false only", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options may be given with stream=true only", "stream_options")


_NAMES = ("adapter_id", "adapter", "adapter_name", "lora_name", "lora_path")


def adapter_asked(body: AdapterFields) -> tuple[str, str] | None:
    """Return the field that names an adapter, and its name. Returns None where none does.

    Raises InvalidRequest, naming the field, where two fields name different adapters, or one asks for
    something that is not supported.
    """
    asked = list(_asked(body))
    if not asked:
        return None
    first, name = asked[0]
    for field, other in asked[1:]:
        if other != name:
            fault = f"names the adapter `{clipped(other)}`, but {first} names `{clipped(name)}`"
            raise InvalidRequest(f"{field} {fault}", field)
    return first, name


def _asked(body: AdapterParameters, within: str = "") -> Iterator[tuple[str, str]]:
    """Yield every field that names an adapter, with the name."""
    _check_refused(body, _OF_ADAPTERS, within)
    for field in _NAMES:
        name = getattr(body, field)
        if name is not None:
            yield within + field, name
    if body.lora_request is not None:
        field = f"{within}lora_request"
        if body.lora_request.lora_name is None:
            raise InvalidRequest(f"{field} must give the adapter's lora_name", field)
        yield field, body.lora_request.lora_name
    if isinstance(body, AdapterFields) and body.parameters is not None:
        yield from _asked(body.parameters, "parameters.")


_COUNTS = {"max_tokens", "logprobs", "prompt_logprobs"}
_SAME_NAME = {field.name for field in dataclasses.fields(SamplingParams)} - _COUNTS
"""The fields with the same name and meaning in bodies and in ``SamplingParams``."""

# Every stop string costs time for each character that this process, shared by all requests, sends.
MAX_STOP_STRINGS = 128
# Each stop character and stop id costs time to prepare or to compare.
MAX_STOP_CHARS = 65_536
MAX_STOP_TOKEN_IDS = 65_536
MAX_BIASED_TOKENS = 300_000  # more than today's vocabularies have
# The bound for all of these together; each prompt of a request has its own.
MAX_PARAMETERS = 500_000

_TOKEN_ID = re.compile("0|[1-9][0-9]*")


def completion_params(body: CompletionBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Build the parameters of a /v1/completions body, over the model's ``defaults``. Raises InvalidRequest."""
    usual = SamplingParams().max_tokens or 0
    most = _max_tokens(body, body.max_tokens, min(usual, defaults.get("max_tokens", usual)))
    scored = body.prompt_logprobs
    if body.echo and (body.logprobs is not None or body.max_tokens == 0) and (scored or 0) >= 0:
        scored = max(scored or 0, body.logprobs or 0)
    return _params(body, defaults, logprobs=body.logprobs, prompt_logprobs=scored, max_tokens=most)


def chat_params(body: ChatBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Build the parameters of a /v1/chat/completions body, over the model's ``defaults``. Raises InvalidRequest.

    Where nothing sets ``max_tokens``, the answer may have as many tokens as the context allows.
    """
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs may be given with logprobs=true only", "top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be between 0 and {MAX_LOGPROBS}", "top_logprobs")
    most = _max_tokens(body, max_chat_tokens(body), defaults.get("max_tokens"))
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    return _params(body, defaults, logprobs=num_top, prompt_logprobs=body.prompt_logprobs, max_tokens=most)


def _max_tokens(body: SamplingFields, asked: int | None, default: int | None) -> int | None:
    if asked is not None or default is None:
        return asked
    # The default length must not make a valid minimum invalid.
    return max(default, body.min_tokens or 0)


def check_parameters(params: SamplingParams, num_prompts: int) -> None:
    """Raise InvalidRequest where the parameters of all prompts together are larger than one request may have."""
    num_each = len(params.logit_bias) + len(params.stop_token_ids) + sum(map(len, params.stop))
    if num_prompts * num_each > MAX_PARAMETERS:
        raise InvalidRequest(
            f"{num_prompts} prompts with {num_each} biased tokens, stop ids and characters of stop strings each "
            f"are more than {MAX_PARAMETERS} in all",
            "prompt",
        )


def max_chat_tokens(body: ChatBody) -> int | None:
    """Return ``max_completion_tokens``, the newer name of ``max_tokens``, or ``max_tokens`` where it is
    absent."""
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _params(body: SamplingFields, defaults: Mapping[str, Any], **counts: int | None) -> SamplingParams:
    given: dict[str, Any] = {**defaults, **counts}
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
            fault = f"{clipped(key)!r} is not a token id in decimal digits"
            raise InvalidRequest(f"logit_bias: {fault}", "logit_bias")
    return SamplingParams(**given)
