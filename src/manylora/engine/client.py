"""What a front end may ask of an engine, wherever the engine runs.

``EngineClient`` is the contract; ``engine.local`` runs the engine on a thread of this process and
``engine.remote`` talks to one in a child process. Token ids in, token ids out: text is not known here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol, runtime_checkable

from manylora.types import (
    AdapterCard,
    AdapterId,
    EngineInfo,
    PromptLogprobs,
    RankTraffic,
    RequestError,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request by adapter *name* (None: the base model).

    With ``stream=False`` each sample's tokens may come in one Delta, at its end: less traffic where no one reads
    along. ``cache_scope``: whose KV it may reuse (see ``engine.scopes``). ``serial`` comes back in the request's
    deltas: it tells requests of one id apart, of which one has ended, or was refused, before its last deltas
    were read. ``more``: another request follows at once, and both are admitted or refused before
    either runs. ``priority``: see ``types.Request``; ``client``: the place of its API key, where there are keys.
    ``resume``, ``closed``, ``waited_s``, ``attempt``: what became of it elsewhere, see ``protocol.Arrive``;
    ``engine.ledger`` keeps account of that. ``version``: the adapter's, where others than the engine number
    versions; ``adapter`` is only what people call it then. ``eos_ids``: ends beside the model's.
    """

    id: RequestId
    prompt: tuple[int, ...]
    params: SamplingParams
    adapter: str | None = None
    stream: bool = True
    cache_scope: str = ""
    serial: int = 0
    more: bool = False
    priority: int = 0
    client: int = 0
    resume: tuple[tuple[int, ...], ...] = ()
    closed: tuple[int, ...] = ()
    waited_s: float = 0.0
    attempt: int = 0
    version: AdapterId | None = None
    eos_ids: tuple[int, ...] = ()


RELEASED = "released"
"""The finish reason of samples that another engine is to go on with."""


