"""The contract of a front end with an engine, wherever the engine runs.

``EngineClient`` is the contract; ``engine.local`` runs the engine on a thread of this process and
``engine.remote`` talks to one in a child process. Token ids in, token ids out: text is not known here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

from manylora import types
from manylora.protocol.executor import ExecutorState
from manylora.reports import AdapterUse, Counters, Snapshot
from manylora.types import AdapterCard, RequestError, RequestId

_DIGEST_BYTES = 16
_PURPOSE = b"cache scopes"


class CacheScopes:
    """Scopes say which requests may share KV.

    They are made with a secret, so that a journal's scopes cannot be guessed from keys and salts.

    ``secret``: shared by all processes that must make the same scopes; None: draw one.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        secret = secrets.token_bytes(32) if secret is None else secret
        self._secret = hashlib.blake2b(secret, person=_PURPOSE, digest_size=32).digest()

    def scope(self, owner: bytes | None, salt: str | None) -> str:
        """Return the scope of an owner's requests with a salt; "", which all such requests share, for neither.

        ``owner``: the digest of an API key, always of one length. Raise InvalidRequest for an empty salt.
        """
        if salt is not None and not (isinstance(salt, str) and salt):
            raise types.InvalidRequest("cache_salt must be a non-empty string", "cache_salt")
        if owner is None and salt is None:
            return ""
        state = hashlib.blake2b(key=self._secret, digest_size=_DIGEST_BYTES)
        # One byte tells an owner from none; an owner's length is fixed, so the rest is the salt.
        state.update(b"\0" if owner is None else b"\1" + owner)
        state.update((salt or "").encode("utf-8", "surrogatepass"))
        return state.hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request by adapter *name* (None: the base model).

    With ``stream=False`` each sample's tokens may come in one Delta, at its end: less traffic where no one
    reads along. ``cache_scope``: whose KV it may reuse (see ``CacheScopes``). ``serial`` comes back in the
    request's deltas: it tells requests of one id apart, of which one has ended, or was refused, before its last
    deltas were read. ``more``: another request follows at once, and both are admitted or refused before either
    runs. ``priority``: see ``types.Request``; ``client``: the place of its API key, where there are keys.
    ``resume``, ``closed``, ``waited_s``, ``attempt``: what became of it elsewhere, see ``protocol.Arrive``;
    ``engine.ledger`` keeps account of that. ``version``: the adapter's, where others than the engine number
    versions; ``adapter`` is only what people call it then. ``eos_ids``: ends beside the model's.
    """

    id: RequestId
    prompt: tuple[int, ...]
    params: types.SamplingParams
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
    version: types.AdapterId | None = None
    eos_ids: tuple[int, ...] = ()


RELEASED = "released"
"""The finish reason of samples that another engine is to go on with."""


class Timing(NamedTuple):
    """The waits of a request, with the delta that they delayed.

    ``spread_s``: how long before these tokens were sent the first of them was ready, where they were held back.
    The rest comes with a request's first news only: ``num_cached_tokens`` of its prompt were reused; it waited
    for admission (``queue_s``), then for its adapter (``adapter_s``), then for its cached KV (``kv_s``).
    """

    spread_s: float = 0.0
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    adapter_s: float = 0.0
    kv_s: float = 0.0


NO_TIMING = Timing()


class Delta(NamedTuple):
    """New tokens of one sample of a request, in order, each once; perhaps its end.

    ``logprobs`` is empty or as long as ``tokens``. ``finish_reason`` is "stop", "length", "abort", "error" or,
    after ``Release``, "released"; ``error`` accompanies "error" only. A refused request gets one Delta with
    sample 0 and an error. ``stop_token`` tells that the last token is one of the request's stop ids
    (end-of-sequence among them): such a token counts in usage but not in the text. ``serial``, ``attempt``: the
    request's; ``start``: how many tokens the sample had before these. ``prompt_logprobs``: of all the prompt's
    tokens but the first, with or before the first token of any sample.
    """

    request: RequestId
    sample: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[types.TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_token: bool = False
    error: RequestError | None = None
    timing: Timing = NO_TIMING
    serial: int = 0
    attempt: int = 0
    start: int = 0
    prompt_logprobs: types.PromptLogprobs | None = None


@dataclasses.dataclass(slots=True)
class Meters:
    """The counts since the start that the engine keeps, not the replica."""

    adapter_read_s: float = 0.0
    adapter_read_failures: int = 0
    steps: int = 0
    step_s: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0


_NOTHING = Snapshot(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, adapters=())


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot: the gauges of this moment, what was counted since the start, and how the executor is.

    ``gauges.adapters`` are all that are served, by name, without the base. ``merged_adapter``: the name of the
    adapter whose weights are merged into the base's. ``pristine_bytes``, ``cold_start_kinds``: see EngineInfo.

    A figure of one of the four records is an attribute of the whole as well: ``stats.preemptions``.
    """

    gauges: Snapshot = _NOTHING
    counters: Counters = dataclasses.field(default_factory=Counters)
    meters: Meters = dataclasses.field(default_factory=Meters)
    executor: ExecutorState = dataclasses.field(default_factory=ExecutorState)
    merged_adapter: str | None = None
    pristine_bytes: int = 0
    cold_start_kinds: tuple[str, ...] = ()

    @property
    def records(self) -> tuple[Snapshot, Counters, Meters, ExecutorState]:
        """The four records, no two of which have a field of one name."""
        return self.gauges, self.counters, self.meters, self.executor

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            for record in self.records:
                if hasattr(record, name):
                    return getattr(record, name)
        raise AttributeError(f"EngineStats has no figure {name!r}")

    def with_adapters(self, adapters: tuple[AdapterUse, ...]) -> EngineStats:
        """Return a copy with these adapters."""
        return dataclasses.replace(self, gauges=dataclasses.replace(self.gauges, adapters=adapters))


