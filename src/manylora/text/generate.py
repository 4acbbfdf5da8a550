"""Generates text with an engine: joins an EngineClient's token deltas with a tokenizer and stop strings.

Used by the HTTP server and by the in-process classes alike; knows neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import NamedTuple, Protocol, TypeVar, cast

from manylora.engine.client import NO_TIMING, Delta, EngineClient, GenerationRequest, Timing
from manylora.text.detokenize import Detokenizer
from manylora.text.stops import StopChecker, StopStrings
from manylora.text.tokenizer import Tokenizer
from manylora.types import InvalidRequest, PromptLogprobs, RequestError, TokenLogprobs


class TextDelta(NamedTuple):
    """A Delta of one sample, with its text.

    ``text`` may be empty while characters or a possible stop string are held back. ``token_ids`` include the
    token that ended the sample, ``text`` does not. ``stop_reason`` is the stop string or the id among
    ``stop_token_ids`` that ended it. ``error`` comes with finish_reason "error" only. ``prompt_logprobs``:
    those of the request's prompt, sent before any text.
    """

    sample: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: RequestError | None = None
    timing: Timing = NO_TIMING
    prompt_logprobs: PromptLogprobs | None = None


@dataclasses.dataclass(slots=True)
class TextOutput:
    """One finished sample. Where ``prompt_logprobs`` are requested, one sample of the request has them."""

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None


class GenerationFailed(Exception):
    """An error because the engine refused or aborted a request."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


class TextStream:
    """The deltas of one request. The stream ends when all samples have ended; ``aclose`` before that aborts
    the rest."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None, request: GenerationRequest) -> None:
        """Submit the request now. Without a tokenizer all text is empty.

        Raises InvalidRequest for stop strings without a tokenizer. Iterating may raise EngineDead.
        """
        if tokenizer is None and request.params.stop:
            raise InvalidRequest("this model has no tokenizer: use stop_token_ids in place of stop", "stop")
        self._client = client
        self._request = request
        params = request.params
        stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._samples = [_Sample(tokenizer, request, stops) for _ in range(params.n)]
        self._num_open = params.n
        self._deltas = client.generate(request)

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        return self

    async def __anext__(self) -> TextDelta:
        while self._num_open:
            delta = await self._deltas.__anext__()
            sample = self._samples[delta.sample]
            if sample.is_finished:
                # The engine ran ahead of a stop string that was found here.
                continue
            out = sample.take(delta)
            if out.finish_reason is not None:
                self._num_open -= 1
                if delta.finish_reason is None:
                    self._client.abort(self._request.id, delta.sample, "stop")
            return out
        await self.aclose()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort the samples that still run. Idempotent."""
        self._num_open = 0
        # EngineClient.generate promises an iterator with ``aclose``, which AsyncIterator does not declare.
        await cast(AsyncGenerator[Delta, None], self._deltas).aclose()


class _Sample:
    """The state of one sample's text."""

    def __init__(
        self, tokenizer: Tokenizer | None, request: GenerationRequest, stops: StopStrings | None
    ) -> None:
        self._params = request.params
        self._detokenizer: Detokenizer | None = (
            tokenizer.detokenizer(request.params.skip_special_tokens, request.prompt) if tokenizer else None
        )
        self._checker = StopChecker(stops) if stops else None
        self._num_tokens = 0
        self.is_finished = False

    def take(self, delta: Delta) -> TextDelta:
        """Return the delta with its text, cut short where a stop string ends it."""
        hides_last = delta.stop_token and not self._params.include_stop_str_in_output
        num_shown = len(delta.tokens) - hides_last
        text = ""
        for position, token in enumerate(delta.tokens):
            self._num_tokens += 1
            if position < num_shown:
                text += self._add(token)
            if self._checker and self._checker.found is not None:
                self.is_finished, end = True, position + 1
                return TextDelta(
                    delta.sample, text, delta.tokens[:end], delta.logprobs[:end], "stop", self._checker.found,
                    None, delta.timing, delta.prompt_logprobs,
                )  # fmt: skip
        stop_reason: int | str | None = None
        finish_reason = delta.finish_reason
        if finish_reason is not None:
            self.is_finished = True
            tail = self._detokenizer.finish() if self._detokenizer else ""
            text += self._checker.feed(tail) + self._checker.finish() if self._checker else tail
            if self._checker and self._checker.found is not None:
                finish_reason, stop_reason = "stop", self._checker.found
            elif delta.stop_token and delta.tokens[-1] in self._params.stop_token_ids:
                stop_reason = delta.tokens[-1]
        return TextDelta(
            delta.sample, text, delta.tokens, delta.logprobs, finish_reason, stop_reason, delta.error,
            delta.timing, delta.prompt_logprobs,
        )  # fmt: skip

    def _add(self, token: int) -> str:
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.add(token)
        # Stop strings are not looked for in the text of the first min_tokens tokens.
        if self._checker is None or not text or self._num_tokens <= self._params.min_tokens:
            return text
        return self._checker.feed(text)


class TextDeltas(Protocol):
    """One request's deltas, with the interface of a TextStream."""

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        """Return the deltas in the order in which they arrive."""

    async def aclose(self) -> None:
        """Abort the samples that still run. Idempotent."""


async def collect(stream: TextDeltas, n: int) -> list[TextOutput]:
    """Wait for all ``n`` samples and return them in order. Raises GenerationFailed if any sample failed.

    Closes the stream, so that nothing goes on running for a cancelled caller.
    """
    outputs = [TextOutput(index) for index in range(n)]
    try:
        async for delta in stream:
            if delta.error is not None:
                raise GenerationFailed(delta.error)
            add_delta(outputs[delta.sample], delta)
    finally:
        await stream.aclose()
    return outputs


def add_delta(output: TextOutput, delta: TextDelta) -> None:
    """Append a delta to its sample."""
    output.text += delta.text
    output.token_ids.extend(delta.token_ids)
    output.logprobs.extend(delta.logprobs)
    if delta.prompt_logprobs is not None:
        output.prompt_logprobs = delta.prompt_logprobs
    output.finish_reason = delta.finish_reason
    output.stop_reason = delta.stop_reason


_Part = TypeVar("_Part")


async def merged(streams: Sequence[TextStream]) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Yield the deltas of all streams, each with its stream's number. Closes the streams at the end."""
    try:
        if len(streams) == 1:
            async for delta in streams[0]:
                yield 0, delta
        else:
            async with contextlib.aclosing(interleaved(streams)) as pairs:
                async for pair in pairs:
                    yield pair
    finally:
        for stream in streams:
            await stream.aclose()


async def interleaved(streams: Sequence[AsyncIterator[_Part]]) -> AsyncGenerator[tuple[int, _Part], None]:
    """Read all streams at once, each on a task of its own, and yield their parts with their numbers."""
    queue: asyncio.Queue[tuple[int, _Part] | Exception | None] = asyncio.Queue()

    async def pump(number: int, stream: AsyncIterator[_Part]) -> None:
        try:
            async for part in stream:
                queue.put_nowait((number, part))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        for _ in tasks:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
    finally:
        for task in tasks:
            task.cancel()
        # A stream must not be closed while a task still waits inside it.
        await asyncio.gather(*tasks, return_exceptions=True)
