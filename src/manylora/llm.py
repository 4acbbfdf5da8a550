"""Defines ``LLM`` and ``AsyncLLM``: the engine inside the calling process, for scripts and for other servers.

Owns the Python interface and the life of an in-process engine. ``engine`` and ``text`` do the work.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from manylora.aliases import check_removed
from manylora.config.declaring import ConfigError
from manylora.engine.client import CacheScopes, EngineDead, EngineStats, GenerationRequest
from manylora.engine.driver import Driver
from manylora.engine.local import LocalEngine
from manylora.flags import build_settings
from manylora.metrics.requests import Metrics, RecordedStream
from manylora.outputs import RequestOutput, StreamOutput, result_of
from manylora.text.chat import render_chat
from manylora.text.generate import GenerationFailed, TextStream, collect, interleaved
from manylora.text.prompts import check_priority, encode_texts, fit_params, require_tokenizer
from manylora.text.texts import ModelText, Texts
from manylora.text.tokenizer import Tokenizer
from manylora.types import AdapterCard, EngineInfo, InvalidRequest, SamplingParams

Prompt = str | Sequence[int]
Adapter = str | None
Salt = str | None
Priority = int | None
Message = Mapping[str, Any]
_Result = TypeVar("_Result")


@dataclasses.dataclass(slots=True)
class _Job:
    """A prompt that is being answered."""

    request: GenerationRequest
    prompt: str | None
    tokenizer: Tokenizer | None


class Generation:
    """The result of ``AsyncLLM.generate``: ``await`` it for all results, or iterate over it for their growing
    parts."""

    def __init__(self, llm: AsyncLLM, jobs: Callable[[], Coroutine[Any, Any, list[_Job]]]) -> None:
        self._llm = llm
        self._jobs = jobs

    def __await__(self) -> Generator[Any, Any, list[RequestOutput]]:
        return self._all().__await__()

    async def _all(self) -> list[RequestOutput]:
        return await self._llm._collect(await self._jobs())

    async def __aiter__(self) -> AsyncIterator[StreamOutput]:
        jobs = await self._jobs()
        for job in jobs:
            job.request = dataclasses.replace(job.request, stream=True)
        streams = [self._llm._parts(index, job) for index, job in enumerate(jobs)]
        async with contextlib.aclosing(interleaved(streams)) as parts:
            async for _, part in parts:
                yield part


class AsyncLLM:
    """An engine in this process for asyncio programs. Its settings are the command line's, with underscores.

    Use it inside one event loop. ``await close()``, ``async with`` or garbage collection free everything.
    """

    def __init__(
        self,
        model: str,
        adapters: Mapping[str, str] | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        **settings: Any,
    ) -> None:
        from manylora.main import build_driver, load_texts

        check_removed(settings)
        values = {**settings, "model": model, "device": device, "dtype": dtype}
        if adapters:
            if taken := next((name for name in adapters if "=" in name), None):
                raise ConfigError(f"an adapter's name must hold no '=', got {taken!r}")
            values["adapter"] = [f"{name}={path}" for name, path in adapters.items()]
        engine, http = build_settings(values)
        self._texts: Texts = load_texts(engine.model)
        self._driver: Driver = build_driver(engine)
        self._engine: LocalEngine | None = None
        self._ids = itertools.count()
        self._scopes = CacheScopes()
        self._metrics = Metrics(engine.model.name, self._driver.info)
        self._max_waiting = http.max_waiting  # a server refuses requests beyond it; here they wait
        self._rooms: tuple[asyncio.AbstractEventLoop | None, asyncio.Semaphore] = (None, asyncio.Semaphore())
        self._pid = os.getpid()
        # Ends the driver's thread and frees the pool even where close() is never called.
        self._finalizer = weakref.finalize(self, self._driver.close)
        self._finalizer.atexit = False  # ``_end_all`` closes it instead
        _open.add(self._driver)

    # ------------------------------------------------------------ generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        adapter: Adapter | Sequence[Adapter] = None,
        cache_salt: Salt | Sequence[Salt] = None,
        priority: Priority | Sequence[Priority] = None,
    ) -> Generation:
        """Complete prompts (text or token ids), each with its adapter (None: the base).

        ``await`` the result for a list in prompt order, or ``async for`` it for StreamOutput. Only prompts of
        the same ``cache_salt`` share KV. Prompts of a lower ``priority`` go first, where the engine has
        priorities (``scheduling_policy="priority"``). Raises InvalidRequest, before anything runs, where one
        of the prompts cannot be served. An empty text is such a prompt; a lone beginning-of-text token can be
        given as token ids. Any number of prompts may be given: the engine gets ``max_waiting`` at a time.
        """
        given = _Given(params, adapter, cache_salt, priority)
        return Generation(self, lambda: self._jobs(_as_prompts(prompts), given))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, adapter: Adapter = None,
        cache_salt: Salt = None, priority: Priority = None,
    ) -> AsyncIterator[StreamOutput]:  # fmt: skip
        """Complete one prompt, and yield its output as it grows. Raises InvalidRequest."""
        return self.generate([prompt], params, adapter, cache_salt, priority).__aiter__()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        adapter: Adapter | Sequence[Adapter] = None,
        cache_salt: Salt | Sequence[Salt] = None,
        priority: Priority | Sequence[Priority] = None,
    ) -> Generation:
        """Complete one conversation, or several, through the model's chat template, like ``generate``."""
        given = _Given(params, adapter, cache_salt, priority)
        return Generation(self, lambda: self._chat_jobs(messages, given))

    async def _chat_jobs(self, messages: Any, given: _Given) -> list[_Job]:
        self._check_process()
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        texts = await self._texts_of(given, len(conversations))
        prompts: list[Prompt] = [
            render_chat(require_tokenizer(text.tokenizer, "messages"), list(conversation))
            for conversation, text in zip(conversations, texts)
        ]
        return await self._jobs(prompts, given, add_special_tokens=False)

    async def _texts_of(self, given: _Given, count: int) -> list[ModelText]:
        """Return the text side of each prompt's model. Raises InvalidRequest where no adapter has a given
        name."""
        served: dict[Any, AdapterCard | None] = {card.name: card for card in self._driver.adapters()}
        served[None] = None
        adapters = [adapter for _, adapter, _, _ in given.spread(count)]
        for adapter in adapters:
            if adapter not in served:
                raise InvalidRequest(f"no adapter named {adapter!r} is loaded", "adapter")
        return [await self._texts.of(served[adapter]) for adapter in adapters]

    async def _jobs(
        self, prompts: list[Prompt], given: _Given, add_special_tokens: bool = True
    ) -> list[_Job]:
        """Check all prompts and parameters, and build a job for each. Raises InvalidRequest."""
        self._check_process()
        texts = await self._texts_of(given, len(prompts))
        jobs, info, adds = [], self.info, add_special_tokens
        of_each = given.spread(len(prompts))
        for prompt, text, (params, adapter, salt, priority) in zip(prompts, texts, of_each):
            scope, priority = self._scopes.scope(None, salt), check_priority(priority, info)
            if params is None:
                params = SamplingParams(**text.defaults)
            if not isinstance(params, SamplingParams):
                raise InvalidRequest("params must be SamplingParams or a list of them", "params")
            if isinstance(prompt, str):
                (ids,) = await encode_texts(text.tokenizer, [prompt], add_special_tokens=adds, info=info)
            else:
                ids = tuple(prompt)
            params = fit_params(ids, params, info, is_max_tokens_explicit=False)
            name, ends = f"llm-{next(self._ids)}", text.eos_ids
            request = GenerationRequest(
                name, ids, params, adapter, bool(params.stop), scope, priority=priority, eos_ids=ends
            )
            jobs.append(_Job(request, prompt if isinstance(prompt, str) else None, text.tokenizer))
        return jobs

    async def _collect(self, jobs: list[_Job]) -> list[RequestOutput]:
        """Run any number of jobs, and return the results in their order. The engine gets ``max_waiting`` jobs
        at a time. Raises the first failure, and cancels the other running jobs then."""
        room = self._room()
        streams: list[RecordedStream] = []
        running: list[asyncio.Task[RequestOutput]] = []
        has_failed = False

        def ended(task: asyncio.Task[RequestOutput]) -> None:
            nonlocal has_failed
            room.release()
            has_failed = has_failed or task.cancelled() or task.exception() is not None

        try:
            for job in jobs:
                # Jobs are submitted at once while there is room, so that jobs of one call start together.
                await room.acquire()
                with contextlib.ExitStack() as undo:
                    undo.callback(room.release)
                    if has_failed:
                        break
                    streams.append(self._submitted(job))
                    running.append(asyncio.create_task(self._finished(job, streams[-1])))
                    undo.pop_all()
                running[-1].add_done_callback(ended)
            return list(await asyncio.gather(*running))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for stream in streams:
                await stream.aclose()

    def _submitted(self, job: _Job) -> RecordedStream:
        asked, start_s = job.request, time.perf_counter()
        stream = TextStream(self._connected(), job.tokenizer, asked)
        return RecordedStream(stream, self._metrics.request(asked, start_s))

    def _room(self) -> asyncio.Semaphore:
        """Return the semaphore that bounds the submitted prompts of all calls on this event loop."""
        loop = asyncio.get_running_loop()
        if self._rooms[0] is not loop:
            self._rooms = loop, asyncio.Semaphore(self._max_waiting)
        return self._rooms[1]

    async def _finished(self, job: _Job, stream: RecordedStream) -> RequestOutput:
        outputs = await collect(stream, job.request.params.n)
        return result_of(job.request, job.prompt, outputs, job.tokenizer)

    async def _parts(self, index: int, job: _Job) -> AsyncIterator[StreamOutput]:
        """Submit a job when there is room, and yield the parts of its results."""
        async with self._room(), contextlib.aclosing(self._submitted(job)) as stream:
            async for delta in stream:
                if delta.error is not None:
                    raise GenerationFailed(delta.error)
                timing = delta.timing
                yield StreamOutput(
                    job.request.id, index, delta.sample, delta.text, delta.token_ids, delta.finish_reason,
                    timing.num_cached_tokens, timing.queue_s, timing.adapter_s, timing.kv_s,
                )  # fmt: skip

    # ------------------------------------------------------------ adapters, facts, end

    async def add_adapter(self, name: str, path: str) -> AdapterCard:
        """Serve the PEFT adapter in folder ``path`` as ``name``. Raises AdapterError."""
        return await self._connected().add_adapter(name, str(path))

    async def remove_adapter(self, name: str) -> None:
        """Refuse new requests for the adapter, and wait until its running ones have ended and its pages are
        free."""
        await self._connected().remove_adapter(name)
        self._metrics.forget(name)

    async def adapters(self) -> tuple[AdapterCard, ...]:
        """List all served adapters."""
        return self._driver.adapters()

    async def stats(self) -> EngineStats:
        """Return the engine's gauges and counters of this moment."""
        return await self._connected().stats()

    async def metrics(self) -> dict[str, float]:
        """Return the values that a server's ``/metrics`` would show for this engine, by name with labels."""
        return await asyncio.to_thread(self._metrics.figures, await self.stats())

    @property
    def info(self) -> EngineInfo:
        """The engine's fixed facts: context length, pages, device, dtype."""
        return self._driver.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self._texts.base.tokenizer

    def _check_process(self) -> None:
        """Raise EngineDead in a process that was forked from the engine's: it has no thread of the engine."""
        if os.getpid() != self._pid:
            raise EngineDead("the engine is in another process: make an LLM after the fork, in the child")

    def _connected(self) -> LocalEngine:
        self._check_process()
        if not self._finalizer.alive:
            raise EngineDead("the engine was closed")
        if self._engine is None:
            self._engine = LocalEngine(self._driver)
        return self._engine

    async def close(self) -> None:
        """Abort all requests and free everything. It may be called repeatedly: every caller waits for the end."""
        if os.getpid() != self._pid:
            return
        self._finalizer.detach()
        if self._engine is not None:
            await self._engine.close()
        else:
            self._driver.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class LLM:
    """An engine in this process for plain scripts: ``AsyncLLM`` behind blocking calls.

    Starts threads. It starts processes only for ``tensor_parallel_size`` above 1 (its ranks), for the CPU's
    workers of ``cold_start``, and on CUDA, while it opens, to compile kernels. ``close()``, ``with`` or
    garbage collection free everything.
    """

    def __init__(
        self,
        model: str,
        adapters: Mapping[str, str] | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        **settings: Any,
    ) -> None:
        self._llm = AsyncLLM(model, adapters, device=device, dtype=dtype, **settings)
        self._loop = asyncio.new_event_loop()
        # The loop would not wait for an executor of its own when it is closed.
        workers = concurrent.futures.ThreadPoolExecutor(thread_name_prefix="manylora-llm-work")
        self._loop.set_default_executor(workers)
        self._thread = threading.Thread(target=self._loop.run_forever, name="manylora-llm", daemon=True)
        self._thread.start()
        self._has_ended = threading.Event()
        self._finalizer = weakref.finalize(
            self, _end, self._has_ended, self._llm, self._loop, self._thread, workers
        )
        self._finalizer.atexit = False

    def _wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        try:
            self._llm._check_process()
            _wait_at_exit()
            if not self._finalizer.alive:
                raise EngineDead("the engine was closed")
        except EngineDead:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # such as KeyboardInterrupt: abort the request
            _wait_at_exit()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        adapter: Adapter | Sequence[Adapter] = None,
        cache_salt: Salt | Sequence[Salt] = None,
        priority: Priority | Sequence[Priority] = None,
    ) -> list[RequestOutput]:
        """Complete prompts (text or token ids), each with its adapter (None: the base). Returns results in
        prompt order.

        Prompts of a lower ``priority`` go first, where the engine has priorities. Raises InvalidRequest,
        before anything runs, where one of the prompts cannot be served.
        """
        return self._wait(self._llm.generate(prompts, params, adapter, cache_salt, priority)._all())

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        adapter: Adapter | Sequence[Adapter] = None,
        cache_salt: Salt | Sequence[Salt] = None,
        priority: Priority | Sequence[Priority] = None,
    ) -> list[RequestOutput]:
        """Complete one conversation, or several, through the model's chat template, like ``generate``."""
        return self._wait(self._llm.chat(messages, params, adapter, cache_salt, priority)._all())

    def add_adapter(self, name: str, path: str) -> AdapterCard:
        """Serve the PEFT adapter in folder ``path`` as ``name``. Raises AdapterError."""
        return self._wait(self._llm.add_adapter(name, path))

    def remove_adapter(self, name: str) -> None:
        """Refuse new requests for the adapter, and wait until its running ones have ended and its pages are
        free."""
        self._wait(self._llm.remove_adapter(name))

    def adapters(self) -> tuple[AdapterCard, ...]:
        """List all served adapters."""
        return self._wait(self._llm.adapters())

    def stats(self) -> EngineStats:
        """Return the engine's gauges and counters of this moment."""
        return self._wait(self._llm.stats())

    def metrics(self) -> dict[str, float]:
        """Return the values that a server's ``/metrics`` would show for this engine, by name with labels."""
        return self._wait(self._llm.metrics())

    @property
    def info(self) -> EngineInfo:
        """The engine's fixed facts: context length, pages, device, dtype."""
        return self._llm.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self._llm.tokenizer

    def close(self) -> None:
        """Abort all requests and free everything. It may be called repeatedly: every caller waits for the end."""
        self._finalizer()
        if threading.current_thread() is not self._thread:
            self._has_ended.wait()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(
    has_ended: threading.Event,
    llm: AsyncLLM,
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    workers: concurrent.futures.ThreadPoolExecutor,
) -> None:
    """Shut down, then set ``has_ended``."""
    with contextlib.ExitStack() as last:
        last.callback(has_ended.set)
        if os.getpid() != llm._pid:
            return  # a forked process has neither the loop nor its thread
        llm._finalizer()
        if thread is threading.current_thread():
            # The garbage collector may run on the loop's own thread, which must not wait for itself.
            loop.stop()
            return
        asyncio.run_coroutine_threadsafe(_release_waiting(llm), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        with contextlib.suppress(RuntimeError):  # the garbage collector may run on one of these threads, too
            workers.shutdown()


async def _release_waiting(llm: AsyncLLM) -> None:
    """Fail every waiting task because the engine was closed, and wait until the tasks have ended."""
    if llm._engine is not None:
        llm._engine.disconnect("the engine was closed")
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


# ---------------------------------------------------------------- what callers write


_RAW = bytes | bytearray | memoryview


def _as_prompts(prompts: Any) -> list[Prompt]:
    """Make a list of one prompt or several, each text or token ids, whose values are checked later. Raises
    InvalidRequest."""
    is_list = isinstance(prompts, Iterable) and not isinstance(prompts, str | _RAW | Mapping)
    listed = list(prompts) if is_list else [prompts]
    if is_list and listed and all(isinstance(item, int) for item in listed):
        return [listed]
    for item in listed:
        if isinstance(item, str) and not item:
            raise InvalidRequest("prompt must not be empty", "prompt")
        if not isinstance(item, str | Sequence) or isinstance(item, _RAW):
            fault = f"prompts must be text, token ids or a list of either, got {type(item).__name__}"
            raise InvalidRequest(fault, "prompt")
    return listed


class _Given(NamedTuple):
    """The arguments of a call beside its prompts, each one value for all prompts or a list of one for each."""

    params: Any
    adapter: Any
    cache_salt: Any
    priority: Any

    def spread(self, count: int) -> list[tuple[Any, Any, Any, Any]]:
        """Return the arguments of each of ``count`` prompts. Raises InvalidRequest."""
        columns: list[Iterable[Any]] = []
        for name, value in zip(self._fields, self):
            is_one = value is None or isinstance(value, str | int | SamplingParams)
            if not is_one and not isinstance(value, Iterable):
                raise InvalidRequest(f"{name} must be one for all prompts or a list, got {value!r}", name)
            listed = [value] * count if is_one else list(value)
            if len(listed) != count:
                raise InvalidRequest(f"{name} has {len(listed)} entries for {count} prompts", name)
            columns.append(listed)
        return list(zip(*columns))


# ---------------------------------------------------------------- the interpreter's end


_open: weakref.WeakSet[Driver] = weakref.WeakSet()
_is_exiting = threading.Event()


def _wait_at_exit() -> None:
    """Block a daemon thread forever while the interpreter exits: it has no caller to raise to."""
    if _is_exiting.is_set() and threading.current_thread().daemon:
        threading.Event().wait()


def _end_all() -> None:
    """Close the engines that are still open, after all finalizers. Nothing is raised: only daemon threads can
    still wait for an engine."""
    _is_exiting.set()
    for engine in list(_open):
        engine.close()


atexit.register(_end_all)
