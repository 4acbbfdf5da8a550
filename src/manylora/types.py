"""Defines ids and plain value types that all parts share.

Owns the vocabulary (request, adapter, page, sampling parameters, outputs). Knows nothing of tensors, clocks,
processes or HTTP. Everything here is immutable and made of ints, floats, strings, bytes and tuples. So it can
cross a process boundary or be written to a journal as it is.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeVar

from manylora.rules import FINITE, Rule, at_least, between, broken_rule, more_than

RequestId = str
"""The name of a request: chosen by the front end, unique among live requests, and returned to the client."""

AdapterId = int
"""The number of one *version* of an adapter. A name loaded again gets a new id, so it never uses stale KV or
weights."""

BASE: AdapterId = 0
"""The id of the base model, as an adapter of size 0."""


SequenceId = int
"""The number of one sample of one request inside a replica: the unit that the device loop schedules."""

PageId = int
"""The index of a page in a pool."""

CopyId = int
"""The number of a copy between the tiers, from 1."""

SwitchId = int
"""The number of a change of the adapter that is merged into the base, from 1."""

LONGEST_ADAPTER_NAME = 200


def adapter_name_fault(name: str) -> str | None:
    """Explain why no adapter can have this name. Returns None where one can. Names become metric labels and
    words of log lines."""
    if not name:
        return "must not be empty"
    if len(name) > LONGEST_ADAPTER_NAME:
        return f"may have at most {LONGEST_ADAPTER_NAME} characters"
    if not name.isprintable() or name != name.strip():
        return "must be printable, without space at its ends"
    return None


MAX_LOGPROBS = 20


def why_reserved(name: str, bases: Iterable[str]) -> str | None:
    """Explain why no adapter may have this name beside a base model of these names. Returns None where it may."""
    for base in bases:
        if name == base:
            return f"{name!r} is the name of the base model"
        if name.startswith(base + ":"):
            return f"{name!r} begins with '{base}:', by which requests name the base model's other adapters"
    return None


class InvalidRequest(ValueError):
    """A request that can never be served as asked. The message is meant for its sender.

    ``param`` names the field at fault, where there is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


_Held = TypeVar("_Held")
_Given = TypeVar("_Given")


class _Converted(Generic[_Held, _Given]):
    """A field's type for type checkers: the field holds the first type and is given as the second. At run
    time it is the first."""

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: type) -> _Held: ...

        def __set__(self, instance: object, value: _Given) -> None: ...

    else:

        def __class_getitem__(cls, kinds: tuple[Any, Any]) -> Any:
            return kinds[0]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) for text in value)


def _are_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_int, value))


def _are_biases(value: Any) -> bool:
    return value is not None and all(
        _is_int(token) and isinstance(bias, int | float) for token, bias in value
    )


_Integer = Annotated[int, Rule("an integer", _is_int)]
_OptionalInteger = Annotated[int | None, Rule("an integer or null", _is_int)]
_Number = Annotated[float, Rule("a number", _is_number)]
_Switch = Annotated[bool, Rule("true or false", lambda value: isinstance(value, bool))]
_Stop = Annotated[
    _Converted[tuple[str, ...], str | Sequence[str] | None],
    Rule("a string or a list of strings", _are_texts),
    Rule("made of non-empty strings", all),
]
_Ids = Annotated[_Converted[tuple[int, ...], Sequence[int] | None], Rule("a list of integers", _are_ids)]
_Bias = Annotated[
    _Converted[tuple[tuple[int, float], ...], Mapping[int, float] | Iterable[tuple[int, float]] | None],
    Rule("a mapping of token ids to numbers", _are_biases),
    Rule("made of numbers between -100 and 100", lambda pairs: all(-100 <= bias <= 100 for _, bias in pairs)),
]
_NONE: Any = ()


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """The rules by which tokens are picked, with the field names of OpenAI and vLLM.

    ``max_tokens=None`` means as many as the context and the pool allow. ``temperature=0`` is greedy.
    ``top_k`` of 0 or -1 and ``top_p=1`` and ``min_p=0`` switch those filters off. Sample ``i`` of ``n`` draws
    from ``(seed, i)``, position by position, whatever batch it runs in. ``logprobs`` asks for that number of
    alternatives beside the chosen token's own. ``prompt_logprobs`` asks for the same of the prompt's tokens;
    then ``max_tokens`` may be 0, and nothing is generated. Raises InvalidRequest on values out of range.
    """

    n: Annotated[_Integer, between(1, 128)] = 1
    max_tokens: Annotated[_OptionalInteger, at_least(0)] = 16
    min_tokens: Annotated[_Integer, at_least(0)] = 0
    temperature: Annotated[_Number, between(0, 100)] = 1.0
    top_p: Annotated[_Number, Rule("in (0, 1]", lambda value: 0 < value <= 1)] = 1.0
    top_k: Annotated[_Integer, Rule("-1, 0 (off) or at least 1", lambda value: value >= 0)] = 0
    min_p: Annotated[_Number, between(0, 1)] = 0.0
    stop: _Stop = _NONE
    stop_token_ids: _Ids = _NONE
    include_stop_str_in_output: _Switch = False
    skip_special_tokens: _Switch = True
    seed: Annotated[_OptionalInteger, Rule("a 64-bit integer", lambda seed: -(2**63) <= seed < 2**64)] = None
    logprobs: Annotated[_OptionalInteger, between(0, MAX_LOGPROBS)] = None
    ignore_eos: _Switch = False
    logit_bias: _Bias = _NONE
    presence_penalty: Annotated[_Number, between(-2, 2)] = 0.0
    frequency_penalty: Annotated[_Number, between(-2, 2)] = 0.0
    repetition_penalty: Annotated[_Number, more_than(0), FINITE] = 1.0
    prompt_logprobs: Annotated[_OptionalInteger, between(0, MAX_LOGPROBS)] = None

    def __post_init__(self) -> None:
        stop: Any = self.stop
        held = {
            "stop": (stop,) if isinstance(stop, str) else _as_tuple(stop),
            "stop_token_ids": _as_tuple(self.stop_token_ids),
            "logit_bias": _as_pairs(self.logit_bias),
            "top_k": 0 if self.top_k == -1 else self.top_k,
        }
        for name, value in held.items():
            object.__setattr__(self, name, value)
        if broken := broken_rule(self):
            field, must = broken
            raise InvalidRequest(f"{field.name} {must}", field.name)
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            why = "max_tokens must be at least 1, or 0 with prompt_logprobs (or echo)"
            raise InvalidRequest(why, "max_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens must not exceed max_tokens", "min_tokens")