class EngineDead(Exception):
    """An error: the engine has ended for good. The message says why."""


class EngineBusy(Exception):
    """An error: the engine takes in messages more slowly than they are sent. The message is meant for the
    sender."""


class EngineSilent(Exception):
    """An error: the engine does not answer now; the call may or may not be done."""


SILENT_S = 5.0
"""After this long without a sign of life an engine counts as not serving."""


class EngineClient(Protocol):
    """An asynchronous client; all methods are called from one event loop.

    A call that waits raises EngineDead once the engine is dead, and EngineSilent while it does not answer.
    """

    @property
    def info(self) -> types.EngineInfo:
        """The facts that never change."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Yield the request's deltas until each of its samples has finished; raise EngineDead and EngineBusy.

        Submit at once, on the call itself. Closing the iterator (``aclose``) aborts what still runs.
        """

    def abort(self, request: RequestId, sample: int | None = None, reason: str = "abort") -> None:
        """End a request, or one of its samples, early: its Delta carries ``reason``. Unknown: ignored."""

    async def add_adapter(self, name: str, path: str) -> AdapterCard:
        """Serve the adapter at ``path`` under ``name``; raise AdapterError (also for a name in use).

        A call that is cancelled before the engine has begun with it is not done.
        """

    async def remove_adapter(self, name: str) -> None:
        """Refuse new requests for it at once; return when its running ones ended and its pages are free.

        Raises AdapterError with status 404 for an unknown name.
        """

    async def adapters(self) -> tuple[AdapterCard, ...]:
        """Return all served adapters in the order in which they were added."""

    async def stats(self) -> EngineStats:
        """Return a snapshot of this moment."""

    def why_unready(self) -> str | None:
        """Return why the engine cannot serve now, if so."""

    async def wait_dead(self) -> str:
        """Return, with the reason, once the engine has died by itself (not by close)."""

    async def close(self) -> None:
        """Abort everything, end the engine and free what it holds. Idempotent."""


@runtime_checkable
class ReplacesAdapters(Protocol):
    """An engine client by which an adapter can take the place of another of its name."""

    def card(self, name: str) -> AdapterCard | None:
        """Return the adapter that the name stands for now."""

    async def replace_adapter(self, name: str, path: str) -> AdapterCard:
        """Serve the adapter at ``path`` under ``name``; requests that have come are served by the one before.
        Raises AdapterError."""
