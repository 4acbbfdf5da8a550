"""Runs a replica's process: an engine, a listener for front ends, and the link to the router that grants its
lease.

Tokens go from here to the front ends; the router receives reports of the replica's state. Without a lease the
process ends, whatever it is doing, so that nothing of an abandoned epoch goes on. This module does not know
what routing decides.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import math
import os
import threading
import time
from pathlib import Path

import msgspec

from manylora._version import VERSION
from manylora.cluster import children, messages
from manylora.cluster.adapter_files import AdapterCache, FileSource, adapter_digest, pull
from manylora.cluster.blame import StepNote, StepNotingExecutor
from manylora.cluster.children import Tasks
from manylora.cluster.folder import step_file
from manylora.cluster.link import (
    Credentials,
    Hello,
    Link,
    LinkRefused,
    Listener,
    bind,
    credentials_of,
    redial,
    why_strange,
)
from manylora.cluster.recording import without_what_fails
from manylora.config.declaring import ConfigError
from manylora.engine.client import Delta, EngineDead
from manylora.engine.driver import Driver
from manylora.engine.wire import Deltas, Failed
from manylora.main import build_driver
from manylora.protocol import commands
from manylora.protocol.executor import AdapterError
from manylora.protocol.routing import ReplicaFacts, ReplicaReport, StepPlane
from manylora.types import AdapterCard, AdapterId, EngineInfo, RequestError, RequestId

log = logging.getLogger(__name__)

REPORT_S = 0.05
"""The time between two reports where there is news."""
HEARTBEAT_S = 0.5
"""The time between two reports where there is none; at most a tenth of a lease."""
STATUS_S = 0.25
"""The time that a report waits for the step loop. After it the last report is sent again."""
SKIP_S = 1.0
"""The time after which an assignment that later ones have overtaken counts as lost."""
CLOSE_S = 1.5


_STEP_S = {"cpu": 0.01, "cuda": 0.01}
_ROW_S = {"cpu": 5e-4, "cuda": 2e-5}
_TOKEN_S = {"cpu": 1e-3, "cuda": 2.5e-5}
_PAGE_BYTES_S = {"cpu": 4e9, "cuda": 2e10}
_READ_BYTES_S = 1e9


def run(launch: children.Launch, starter: children.Starter) -> int:
    """Serve until a stop or the end of the lease, and return the exit code. Raises ConfigError."""
    folder = Path(launch.folder)
    try:
        note = StepNote(step_file(folder, launch.id, launch.epoch))
    except OSError as error:
        # Without the note, a death blames every request of the replica.
        log.warning("the replica cannot note its steps: %s", error.strerror)
        note = None
    try:
        credentials = credentials_of(launch.secret, launch.cluster.tls, launch.host)
        options, cache = launch.cluster, None
        if options.adapter_cache is not None:
            cache = AdapterCache(Path(options.adapter_cache), options.adapter_cache_size)
        wrap = None if note is None else lambda executor: StepNotingExecutor(executor, note)
        engine = launch.engine if launch.epoch == 1 else without_what_fails(launch.engine)
        driver = build_driver(engine, wrap=wrap, has_all_adapters=False)
    except ConfigError:
        raise
    except Exception as error:
        log.exception("the replica could not start")
        starter.report(Failed(f"the replica could not start: {error}"))
        return 1

    def stop() -> None:
        children.end_after(CLOSE_S, 0)
        driver.close(frees=False)  # writes the rest of the journal
        children.leave(0)

    async def serve() -> int:
        starter.watch(stop, lambda: children.end_after(children.ORPHAN_S))
        return await _Replica(launch, credentials, cache, driver).serve(starter)

    return asyncio.run(serve())


class _Seen:
    """The router's assignments that have arrived. ``upto``: the number up to which all have arrived, or count
    as lost."""

    def __init__(self) -> None:
        self.router = 0
        self.upto = 0
        self._ahead: dict[int, float] = {}

    def begin(self, router: int) -> None:
        """Begin at 0 again where another router counts."""
        if router != self.router:
            self.router, self.upto = router, 0
            self._ahead.clear()

    def add(self, router: int, number: int, now: float) -> None:
        if router == self.router and number > self.upto:
            self._ahead[number] = now
            self.settle(now)

    def settle(self, now: float) -> None:
        """Advance over the assignments that have arrived, and over missing ones that were overtaken long ago."""
        while self._ahead:
            if self.upto + 1 in self._ahead:
                self.upto += 1
                del self._ahead[self.upto]
            elif now - self._ahead[first := min(self._ahead)] > SKIP_S:
                self.upto = first - 1
            else:
                return


@dataclasses.dataclass(slots=True)
class _Open:
    """An attempt that a front end has sent: its link, and the number of its samples that have not ended."""

    link: Link
    attempt: int
    num_open: int


class _Replica:
    """A running replica: its engine, its links and its adapters."""

    def __init__(
        self, launch: children.Launch, credentials: Credentials, cache: AdapterCache | None, driver: Driver
    ) -> None:
        self._launch = launch
        self._credentials = credentials
        self._driver = driver
        self._name = f"replica {launch.id} (epoch {launch.epoch})"
        self._hello = Hello(messages.REPLICA, launch.id, launch.epoch, os.getpid(), VERSION, launch.model)
        puller = msgspec.structs.replace(self._hello, role=messages.PULLER)
        self._source = FileSource(launch.router, credentials, puller)
        self._cache = cache
        self._lease_until_s = math.inf  # the first lease begins with the router's first answer
        self._seen = _Seen()
        self._open: dict[RequestId, _Open] = {}
        self._router: Link | None = None
        self._is_whole = True
        self._news = asyncio.Event()
        self._seq = 0
        self._asked: asyncio.Future[commands.Status] | None = None
        self._last: commands.Status | None = None
        self._adapters: dict[AdapterId, AdapterCard | None] = {}
        self._work = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="manylora-adapters")
        self._tasks = Tasks()

    async def serve(self, starter: children.Starter) -> int:
        """Serve until the engine or a task fails, and return the exit code."""
        loop = asyncio.get_running_loop()

        def deliver(deltas: list[Delta]) -> None:
            loop.call_soon_threadsafe(self._deliver, deltas)

        def died(reason: str) -> None:
            log.error("%s: %s", self._name, reason)
            loop.call_soon_threadsafe(self._tasks.over.set)

        threading.Thread(target=self._watch_lease, name="manylora-lease", daemon=True).start()
        self._driver.start(deliver, died, is_watched=True)
        listener = Listener(
            bind(self._launch.host),
            self._credentials,
            self._launch.epoch,
            self._launch.cluster.silence_s,
            {messages.FRONTEND: (messages.ToReplicaFromFrontend, self._serve_frontend)},
            lambda hello: why_strange(hello, self._launch.model),
        )
        await listener.start()
        self._address = listener.address
        for work in (self._follow_router(), self._report()):
            self._tasks.spawn(work)
        starter.report(messages.ChildReady(self._driver.info))
        await self._tasks.over.wait()
        return 1

    def _watch_lease(self) -> None:
        """End the process with its lease, on a thread that nothing else can hold up."""
        while time.monotonic() < self._lease_until_s:
            time.sleep(min(0.1, self._launch.cluster.lease / 10))
        log.error("no lease for %g s: the replica ends", self._launch.cluster.lease)
        children.leave(children.FENCED)

    # ------------------------------------------------------------ front ends

    async def _serve_frontend(self, link: Link) -> None:
        while (message := await link.receive()) is not None:
            match message:
                case messages.Attempt(request, number, router):
                    num_open = request.params.n - len(request.closed)
                    self._open[request.id] = _Open(link, request.attempt, num_open)
                    self._seen.add(router, number, time.monotonic())
                    self._driver.submit(request)
                    self._news.set()
                case messages.CancelAttempt(request, attempt, sample, reason):
                    found = self._open.get(request)
                    if found is not None and found.attempt == attempt:
                        self._driver.abort(request, sample, reason)
                        if sample is None:
                            del self._open[request]
                case messages.ReleaseAttempt(request, attempt):
                    self._driver.withdraw(request, attempt)
                case messages.AskStats(call):
                    self._tasks.spawn(self._send_stats(link, call))
        for request, found in list(self._open.items()):
            if found.link is link:
                del self._open[request]
                self._driver.abort(request, None, "abort")

    async def _send_stats(self, link: Link, call: int) -> None:
        try:
            stats = await asyncio.wrap_future(self._driver.stats())
            link.send(messages.Stats(call, stats, self._driver.adapter_uses()))
        except EngineDead:
            link.send(messages.Stats(call, None))

    def _deliver(self, deltas: list[Delta]) -> None:
        """Send deltas to the front ends that own their requests. Deltas of requests that are not open are
        dropped."""
        by_link: dict[Link, list[Delta]] = {}
        for delta in deltas:
            found = self._open.get(delta.request)
            if found is None or found.attempt != delta.attempt:
                continue
            by_link.setdefault(found.link, []).append(delta)
            if delta.finish_reason is not None:
                is_refusal = delta.error is not None and delta.error.status < 500
                found.num_open = 0 if is_refusal else found.num_open - 1
                if not found.num_open:
                    del self._open[delta.request]
        for link, theirs in by_link.items():
            link.send(Deltas(theirs))
        self._news.set()

    # ------------------------------------------------------------ the router

    async def _follow_router(self) -> None:
        """Keep a link to the router, whichever process it is."""
        while True:
            try:
                link = await redial(
                    self._launch.router, self._credentials, self._hello, messages.ToReplicaFromRouter
                )
            except LinkRefused as error:
                log.error("%s is not wanted: %s", self._name, error)
                children.leave(children.FENCED)
                return
            self._seen.begin(link.epoch)
            self._is_whole = True
            link.send(
                messages.Up(
                    facts_of(self._driver.info, self._driver.catalog.most_pages),
                    *self._address,
                    sorted(self._adapters),
                    self._driver.info.cold_start,
                )
            )
            self._router = link
            self._send_alive()
            while (message := await link.receive()) is not None:
                self._receive(link, message)
            self._router = None

    def _receive(self, link: Link, message: object) -> None:
        match message:
            case messages.Lease(sent_s):
                self._lease_until_s = sent_s + self._launch.cluster.lease
            case messages.AskWhole():
                self._is_whole = True
                self._news.set()
            case messages.AddAdapter(listing, verify):
                if (card := self._adapters.get(listing.id)) is not None:
                    link.send(messages.AdapterReady(listing.id, card))
                elif listing.id not in self._adapters:  # otherwise it is being added, and the answer follows
                    self._adapters[listing.id] = None
                    self._work.submit(self._add, asyncio.get_running_loop(), listing, verify)
            case messages.KeepAdapter(adapter, is_pinned):
                self._driver.keep(adapter, is_pinned)
            case messages.DropAdapter(adapter):
                self._work.submit(self._drop, asyncio.get_running_loop(), adapter)

    def _add(self, loop: asyncio.AbstractEventLoop, listing: messages.Listing, verify: bool) -> None:
        """Add an adapter, and answer the router. Runs on the thread for adapters."""
        try:
            path = listing.path
            if self._cache is not None:
                path = str(pull(self._source, self._cache, listing))
            elif listing.digest and adapter_digest(Path(path)) != listing.digest:
                raise AdapterError(f"the files in {path} are not those that were loaded")
            card = self._driver.add_adapter(listing.name, path, verify=verify, adapter=listing.id)
            self._adapters[listing.id] = card
            answer = messages.AdapterReady(listing.id, card)
        except AdapterError as error:
            del self._adapters[listing.id]
            self._release_files(listing.id)
            answer = messages.AdapterReady(listing.id, None, RequestError(error.status, str(error)))
        except EngineDead as error:
            answer = messages.AdapterReady(listing.id, None, RequestError(503, str(error)))
        loop.call_soon_threadsafe(self._send, answer)

    def _drop(self, loop: asyncio.AbstractEventLoop, adapter: AdapterId) -> None:
        """Remove an adapter. Runs on the thread for adapters, so that an adapter is never dropped before it
        was added."""
        gone = messages.AdapterGone(adapter)
        try:
            freed = self._driver.remove_adapter("", adapter)
        except AdapterError:  # the adapter was never served here, or was dropped before
            loop.call_soon_threadsafe(self._send, gone)
            return

        def tell(done: concurrent.futures.Future[None]) -> None:
            self._adapters.pop(adapter, None)
            self._work.submit(self._release_files, adapter)
            loop.call_soon_threadsafe(self._send, gone)

        freed.add_done_callback(tell)

    def _release_files(self, adapter: AdapterId) -> None:
        """Release an adapter's files in the cache. Runs on the thread for adapters."""
        if self._cache is not None:
            self._cache.release(adapter)

    def _send(self, message: messages.ToRouterFromReplica) -> None:
        """Send a message to the router, if there is one."""
        if self._router is not None:
            self._router.send(message)

    # ------------------------------------------------------------ reports

    async def _report(self) -> None:
        beat_s = min(HEARTBEAT_S, self._launch.cluster.lease / 10)
        while True:
            try:
                async with asyncio.timeout(beat_s):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            await self._make_report()
            await asyncio.sleep(REPORT_S)

    async def _make_report(self) -> None:
        """Report the replica's status if the step loop answers soon; otherwise send a sign of life."""
        link = self._router
        if link is None:
            return
        if self._asked is None:
            is_full, self._is_whole = self._is_whole, False
            self._asked = asyncio.wrap_future(self._driver.status(is_full))
        done, _ = await asyncio.wait([self._asked], timeout=STATUS_S)
        if not done:
            self._send_alive()
            return
        asked, self._asked = self._asked, None
        status = asked.result()
        if link is not self._router:
            self._is_whole = True  # the changes went to a router that is gone
            return
        if self._is_whole and not status.is_full:
            self._news.set()
            return  # a new router has asked since: it cannot use changes
        now = time.monotonic()
        self._seen.settle(now)
        self._last = status
        link.send(messages.Alive(now, self._report_of(status)))

    def _send_alive(self) -> None:
        """Send a sign of life with the last counts, since a step may take long."""
        report = None
        if self._last is not None and not self._is_whole:
            report = self._report_of(dataclasses.replace(self._last, is_full=False, residency=(), evicted=()))
        self._send(messages.Alive(time.monotonic(), report))

    def _report_of(self, status: commands.Status) -> ReplicaReport:
        self._seq += 1
        status = dataclasses.replace(status, seq=self._seq)
        return ReplicaReport(self._launch.id, self._launch.epoch, self._seen.upto, status)


def facts_of(info: EngineInfo, adapter_pages: int) -> ReplicaFacts:
    """Return a replica's sizes, and first guesses of its speed.

    A new replica has measured nothing. Guesses by the kind of device give replicas of one kind the same
    order. The replica then measures prompts, copies and reads, and reports their times. ``adapter_pages``:
    the most pages of its pool that one adapter may take.
    """
    kind = "cuda" if info.device.startswith("cuda") else "cpu"
    return ReplicaFacts(
        num_pages=info.num_pages,
        page_tokens=info.page_tokens,
        max_model_len=info.max_model_len,
        max_seqs=info.max_num_seqs,
        planes=(StepPlane(_STEP_S[kind], _ROW_S[kind]),),
        token_s=_TOKEN_S[kind],
        page_in_s=info.page_bytes / _PAGE_BYTES_S[kind],
        page_read_s=info.page_bytes / _READ_BYTES_S,
        page_bytes=info.page_bytes,
        adapter_pages=adapter_pages,
        num_host_pages=info.num_host_pages,
        numerics=f"{info.dtype} on {info.device}",
    )