class Delta(NamedTuple):
    """News of one sample of a request: new tokens, in order, each once; perhaps its end.

    ``logprobs`` is empty or as long as ``tokens``. ``finish_reason`` is "stop", "length", "abort", "error" or,
    after ``withdraw``, "released"; ``error`` accompanies "error" only. A refused request gets one Delta with
    sample 0 and an error.
    ``stop_token`` tells that the last token is one of the request's stop ids (end-of-sequence among them):
    such a token counts in usage but not in the text. ``at_s``: the engine's monotonic clock when the tokens
    were ready; ``spread_s``: how long before that the first of them was, where they were held back;
    ``serial``, ``attempt``: the request's; ``start``: how many tokens the sample had before these. What comes with
    a request's first Delta only: ``num_cached_tokens``, and how long it waited for admission (``queue_s``), then
    for its adapter (``adapter_s``), then for its cached KV (``kv_s``). ``prompt_logprobs``: of all the prompt's
    tokens but the first, with or before the first token of any sample.
    """

    request: RequestId
    sample: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_token: bool = False
    error: RequestError | None = None
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    adapter_s: float = 0.0
    kv_s: float = 0.0
    at_s: float = 0.0
    spread_s: float = 0.0
    serial: int = 0
    attempt: int = 0
    start: int = 0
    prompt_logprobs: PromptLogprobs | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterLoad:
    """One adapter at this moment (true residency, not activity).

    ``state`` on the device: absent, loading, resident or saving; ``host_state``: none, filling or held.
    ``num_pages``: what it takes when resident; ``history_pages``: idle KV pages on the device, computed under it.
    """

    name: str
    state: str
    num_pages: int
    rank: int
    running: int
    waiting: int
    host_state: str = "none"
    history_pages: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ClientShare:
    """What a client of ``--fairness vtc`` was served: ``name`` is an adapter's, the base's, or a key's place.

    ``service``: weighted tokens. ``counter``: service over the client's share, and what it was lifted by.
    """

    name: str
    service: int
    counter: float


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterCredit:
    """What an adapter (``name``; the base's where it is that) may be paid or has to pay under ``--merge dlora``:
    seconds for which one request is held back."""

    name: str
    credit_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot: gauges of this moment and counters since the engine started.

    Pages of the device by use add up to ``pages_total``; of them ``pages_loading`` and ``pages_saving`` are
    being copied. ``invalid_pages``: KV on the device whose adapter is not there. ``host_pages_pinned`` rises
    for a while after the start; until then copies are slower, and steps beside them. ``merged_adapter``: the
    name of the adapter whose weights are merged into the base's; ``pristine_bytes``: what a copy of the base's own
    takes. ``switches_merged`` and ``switches_base`` took effect; ``paused_s`` sums over sequences.
    ``cold_starts``: requests whose adapter was not on the device when they were admitted, by mode and source with
    a slash between, such as "wait/host"; ``cold_start_kinds``: all that there may come to be. ``traffic``: of each
    rank, where the engine has several.
    """

    num_running: int = 0
    num_waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_running: int = 0
    pages_history: int = 0
    pages_adapters: int = 0
    pages_loading: int = 0
    pages_saving: int = 0
    invalid_pages: int = 0
    host_pages_total: int = 0
    host_pages_free: int = 0
    host_pages_history: int = 0
    host_pages_adapters: int = 0
    host_pages_pinned: int = 0
    base_running: int = 0
    base_waiting: int = 0
    adapters: tuple[AdapterLoad, ...] = ()
    clients: tuple[ClientShare, ...] = ()
    merged_adapter: str | None = None
    merge_alpha: float | None = None
    merge_beta: float | None = None
    credits: tuple[AdapterCredit, ...] = ()
    pristine_bytes: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    kv_hit_tokens_device: int = 0
    kv_hit_tokens_host: int = 0
    adapter_hits_device: int = 0
    adapter_hits_host: int = 0
    adapter_misses: int = 0
    preemptions: int = 0
    adapter_reads: int = 0
    adapter_read_failures: int = 0
    adapter_read_s: float = 0.0
    adapter_store_hits: int = 0
    adapter_store_misses: int = 0
    adapter_store_bytes: int = 0
    adapter_evictions: int = 0
    history_evictions: int = 0
    history_drops: int = 0
    host_evictions: int = 0
    prefetches: int = 0
    pages_swapped_in: int = 0
    pages_swapped_out: int = 0
    swap_in_s: float = 0.0
    swap_out_s: float = 0.0
    swaps_failed: int = 0
    adapter_limit_overtaken: int = 0
    invalid_share_sum: float = 0.0
    invalid_share_samples: int = 0
    steps_merged: int = 0
    switches_merged: int = 0
    switches_base: int = 0
    switches_failed: int = 0
    merge_switch_s: float = 0.0
    paused_s: float = 0.0
    longest_pause_s: float = 0.0
    cold_starts: dict[str, int] = dataclasses.field(default_factory=dict)
    cold_start_kinds: tuple[str, ...] = ()
    cold_start_stall_s: float = 0.0
    cold_start_hidden_s: float = 0.0
    cold_start_expected_s: float = 0.0
    cold_answer_s: float = 0.0
    cold_answer_expected_s: float = 0.0
    cpu_lora_s: float = 0.0
    spoilt_rows: int = 0
    steps: int = 0
    step_s: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    traffic: tuple[RankTraffic, ...] = ()


class EngineDead(Exception):
    """The engine is gone; nothing more will come from it. The message says why."""


class EngineBusy(Exception):
    """The engine does not take in what it is sent as fast as it is sent; the message is meant for the sender."""


class EngineSilent(Exception):
    """The engine does not answer at the moment; whether what was asked for is done is not known."""


SILENT_S = 5.0
"""What has given no sign of life for so long serves nothing at the moment."""


class EngineClient(Protocol):
    """Asynchronous; all methods are called from one event loop.

    What waits for an answer raises EngineDead once the engine is dead, EngineSilent while it says nothing.
    """

    @property
    def info(self) -> EngineInfo:
        """Facts that never change."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """The request's deltas until each of its samples has finished; raises EngineDead and EngineBusy.

        Submits at once, on the call itself. Closing the iterator (``aclose``) aborts what still runs.
        """

    def abort(self, request: RequestId, sample: int | None = None, reason: str = "abort") -> None:
        """End a request, or one of its samples, early: its Delta carries ``reason``. Unknown: ignored."""

    async def add_adapter(self, name: str, path: str) -> AdapterCard:
        """Serve the adapter at ``path`` under ``name``; raises AdapterError (duplicate name included).

        Cancelled before the engine has begun with it, it is not done.
        """

    async def remove_adapter(self, name: str) -> None:
        """Refuse new requests for it at once; return when its running ones ended and its pages are free.

        Raises AdapterError with status 404 for an unknown name.
        """

    async def adapters(self) -> tuple[AdapterCard, ...]:
        """All served adapters in the order they were added."""

    async def stats(self) -> EngineStats:
        """A snapshot of this moment."""

    def why_unready(self) -> str | None:
        """Why nothing can be served at the moment; None where it can."""

    async def wait_dead(self) -> str:
        """Return, with the reason, once the engine has died by itself (not by close)."""

    async def close(self) -> None:
        """Abort everything, end the engine and free what it holds. Idempotent."""


@runtime_checkable
class ReplacesAdapters(Protocol):
    """An engine client by which an adapter can take the place of another of its name."""

    def card(self, name: str) -> AdapterCard | None:
        """The adapter that the name stands for now."""

    async def replace_adapter(self, name: str, path: str) -> AdapterCard:
        """Serve the adapter at ``path`` under ``name``; requests that have come are served by the one before.
        Raises AdapterError."""


class ClusterEngine(EngineClient, Protocol):
    """An engine that is one of several for the same requests."""

    def withdraw(self, request: RequestId, attempt: int = 0) -> None:
        """Let this attempt at a request go, for another engine to go on with: its open samples end as RELEASED,
        after the tokens of the steps in flight. Unknown: ignored."""

    async def add_adapter(self, name: str, path: str, adapter: AdapterId | None = None) -> AdapterCard:
        """See EngineClient. ``adapter``: the version's id where all engines are to have the same; never given
        twice."""