def _as_tuple(value: Any) -> Any:
    """Return a sequence as a tuple, None as an empty one, and anything else unchanged."""
    return () if value is None else tuple(value) if isinstance(value, Sequence) else value


def _as_pairs(value: Any) -> tuple[tuple[Any, Any], ...] | None:
    """Return a mapping as pairs sorted by key, pairs as a tuple, and None as an empty tuple. Returns None
    where the value is neither."""
    try:
        if isinstance(value, Mapping):
            return tuple(sorted((int(token), float(bias)) for token, bias in value.items()))
        return () if value is None else tuple((token, bias) for token, bias in value)
    except (TypeError, ValueError, OverflowError):
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A request to a replica: token ids in, at most ``max_tokens`` token ids out, ``n`` times.

    ``stop_ids`` end a sample once ``params.min_tokens`` are out; end-of-sequence ids are among them unless
    ``ignore_eos``. ``params.seed`` is always set by the time a request arrives here, so a journal replays the
    same noise. Only requests of the same ``cache_scope`` share KV. A lower ``priority`` goes first.
    ``client``: the place of its API key, where keys are the clients; ``share``: the weight of its client's
    service beside others.
    """

    id: RequestId
    adapter: AdapterId
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()
    cache_scope: str = ""
    priority: int = 0
    client: int = 0
    share: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the model's own logits before any sampling filter.

    ``top`` is ordered from the most probable; ``logprob`` belongs to the chosen token.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a run of a prompt's tokens, each given the tokens before it. A long prompt has
    many runs.

    ``packed``: for each token 2 + 2 * ``num_top`` numbers of four bytes in the machine's order. The first two
    are its own log-probability (a float) and its rank among all tokens (an integer, from 1). Then follow the
    log-probabilities of the most probable tokens, the largest first, then the ids of these.
    """

    num_top: int
    packed: bytes

    def __len__(self) -> int:
        return len(self.packed) // (8 + 8 * self.num_top)

    def entries(self, tokens: Sequence[int]) -> Iterator[tuple[TokenLogprobs, int]]:
        """Yield the log-probabilities and the rank of each of the run's ``tokens``."""
        floats, integers = memoryview(self.packed).cast("f"), memoryview(self.packed).cast("i")
        for place, token in enumerate(tokens):
            first = place * (2 + 2 * self.num_top)
            ids, end = first + 2 + self.num_top, first + 2 + 2 * self.num_top
            top = zip(integers[ids:end].tolist(), floats[first + 2 : ids].tolist())
            yield TokenLogprobs(token, floats[first], tuple(top)), integers[first + 1]


@dataclasses.dataclass(frozen=True, slots=True)
class RequestError:
    """The reason why a request was refused or ended early. ``status`` is the HTTP status that fits."""

    status: int
    message: str
    param: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterCard:
    """The facts of a served adapter. ``state``: absent, loading or resident."""

    name: str
    path: str
    id: AdapterId
    rank: int
    num_pages: int
    created_s: int
    state: str = "absent"


@dataclasses.dataclass(frozen=True, slots=True)
class RankInfo:
    """The memory of one of several ranks: its weights, and its part of every page, in bytes."""

    weight_bytes: int
    page_bytes: int


class RankTraffic(NamedTuple):
    """The exchanges of one rank with the others since the start, by purpose: their number, and the bytes of
    its own tensors.

    ``base``: sums of the base's linears and embeddings; ``lora``: results of the adapters' A matrices;
    ``sampling``: logits and tokens; ``merging``: adapters' rows for switches, and whether these succeeded.
    """

    base: int = 0
    base_bytes: int = 0
    lora: int = 0
    lora_bytes: int = 0
    sampling: int = 0
    sampling_bytes: int = 0
    merging: int = 0
    merging_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class EngineInfo:
    """The facts of an engine that do not change while it lives.

    ``pristine_bytes``: size of the copy of the base's weights that merging needs; 0 without merging.
    ``ranks`` and ``lora_sharding``: the ranks of an engine of several processes, and how adapters are divided
    among them; both are empty for one process. ``cold_start``: the mode in which it serves.
    ``cold_start_kinds``: the ways in which a request may begin whose adapter is not on the device, as
    mode/source. ``seed``: the seed of requests that give none; None: each draws its own.
    """

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
    has_priorities: bool = False
    priority_floor: int = 0
    pristine_bytes: int = 0
    ranks: tuple[RankInfo, ...] = ()
    lora_sharding: str = ""
    cold_start: str = "wait"
    cold_start_kinds: tuple[str, ...] = ()
    seed: int | None = None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not empty, or the error's type where there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
