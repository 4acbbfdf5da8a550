"""An engine that answers at once with tokens that a test can foretell."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
import time
from collections.abc import AsyncIterator, Callable

from manylora.engine.client import (
    Delta,
    EngineDead,
    EngineStats,
    GenerationRequest,
    Meters,
    Timing,
)
from manylora.protocol.executor import AdapterError, ExecutorState
from manylora.reports import AdapterUse, Counters, Snapshot
from manylora.types import AdapterCard, EngineInfo, PromptLogprobs, RequestError, TokenLogprobs

VOCAB_SIZE = 420
EOS = 1
MAX_MODEL_LEN = 256
# A prompt that starts with this token is refused by the engine itself, as one larger than the pool is.
TOO_LARGE = 419

Script = Callable[[GenerationRequest, int], list[int]]


def plain_tokens(request: GenerationRequest, sample: int) -> list[int]:
    """Printable ASCII of the byte-level alphabet; differs by prompt, adapter and sample."""
    start = sum(request.prompt) + 7 * len(request.adapter or "") + sample
    count = 8 if request.params.max_tokens is None else request.params.max_tokens
    return [39 + (start + i) % 25 for i in range(count)]


class FakeEngine:
    """An EngineClient. ``script`` gives the tokens, ``delay_s`` comes before each step.

    While ``is_held`` a stream gives its first tokens and no more.
    """

    def __init__(self, script: Script = plain_tokens, delay_s: float = 0.0, tokens_per_step: int = 1) -> None:
        self.info = EngineInfo(
            model="base", max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, eos_ids=(EOS,), num_pages=100,
            page_tokens=16, page_bytes=4096, device="cpu", dtype="float32", max_num_seqs=32,
            max_batch_tokens=512, num_host_pages=60,
        )  # fmt: skip
        self.script = script
        self.delay_s = delay_s
        self.tokens_per_step = tokens_per_step
        self.is_held = False
        self.running: dict[str, FakeStream] = {}
        self.requests: list[GenerationRequest] = []
        self.aborts: list[tuple[str, int | None, str]] = []
        self.cards: dict[str, AdapterCard] = {}
        self.holds_loads = False
        self.loads: list[str] = []
        self.withdrawn: list[str] = []
        self.is_closed = False
        self.trouble: str | None = None
        self._ids = itertools.count(1)
        self._death: asyncio.Future[str] | None = None
        self._reason: str | None = None

    def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        if self._reason is not None:
            raise EngineDead(self._reason)
        assert request.id not in self.running, "request ids must be unique among live requests"
        self.requests.append(request)
        stream = FakeStream(self, request)
        self.running[request.id] = stream
        return stream

    def abort(self, request: str, sample: int | None = None, reason: str = "abort") -> None:
        self.aborts.append((request, sample, reason))
        if request in self.running:
            self.running[request].abort(sample, reason)

    async def add_adapter(self, name: str, path: str) -> AdapterCard:
        self._check_alive()
        if name in self.cards:
            raise AdapterError(f"adapter '{name}' is already served")
        self.loads.append(name)
        try:
            while self.holds_loads:
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.withdrawn.append(name)
            raise
        if "broken" in path:
            raise AdapterError(f"{path}: adapter_model.safetensors is truncated")
        card = AdapterCard(name, path, next(self._ids), 8, 3, int(time.time()), "resident")
        self.cards[name] = card
        return card

    async def remove_adapter(self, name: str) -> None:
        self._check_alive()
        if self.cards.pop(name, None) is None:
            raise AdapterError(f"adapter '{name}' is not served", 404)
        while any(stream.request.adapter == name for stream in self.running.values()):
            await asyncio.sleep(0.005)

    async def adapters(self) -> tuple[AdapterCard, ...]:
        self._check_alive()
        return tuple(self.cards.values())

    async def stats(self) -> EngineStats:
        self._check_alive()
        uses = tuple(
            AdapterUse(
                card.id,
                card.state,
                card.num_pages,
                self._num_running(card.name),
                0,
                "held",
                5,
                card.name,
                card.rank,
            )
            for card in self.cards.values()
        )
        gauges = Snapshot(
            num_running=len(self.running), num_waiting=2, pages_total=100, pages_free=50, pages_running=20,
            pages_history=21, pages_adapters=9, pages_loading=3, pages_saving=1, invalid_pages=7,
            host_pages_total=60, host_pages_free=30, host_pages_history=18, host_pages_adapters=12,
            adapters=uses,
        )  # fmt: skip
        counters = Counters(
            prefix_queries_tokens=11, preemptions=4, adapter_reads=6, kv_hit_tokens_device=32,
            kv_hit_tokens_host=16, adapter_hits_device=8, adapter_hits_host=5, adapter_misses=2,
            pages_swapped_in=10, pages_swapped_out=20, swap_in_s=0.5, swap_out_s=0.25, swaps_failed=1,
            history_drops=9, host_evictions=13, prefetches=14, invalid_share_sum=1.5, invalid_share_samples=6,
        )  # fmt: skip
        state = ExecutorState(44, 0.0)
        return EngineStats(gauges, counters, Meters(prompt_tokens=123, generated_tokens=45), state)

    def why_unready(self) -> str | None:
        return self.trouble

    async def wait_dead(self) -> str:
        if self._reason is None:
            self._death = asyncio.get_running_loop().create_future()
            return await self._death
        return self._reason

    async def close(self) -> None:
        self.is_closed = True

    def die(self, reason: str = "killed by signal 9", silently: bool = False) -> None:
        """End as a killed engine process does; ``silently``: without telling the streams."""
        self._reason = reason
        if self._death is not None and not self._death.done():
            self._death.set_result(reason)
        if not silently:
            for stream in self.running.values():
                stream.wake()

    @property
    def death_reason(self) -> str | None:
        return self._reason

    def _num_running(self, name: str) -> int:
        return sum(stream.request.adapter == name for stream in self.running.values())

    def _check_alive(self) -> None:
        if self._reason is not None:
            raise EngineDead(self._reason)


class FakeStream:
    """The deltas of one request, one sample after the other in each step."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest) -> None:
        self.engine = engine
        self.request = request
        self.tokens = {i: engine.script(request, i) for i in range(request.params.n)}
        self.sent = dict.fromkeys(self.tokens, 0)
        self.ready: list[Delta] = []
        self.is_first = True
        self.woken = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        engine, request = self.engine, self.request
        if request.adapter is not None and request.adapter not in engine.cards and self.is_first:
            return self._refuse(RequestError(404, f"The model `{request.adapter}` does not exist.", "model"))
        if request.prompt[0] == TOO_LARGE and self.is_first:
            return self._refuse(RequestError(400, "the request needs 200 pages; the pool has 100", "prompt"))
        while not self.ready:
            if engine.death_reason is not None and self.woken.is_set():
                raise EngineDead(engine.death_reason)
            if not self.tokens:
                engine.running.pop(request.id, None)
                raise StopAsyncIteration
            await self._step()
        return self.ready.pop(0)

    async def aclose(self) -> None:
        if self.tokens and self.request.id in self.engine.running:
            self.engine.aborts.append((self.request.id, None, "closed"))
        self.tokens.clear()
        self.engine.running.pop(self.request.id, None)

    def wake(self) -> None:
        self.woken.set()

    def abort(self, sample: int | None, reason: str) -> None:
        for i in [i for i in self.tokens if sample in (None, i)]:
            del self.tokens[i]
            self.ready.append(Delta(self.request.id, i, finish_reason=reason))

    async def _step(self) -> None:
        await self._pass_s(self.engine.delay_s)
        while self.engine.is_held and not (self.is_first or self.ready or self.woken.is_set()):
            await self._pass_s(0.005)
        if self.ready or self.woken.is_set():
            return
        if self.engine.death_reason is not None:
            # A silent death: nothing more ever comes.
            await self.woken.wait()
        for i in list(self.tokens):
            self.ready.append(self._delta(i))

    async def _pass_s(self, seconds: float) -> None:
        """Or less, when woken."""
        with contextlib.suppress(TimeoutError):
            await (asyncio.wait_for(self.woken.wait(), seconds) if seconds else asyncio.sleep(0))

    def _delta(self, sample: int) -> Delta:
        start = self.sent[sample]
        tokens = self.tokens[sample][start : start + self.engine.tokens_per_step]
        self.sent[sample] += len(tokens)
        params = self.request.params
        is_stop = bool(tokens) and not params.ignore_eos and tokens[-1] == EOS
        is_stop = is_stop or (bool(tokens) and tokens[-1] in params.stop_token_ids)
        reason = None
        if is_stop or self.sent[sample] == len(self.tokens[sample]):
            reason = "stop" if is_stop else "length"
            del self.tokens[sample]
        delta = Delta(self.request.id, sample, tuple(tokens), self._logprobs(tokens), reason, is_stop)
        if self.is_first:
            self.is_first = False
            delta = delta._replace(timing=Timing(0.0, 2, 1.0, 2.0, 4.0))
            delta = delta._replace(prompt_logprobs=self._prompt_logprobs())
        return delta

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        """Of token t: -t / 64, rank t, and alternatives t, t + 1 and so on, the third of which is impossible."""
        num_top = self.request.params.prompt_logprobs
        if num_top is None:
            return None
        packed = b""
        for token in self.request.prompt[1:]:
            values = [-token / 64 - k if k < 2 else float("-inf") for k in range(num_top)]
            packed += struct.pack("=fi", -token / 64, token) + struct.pack(f"={num_top}f", *values)
            packed += struct.pack(f"={num_top}i", *range(token, token + num_top))
        return PromptLogprobs(num_top, packed)

    def _logprobs(self, tokens: list[int]) -> tuple[TokenLogprobs, ...]:
        num_top = self.request.params.logprobs
        if num_top is None:
            return ()
        return tuple(
            TokenLogprobs(
                token, -0.5, tuple((token + k, -0.5 - k if k < 3 else float("-inf")) for k in range(num_top))
            )
            for token in tokens
        )

    def _refuse(self, error: RequestError) -> Delta:
        self.is_first = False
        self.tokens.clear()
        return Delta(self.request.id, 0, finish_reason="error", error=error)
