"""What a benchmark sends requests to: an engine in this process, or (``bench.http_target``) a server.

Token ids in, token ids out. An engine in this process shares Python's lock with its client, so the client does
as little as it can for each token: it appends to a list on the driver's own thread, and no event loop wakes
before the request's end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import time
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeGuard

from manylora.config.declaring import ConfigError
from manylora.config.sections import EngineSettings
from manylora.engine.client import Delta, GenerationRequest, Timing
from manylora.engine.driver import Driver
from manylora.types import RequestId, SamplingParams

PARTS = tuple(name for name in Timing._fields if name.endswith("_s"))
"""The parts of the time to the first token that a request's first Delta tells."""


PromptKind = Literal["tokens", "text", "chat"]
Prompt = tuple[int, ...] | str | tuple[str, ...]
"""Token ids; text, for servers that take no ids; or what was said in a chat, in turn, the user first."""


def has_ids(prompt: Prompt) -> TypeGuard[tuple[int, ...]]:
    """Whether it is of token ids."""
    return not isinstance(prompt, str) and not any(isinstance(said, str) for said in prompt[:1])


@dataclasses.dataclass(frozen=True, slots=True)
class TargetRequest:
    """One request: greedy, exactly ``max_tokens`` tokens. ``adapter``: its name; None for the base."""

    prompt: Prompt
    max_tokens: int
    adapter: str | None


@dataclasses.dataclass(slots=True)
class TargetResult:
    """What came of a call. Times on ``time.monotonic``; ``first_s`` is None where no token came.

    ``itls_s``: the times between one delivery of tokens and the next; nearly always a delivery is one token.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    first_s: float | None = None
    last_s: float = 0.0
    cached_tokens: int | None = None
    """Prompt tokens that were not computed again, where the target tells."""
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    """Parts of the time to the first token, in seconds, where the target tells."""
    error: str | None = None
    itls_s: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    """Where the target writes text."""
    prompt_length: int | None = None
    reply_length: int | None = None
    """The lengths in tokens, where the target tells."""

    def delivered(self, now: float) -> None:
        """Tokens came at ``now``."""
        if self.first_s is None:
            self.first_s = now
        else:
            self.itls_s.append(now - self.last_s)
        self.last_s = now

    @property
    def num_tokens(self) -> int:
        """The tokens of the reply: its ids, or as the target tells, or as many as there were deliveries."""
        if self.tokens:
            return len(self.tokens)
        if self.reply_length is not None:
            return self.reply_length
        return 0 if self.first_s is None else 1 + len(self.itls_s)


class Target(Protocol):
    """Used from one event loop."""

    description: dict[str, Any]
    """What it is, for the report."""
    vocab_size: int | None
    max_model_len: int | None
    adapters: frozenset[str]
    """What a call can name; the base model too, by its name for clients."""

    @property
    def is_exact(self) -> bool:
        """Whether it can be told to generate so many tokens, no fewer."""

    async def generate(self, call: TargetRequest) -> TargetResult:
        """The call's answer; what goes wrong is said in it, never raised."""

    async def counters(self) -> dict[str, float]:
        """Every number that the target tells of itself, by name; empty where it tells none."""

    async def lost(self) -> str | None:
        """Why it can serve nothing any more, in a line; None while it can."""

    async def close(self) -> None:
        """Free what the target holds."""


class EngineTarget:
    """An engine on a thread of this process. Must be created inside the event loop that will use it."""

    is_exact = True

    def __init__(self, driver: Driver, base: str | None = None) -> None:
        """Takes over ``driver``, not yet started. ``base``: a name for the base model, as a server would have."""
        info = driver.info
        self.description = {"kind": "engine in process", **dataclasses.asdict(info)}
        self.vocab_size: int | None = info.vocab_size
        self.max_model_len: int | None = info.max_model_len
        named = {card.name for card in driver.adapters()}
        self._base = None if base in named else base
        self.adapters = frozenset(named if base is None else {base, *named})
        self.driver = driver
        self._loop = asyncio.get_running_loop()
        self._open: dict[RequestId, tuple[TargetResult, asyncio.Future[TargetResult]]] = {}
        self._ids = itertools.count()
        self._death: str | None = None
        gc.collect()
        gc.freeze()  # as a server does: the collector must not look through the engine during a run
        driver.start(self._deliver, self._died)

    async def generate(self, call: TargetRequest) -> TargetResult:
        """See Target."""
        if self._death is not None:
            return TargetResult(error=self._death)
        if not has_ids(call.prompt):
            return TargetResult(error="an engine in this process takes token ids")
        request = f"bench-{next(self._ids)}"
        params = SamplingParams(max_tokens=call.max_tokens, temperature=0.0, ignore_eos=True, seed=0)
        future: asyncio.Future[TargetResult] = self._loop.create_future()
        self._open[request] = (TargetResult(), future)
        adapter = None if call.adapter == self._base else call.adapter
        self.driver.submit(GenerationRequest(request, call.prompt, params, adapter))
        return await future

    def _deliver(self, deltas: list[Delta]) -> None:
        """Take the deltas, on the driver's thread, between two steps."""
        now = time.monotonic()
        ended = []
        for delta in deltas:
            answer, _ = self._open[delta.request]
            if answer.cached_tokens is None:
                answer.cached_tokens = delta.timing.num_cached_tokens
                answer.parts = {name: getattr(delta.timing, name) for name in PARTS}
            if delta.tokens:
                answer.delivered(now)
                answer.tokens.extend(delta.tokens)
            if delta.finish_reason is not None:
                answer.error = delta.error.message if delta.error else None
                ended.append(delta.request)
        if ended:
            self._loop.call_soon_threadsafe(self._wake, ended)

    def _wake(self, ended: list[RequestId]) -> None:
        for request in ended:
            answer, future = self._open.pop(request)
            if not future.done():  # such as cancelled
                future.set_result(answer)

    def _died(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._fail_all, reason)

    def _fail_all(self, reason: str) -> None:
        self._death = reason
        for answer, _ in self._open.values():
            answer.error = reason
        self._wake(list(self._open))

    async def counters(self) -> dict[str, float]:
        """All numeric fields of the records of EngineStats, whichever they have."""
        stats = await asyncio.wrap_future(self.driver.stats())
        found: dict[str, float] = {}
        for record in stats.records:
            found |= numbers_of(dataclasses.asdict(record))
        return found

    async def lost(self) -> str | None:
        """See Target."""
        return self._death

    async def close(self) -> None:
        """Abort what runs; the driver ends and frees everything."""
        await asyncio.to_thread(self.driver.close)
        gc.unfreeze()


def open_engine(settings: EngineSettings, *, shows_progress: bool = False) -> EngineTarget:
    """Load what the settings say; blocks meanwhile. Raises ConfigError."""
    from manylora.main import build_driver  # brings torch

    return EngineTarget(build_driver(settings, shows_progress=shows_progress), settings.model.name)


def numbers_of(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a nested mapping, with dots between names; lists and texts are left out."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found.update(numbers_of(value, f"{prefix}{name}."))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{name}"] = value
    return found


def check_names(target: Target, names: set[str]) -> None:
    """Raise ConfigError where the target does not serve one of these adapters."""
    missing = sorted(names - target.adapters)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        served = sorted(target.adapters)
        others = ", ..." if len(served) > 3 else ""
        known = f"served: {', '.join(served[:3])}{others}" if served else "none is served"
        raise ConfigError(
            f"the workload asks for adapter {missing[0]!r}{more}, which is not served ({known}); "
            "--adapter-name says what its adapters are called"
        )
