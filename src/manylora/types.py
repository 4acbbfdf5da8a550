"""Ids and plain value types that every room shares.

Owns the vocabulary (request, adapter, page, sampling parameters, outputs); knows nothing of tensors,
clocks, processes or HTTP. Everything here is immutable and made of ints, floats, strings and tuples, so
it can cross a process boundary or be written to a journal as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

RequestId = str
"""Chosen by the front end, unique among live requests, returned to the client."""

AdapterId = int
"""One *version* of an adapter. A name loaded again gets a new id, so it never meets stale KV or weights."""

BASE: AdapterId = 0
"""The base model seen as an adapter of size 0."""


SequenceId = int
"""One sample of one request inside a replica; what the device loop schedules."""

PageId = int
"""Index of a page in a pool."""

CopyId = int
"""A copy between the tiers; numbered from 1."""

LONGEST_ADAPTER_NAME = 200


def adapter_name_fault(name: str) -> str | None:
    """Why no adapter can be called this; None where one can. Names become metric labels and words of log lines."""
    if not name:
        return "must not be empty"
    if len(name) > LONGEST_ADAPTER_NAME:
        return f"may have at most {LONGEST_ADAPTER_NAME} characters"
    if not name.isprintable() or name != name.strip():
        return "must be printable, without space at its ends"
    return None


MAX_LOGPROBS = 20


def why_reserved(name: str, base: str) -> str | None:
    """Why no adapter may have this name beside a base model of that name; None where it may."""
    if name == base:
        return f"{name!r} is the name of the base model"
    if name.startswith(base + ":"):
        return f"{name!r} begins with '{base}:', by which requests name the base model's other adapters"
    return None


class InvalidRequest(ValueError):
    """A request that can never be served as asked; the message is meant for its sender.

    ``param`` names the offending field where there is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick tokens, with the field names of OpenAI and vLLM.

    ``max_tokens=None`` means as many as the context and the pool allow. ``temperature=0`` is greedy.
    ``top_k`` of 0 or -1 and ``top_p=1`` and ``min_p=0`` switch those filters off. Sample ``i`` of ``n``
    draws from ``(seed, i)``, position by position, whatever batch it runs in. ``logprobs`` asks for that
    many alternatives beside the chosen token's own. Raises InvalidRequest on values out of range.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, value in _normalised(self).items():
            object.__setattr__(self, name, value)
        _check_types(self)
        _check_ranges(self)


def _normalised(params: SamplingParams) -> dict[str, Any]:
    """The friendly forms that callers write (a single stop string, lists, dicts, None), as tuples."""
    changed: dict[str, Any] = {}
    if params.stop is None:
        changed["stop"] = ()
    elif isinstance(params.stop, str):
        changed["stop"] = (params.stop,)
    elif isinstance(params.stop, Sequence):
        changed["stop"] = tuple(params.stop)
    if params.stop_token_ids is None:
        changed["stop_token_ids"] = ()
    elif isinstance(params.stop_token_ids, Sequence):
        changed["stop_token_ids"] = tuple(params.stop_token_ids)
    if params.logit_bias is None:
        changed["logit_bias"] = ()
    else:
        try:
            if isinstance(params.logit_bias, Mapping):
                bias = tuple(sorted((int(token), float(b)) for token, b in params.logit_bias.items()))
            else:
                bias = tuple((token, bias) for token, bias in params.logit_bias)
        except (TypeError, ValueError) as error:
            raise InvalidRequest("logit_bias must map token ids to numbers", "logit_bias") from error
        changed["logit_bias"] = bias
    if params.top_k == -1:
        changed["top_k"] = 0
    return changed


