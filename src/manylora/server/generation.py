"""Runs one generation request from submission to its last byte, the same for completions and chat.

A route gives the engine requests (``Job``) and the form of the answer (``Shape``). This module runs and
counts the request. It ends the request when the client disconnects, the server stops or the engine dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from manylora.engine.client import CacheScopes, EngineClient, GenerationRequest
from manylora.metrics.requests import Metrics
from manylora.server.errors import ApiError, as_api_error
from manylora.server.lifecycle import Disconnected, Lifecycle
from manylora.server.logprobs import PackedLogprobs, check_packed
from manylora.server.models import Chosen
from manylora.server.requests import SamplingFields
from manylora.server.streaming import DONE, HEADERS, ChunkWriter, Usage, encode
from manylora.text import generate
from manylora.text.generate import GenerationFailed, TextDelta, TextOutput
from manylora.types import PromptLogprobs, SamplingParams, TokenLogprobs

PIECE_BYTES = 64 * 2**10
"""The size of a piece of a whole answer that is built and sent before other requests get their turn."""

_JSON = [(b"content-type", b"application/json")]


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """The parts of a server that generation routes use."""

    client: EngineClient
    lifecycle: Lifecycle
    metrics: Metrics
    scopes: CacheScopes


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """An HTTP request's engine requests, one for each prompt. Their answers are the choices ``prompt * n +
    sample``."""

    id: str
    chosen: Chosen
    requests: Sequence[GenerationRequest]
    start_s: float
    created_s: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def params(self) -> SamplingParams:
        """The parameters of every prompt, except those that depend on its length."""
        return self.requests[0].params

    @property
    def n(self) -> int:
        """The number of samples of each prompt."""
        return self.params.n

    def identity(self, kind: str) -> dict[str, Any]:
        """Return the fields that open an answer, and every chunk of one. ``kind``: OpenAI's name of what they
        open."""
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.chosen.name}


class Shape(Protocol):
    """The form of an answer on the wire. One instance serves one request."""

    def take_prompt(self, number: int, scored: PromptLogprobs) -> None:
        """Take the log-probabilities of the prompt of this number, before any of its choices."""

    def identity(self, is_chunk: bool) -> dict[str, Any]:
        """Return the fields that open every chunk, and the whole answer."""

    def opening(self, writer: ChunkWriter, usage: Usage | None) -> bytes:
        """Write the chunks that precede all others, once the first delta has arrived."""

    def chunk(self, writer: ChunkWriter, index: int, delta: TextDelta, usage: Usage | None) -> bytes:
        """Write a delta of one choice as a chunk."""

    def choice(self, index: int, output: TextOutput, logprobs: Iterable[TokenLogprobs]) -> Iterator[bytes]:
        """Write a whole choice as JSON, in pieces. Its log-probabilities are not in ``output``."""


Deltas = AsyncGenerator[tuple[int, TextDelta], None]

MAX_UNSENT_BYTES = 64 * 2**20
"""The most bytes of one stream that wait for a client which reads too slowly."""


class GenerationResponse(Response):
    """A response that runs a job while answering. Nothing is sent before the first delta, so a refusal keeps
    its status."""

    def __init__(self, service: Service, job: Job, shape: Shape, body: SamplingFields) -> None:
        super().__init__()
        options = body.stream_options
        self._is_streamed = bool(body.stream)
        self._has_usage_chunk = bool(options and options.include_usage)
        self._has_usage_always = self._has_usage_chunk and bool(options and options.continuous_usage_stats)
        self._service = service
        self._job = job
        self._shape = shape
        self._usage = Usage(sum(len(request.prompt) for request in job.requests))
        self._has_begun = False
        self._unsent: list[bytes] = []
        self._num_unsent_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        self._flow = scope["state"].get("flow")
        closing = contextlib.aclosing(self._deltas())
        try:
            # The last byte is sent outside: a client may disconnect after it, which is no interruption.
            async with self._service.lifecycle.interruptible(receive), closing as deltas:
                ending = await (self._stream if self._is_streamed else self._whole)(deltas, send)
        except Exception as error:
            known = as_api_error(error)
            if known is None or not self._has_begun:
                raise
            if not self._is_streamed:
                raise Disconnected from error  # an error cannot be written into half of an answer
            ending = b"data: " + known.body() + b"\n\n" + DONE
        if self._is_streamed or self._has_begun:
            await self._begin(send)
            ending = b"".join([*self._unsent, ending])
            self._unsent.clear()
            await send({"type": "http.response.body", "body": ending, "more_body": False})
        else:
            await Response(ending, media_type="application/json")(scope, receive, send)

    async def _deltas(self) -> Deltas:
        """Submit all prompts, and yield every choice's deltas with its index. Deltas are recorded. Raises
        GenerationFailed."""
        job, service, streams, recorders = self._job, self._service, [], []
        check_packed(job.requests, service.client.info.max_model_len, self._is_streamed)
        try:
            for request in job.requests:
                streams.append(generate.TextStream(service.client, job.chosen.text.tokenizer, request))
                recorders.append(service.metrics.request(request, job.start_s))
            if len(streams) > 1:
                await asyncio.sleep(0)  # to listen to thousands of streams takes as long as to submit them
            async with contextlib.aclosing(generate.merged(streams)) as deltas:
                async for number, delta in deltas:
                    recorders[number].observe(delta)
                    if delta.error is not None:
                        raise GenerationFailed(delta.error)
                    self._usage.count(delta)
                    if delta.prompt_logprobs is not None:  # this takes a second for a long prompt
                        await asyncio.to_thread(self._shape.take_prompt, number, delta.prompt_logprobs)
                    yield number * job.n + delta.sample, delta
        finally:
            for recorder in recorders:
                recorder.close()
            # ``merged`` closes them, too, but not where a later prompt could not be submitted.
            for stream in streams:
                await stream.aclose()

    async def _begin(self, send: Send) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = HEADERS if self._is_streamed else _JSON
            await send({"type": "http.response.start", "status": 200, "headers": list(headers)})

    async def _stream(self, deltas: Deltas, send: Send) -> bytes:
        """Send all chunks of the stream, and return its end."""
        shape, usage = self._shape, self._usage
        writer = ChunkWriter(shape.identity(is_chunk=True))
        always = usage if self._has_usage_always else None
        async for index, delta in deltas:
            data = shape.chunk(writer, index, delta, always)
            if not self._has_begun:
                await self._begin(send)
                data = shape.opening(writer, always) + data
            await self._send(data, send)
        return (writer.usage_chunk(usage) if self._has_usage_chunk else b"") + DONE

    async def _send(self, data: bytes, send: Send) -> None:
        """Send data, or keep it while the client does not read. A send would wait then, and the engine's
        deltas would pile up without a bound. Raises ApiError."""
        if self._flow is not None and self._flow.write_paused:
            self._unsent.append(data)
            self._num_unsent_bytes += len(data)
            if self._num_unsent_bytes > MAX_UNSENT_BYTES:
                self._unsent.clear()
                raise ApiError(408, f"{MAX_UNSENT_BYTES} bytes of the answer have not been read")
            return
        if self._unsent:
            data = b"".join(self._unsent) + data
            self._unsent.clear()
            self._num_unsent_bytes = 0
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _whole(self, deltas: Deltas, send: Send) -> bytes:
        """Wait for the whole answer, send it without its last piece, and return that piece."""
        job, piece = self._job, bytearray()
        outputs = [(TextOutput(index), PackedLogprobs()) for index in range(len(job.requests) * job.n)]
        async for index, delta in deltas:
            output, logprobs = outputs[index]
            logprobs.add(delta.logprobs)
            generate.add_delta(output, delta._replace(token_ids=(), logprobs=()))
        for part in self._parts(outputs):
            piece += part
            if len(piece) >= PIECE_BYTES:
                await self._begin(send)
                await send({"type": "http.response.body", "body": bytes(piece), "more_body": True})
                piece.clear()
                await asyncio.sleep(0)  # a send does not wait while the client reads
        return bytes(piece)

    def _parts(self, outputs: Sequence[tuple[TextOutput, PackedLogprobs]]) -> Iterator[bytes]:
        yield encode(self._shape.identity(is_chunk=False))[:-1] + b',"choices":['
        for index, (output, logprobs) in enumerate(outputs):
            if index:
                yield b","
            yield from self._shape.choice(index, output, logprobs)
        yield b'],"usage":%b}' % self._usage.encode()