_INTEGERS = ("n", "min_tokens", "top_k")
_OPTIONAL_INTEGERS = ("max_tokens", "seed", "logprobs")
_NUMBERS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_types(params: SamplingParams) -> None:
    for name in _INTEGERS:
        if not _is_int(getattr(params, name)):
            raise InvalidRequest(f"{name} must be an integer", name)
    for name in _OPTIONAL_INTEGERS:
        value = getattr(params, name)
        if value is not None and not _is_int(value):
            raise InvalidRequest(f"{name} must be an integer or null", name)
    for name in _NUMBERS:
        value = getattr(params, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
            raise InvalidRequest(f"{name} must be a number", name)
    for name in _FLAGS:
        if not isinstance(getattr(params, name), bool):
            raise InvalidRequest(f"{name} must be true or false", name)
    if not isinstance(params.stop, tuple) or not all(isinstance(text, str) for text in params.stop):
        raise InvalidRequest("stop must be a string or a list of strings", "stop")
    ids = params.stop_token_ids
    if not isinstance(ids, tuple) or not all(_is_int(token) for token in ids):
        raise InvalidRequest("stop_token_ids must be a list of integers", "stop_token_ids")


def _check_ranges(params: SamplingParams) -> None:
    def require(ok: bool, name: str, rule: str) -> None:
        if not ok:
            raise InvalidRequest(f"{name} must be {rule}, got {getattr(params, name)!r}", name)

    require(1 <= params.n <= 128, "n", "between 1 and 128")
    require(params.max_tokens is None or params.max_tokens >= 1, "max_tokens", "at least 1")
    require(params.min_tokens >= 0, "min_tokens", "at least 0")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest("min_tokens must not exceed max_tokens", "min_tokens")
    require(0.0 <= params.temperature <= 100.0, "temperature", "between 0 and 100")
    require(0.0 < params.top_p <= 1.0, "top_p", "in (0, 1]")
    require(params.top_k >= 0, "top_k", "-1, 0 (off) or at least 1")
    require(0.0 <= params.min_p <= 1.0, "min_p", "between 0 and 1")
    require(-2.0 <= params.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
    require(-2.0 <= params.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
    require(0.0 < params.repetition_penalty < float("inf"), "repetition_penalty", "above 0")
    require(
        params.logprobs is None or 0 <= params.logprobs <= MAX_LOGPROBS,
        "logprobs",
        f"between 0 and {MAX_LOGPROBS}",
    )
    require(params.seed is None or -(2**63) <= params.seed < 2**64, "seed", "a 64-bit integer")
    require(all(text for text in params.stop), "stop", "made of non-empty strings")
    if not all(_is_int(t) and isinstance(b, int | float) for t, b in params.logit_bias):
        raise InvalidRequest("logit_bias must map token ids to numbers", "logit_bias")
    if not all(-100.0 <= bias <= 100.0 for _, bias in params.logit_bias):
        raise InvalidRequest("logit_bias values must lie between -100 and 100", "logit_bias")


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What a replica is asked to do: token ids in, at most ``max_tokens`` token ids out, ``n`` times.

    ``stop_ids`` end a sample once ``params.min_tokens`` are out (end-of-sequence ids are among them
    unless ``ignore_eos``). ``params.seed`` is always set by the time a request gets here, so a journal
    replays the same noise. KV is shared among requests of one ``cache_scope`` only.
    """

    id: RequestId
    adapter: AdapterId
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()
    cache_scope: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the model's own logits before any sampling filter.

    ``top`` is ordered from the most probable; ``logprob`` belongs to the token that was chosen.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class RequestError:
    """Why a request was refused or broken off. ``status`` is the HTTP status that fits."""

    status: int
    message: str
    param: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterCard:
    """What the engine says of one served adapter. ``state`` is absent, loading or resident."""

    name: str
    path: str
    id: AdapterId
    rank: int
    num_pages: int
    created_s: int
    state: str = "absent"


@dataclasses.dataclass(frozen=True, slots=True)
class EngineInfo:
    """What stays true while an engine lives."""

    model: str
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    num_pages: int
    page_tokens: int
    page_bytes: int
    device: str
    dtype: str
    max_num_seqs: int
    max_batch_tokens: int
    num_host_pages: int = 0
    cache_policy: str = "manylora"
