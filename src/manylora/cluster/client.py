"""Presents a cluster as an EngineClient: a front end's side of the links to the router and to the replicas.

Owns the open requests of its clients, with all tokens that it has accepted. Tokens of any attempt but the
last are dropped and counted. The router assigns each request to a replica, which sends the tokens. Does not
know HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from manylora.cluster import messages
from manylora.cluster.children import Tasks
from manylora.cluster.link import REDIAL_S, Credentials, Hello, Link, LinkError, redial
from manylora.cluster.open_request import OpenRequest
from manylora.engine.client import SILENT_S, Delta, EngineDead, EngineSilent, EngineStats, GenerationRequest
from manylora.engine.ledger import Ledger
from manylora.engine.mailboxes import MAX_WAITING_BYTES, Mailboxes
from manylora.engine.wire import Deltas
from manylora.protocol.executor import AdapterError
from manylora.protocol.hashing import prefix_hashes
from manylora.protocol.routing import Assign, Cancelled, Refuse, ReplicaId, Withdraw
from manylora.types import BASE, AdapterCard, AdapterId, EngineInfo, RequestError, RequestId

log = logging.getLogger(__name__)

DIAL_S = 2.0
"""A replica that cannot be reached for this time counts as lost."""
ASK_AGAIN_S = 1.0
"""After the end of a link to a replica, the time that the router has to learn of it and to act."""
STATS_S = 1.0
CALL_S = 5.0
"""The time that a call waits for a link to the router where there is none."""


@dataclasses.dataclass(eq=False)
class ReplicaLink:
    """A front end's links to one epoch of a replica, one after another. ``link``: the open one. ``is_lost``: the
    last one could not be opened, or has ended. ``unsent``: messages that wait for the first one; ``calls``: open
    questions."""

    endpoint: messages.Endpoint
    link: Link | None = None
    is_lost: bool = False
    unsent: list[msgspec.Struct] = dataclasses.field(default_factory=list)
    calls: dict[int, asyncio.Future[messages.Stats]] = dataclasses.field(default_factory=dict)
    following: asyncio.Task[None] | None = None

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, once the link is open. Drop it where the link is lost."""
        if self.link is not None:
            self.link.send(message)
        elif not self.is_lost:
            self.unsent.append(message)

    async def stats(self, call: int) -> EngineStats | None:
        """Ask for the engine's snapshot. Returns None where none arrives in time."""
        future = self.calls[call] = asyncio.get_running_loop().create_future()
        self.send(messages.AskStats(call))
        try:
            answer = await asyncio.wait_for(future, STATS_S)
        except TimeoutError:
            return None
        finally:
            del self.calls[call]
        return None if answer.stats is None else answer.stats.with_adapters(answer.adapters)

    def close(self) -> None:
        """Stop using this replica: its epoch has ended, and nothing that it still sends counts."""
        self.is_lost = True
        if self.following is not None:
            self.following.cancel()
        if self.link is not None:
            self.link.abort()


class ClusterClient:
    """An engine client whose engines are the cluster's replicas. Call ``start`` before anything else."""

    def __init__(
        self,
        info: EngineInfo,
        router: tuple[str, int],
        credentials: Credentials,
        hello: Hello,
        max_waiting: int,
        queue_timeout_s: float,
    ) -> None:
        self.info = info
        self._address = router
        self._credentials = credentials
        self._hello = hello
        self._max_waiting = max_waiting
        self._queue_timeout_s = queue_timeout_s
        self._mailboxes = Mailboxes(MAX_WAITING_BYTES)
        self._open: dict[RequestId, OpenRequest] = {}
        self._waiting: set[RequestId] = set()  # open requests for which the router has no replica yet
        self._replicas: dict[ReplicaId, ReplicaLink] = {}
        self._listings: dict[AdapterId, messages.Listing] = {}
        self._names: dict[str, messages.Listing] = {}
        self._note: messages.Note | None = None
        self._router: Link | None = None
        self._lost_router_s = 0.0
        self._has_router = asyncio.Event()
        self._can_serve = False
        self._calls: dict[int, asyncio.Future[messages.Reply]] = {}
        self._call_ids = itertools.count(1)
        self.stale_tokens = 0
        self.recomputed_tokens = 0
        self._tasks = Tasks()

    def start(self) -> None:
        """Keep a link to the router from now on."""
        self._tasks.spawn(self._follow_router())

    async def wait_ready(self) -> None:
        """Wait until a router has sent the endpoints."""
        await self._has_router.wait()

    # ------------------------------------------------------------ requests

    def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        return self._mailboxes.open(request, self._submit, self.abort)

    def _submit(self, asked: GenerationRequest) -> None:
        version, error = BASE, None
        if asked.adapter is not None:
            listing = self._names.get(asked.adapter)
            if listing is None:
                error = RequestError(404, f"The model `{asked.adapter}` does not exist.", "model")
            else:
                version = listing.id
        if len(self._waiting) >= self._max_waiting:
            error = RequestError(429, f"{self._max_waiting} requests wait already; try again later")
        if error is not None:
            self._send_to_client(asked, Delta(asked.id, 0, finish_reason="error", error=error))
            return
        prefix = prefix_hashes(version, asked.cache_scope, asked.prompt)
        ledger = Ledger(asked, time.monotonic, self.info.seed)
        found = OpenRequest(asked, ledger, version, prefix, self._most_tokens(asked, version))
        self._open[asked.id] = found
        self._waiting.add(asked.id)
        self._note_to_send().asked.append(found.as_asked())
        if self._router is None:
            self._tasks.spawn(self._give_up_without_router(found))

    def _most_tokens(self, asked: GenerationRequest, version: AdapterId) -> int:
        if asked.params.max_tokens is not None:
            return asked.params.max_tokens
        pages = self.info.num_pages - (self._listings[version].num_pages if version != BASE else 0)
        most = min(self.info.max_model_len, pages * self.info.page_tokens)
        return max(1, most - len(asked.prompt))

    def abort(self, request: RequestId, sample: int | None = None, reason: str = "abort") -> None:
        found = self._open.get(request)
        if found is None:
            return
        ledger = found.ledger
        for each in ledger.open_samples if sample is None else (sample,):
            if each in ledger.open_samples:
                ledger.close(each)
                self._send_to_client(found.asked, Delta(request, each, finish_reason=reason))
        self._send(found, messages.CancelAttempt(request, ledger.attempt, sample, reason))
        if ledger.has_ended:
            self._forget(found)
            self._note_to_send().cancelled.append(Cancelled(request))

    def _send_to_client(self, asked: GenerationRequest, delta: Delta) -> None:
        self._mailboxes.dispatch([delta._replace(serial=asked.serial)])

    def _send(self, found: OpenRequest, message: msgspec.Struct) -> None:
        """Send a message to the replica that has the request, if one has."""
        if found.replica is not None:
            link = self._replicas.get(found.replica)
            if link is not None and link.endpoint.epoch == found.epoch:
                link.send(message)

    def _forget(self, found: OpenRequest) -> None:
        del self._open[found.asked.id]
        self._waiting.discard(found.asked.id)

    def _refuse(self, found: OpenRequest, error: RequestError) -> None:
        """End each open sample of a request with the error."""
        self._forget(found)
        for sample in found.ledger.open_samples if error.status >= 500 else (0,):
            delta = Delta(found.asked.id, sample, finish_reason="error", error=error)
            self._send_to_client(found.asked, delta)

    async def _give_up_without_router(self, found: OpenRequest) -> None:
        """Refuse a request for which no router is linked within the queue's timeout."""
        await asyncio.sleep(self._queue_timeout_s)
        is_open = self._open.get(found.asked.id) is found
        if is_open and found.replica is None and self._router is None:
            self._refuse(found, RequestError(503, "the cluster has no router at the moment"))

    # ------------------------------------------------------------ replicas

    def _receive_deltas(self, message: Deltas) -> None:
        for delta in message.deltas:
            found = self._open.get(delta.request)
            if found is None or not found.ledger.may_take(delta):
                if delta.tokens:
                    self.stale_tokens += len(delta.tokens)
                    self._note_to_send()
                continue
            out = found.take(delta)
            if found.recomputes and delta.tokens:
                found.recomputes = False
                again = len(found.asked.prompt) + delta.start - delta.timing.num_cached_tokens
                self.recomputed_tokens += max(again, 0)
            if out is not None:
                self._mailboxes.dispatch([out])
            if found.ledger.has_ended:
                self._forget(found)
                self._note_to_send().ended.append(found.as_ended())
                continue
            if (progress := found.progress(delta.sample)) is not None:
                self._note_to_send().progress.append(progress)
            if found.is_released:
                self._note_to_send().withdrawn.append(found.as_withdrawn())

    async def _follow_replica(self, replica: ReplicaLink) -> None:
        """Keep a link to a replica. Where it ends, have its requests assigned elsewhere, and dial again."""
        endpoint = replica.endpoint
        address = endpoint.host, endpoint.port
        while True:
            with contextlib.suppress(LinkError):
                link = await redial(
                    address, self._credentials, self._hello, messages.ToFrontendFromReplica, most_s=DIAL_S
                )
                if link.epoch == endpoint.epoch:
                    replica.link = link
                    for unsent in replica.unsent:
                        link.send(unsent)
                    while (message := await link.receive()) is not None:
                        self._receive_from_replica(replica, message)
                link.abort()
            replica.link, replica.is_lost = None, True
            replica.unsent.clear()
            await self._reassign(endpoint)
            replica.is_lost = False  # it may still run

    def _receive_from_replica(self, replica: ReplicaLink, message: Any) -> None:
        if isinstance(message, Deltas):
            self._receive_deltas(message)
        elif (future := replica.calls.get(message.call)) is not None and not future.done():
            future.set_result(message)

    async def _reassign(self, endpoint: messages.Endpoint) -> None:
        """Have the requests of an ended link assigned elsewhere."""
        place = endpoint.id, endpoint.epoch
        await self._ask_again([each for each in self._open.values() if (each.replica, each.epoch) == place])

    async def _ask_again(self, lost: list[OpenRequest]) -> None:
        """Give these attempts up and ask for new ones, unless the router acts on them first."""
        attempts = [found.ledger.attempt for found in lost]
        await asyncio.sleep(ASK_AGAIN_S)
        for found, attempt in zip(lost, attempts, strict=True):
            if self._open.get(found.asked.id) is found and found.ledger.attempt == attempt:
                found.replica = None
                self._waiting.add(found.asked.id)
                self._note_to_send().asked.append(found.as_asked())

    def _see_endpoints(self, endpoints: list[messages.Endpoint]) -> None:
        up = {each.id: each for each in endpoints}
        for replica, link in list(self._replicas.items()):
            if up.get(replica) != link.endpoint:
                link.close()
                del self._replicas[replica]
                self._tasks.spawn(self._reassign(link.endpoint))
        for each in endpoints:
            if each.id not in self._replicas:
                link = self._replicas[each.id] = ReplicaLink(each)
                link.following = self._tasks.spawn(self._follow_replica(link))

    # ------------------------------------------------------------ the router

    def _note_to_send(self) -> messages.Note:
        """Return the note that is sent to the router at the end of this round of the event loop."""
        if self._note is None:
            self._note = messages.Note()
            asyncio.get_running_loop().call_soon(self._flush)
        return self._note

    def _flush(self) -> None:
        note, self._note = self._note, None
        if note is not None and self._router is not None:  # otherwise the next router gets all open requests
            note.stale_tokens, note.recomputed_tokens = self.stale_tokens, self.recomputed_tokens
            self._router.send(note)

    async def _follow_router(self) -> None:
        while True:
            link = await redial(
                self._address, self._credentials, self._hello, messages.ToFrontendFromRouter, insists=True
            )
            self._greet(link)
            while (message := await link.receive()) is not None:
                self._receive_from_router(link, message)
            log.warning("the link to the router has ended")
            self._router, self._lost_router_s = None, time.monotonic()
            self._fail_calls()
            for found in self._open.values():
                if found.replica is None:
                    self._tasks.spawn(self._give_up_without_router(found))

    def _greet(self, link: Link) -> None:
        """Report all open requests to the router, which may be another than before."""
        self._note = None
        note = messages.Note(stale_tokens=self.stale_tokens, recomputed_tokens=self.recomputed_tokens)
        for found in self._open.values():
            if found.replica is None:
                note.asked.append(found.as_asked())
            else:
                note.held.append(found.as_held())
                if found.is_released:
                    note.withdrawn.append(found.as_withdrawn())
        link.send(note)
        link.send(messages.Synced())
        self._router = link

    def _receive_from_router(self, link: Link, message: Any) -> None:
        match message:
            case messages.Rulings(assign, withdraw, refuse):
                for order in assign:
                    self._assign(order, link.epoch)
                for each in withdraw:
                    self._withdraw(each)
                for refusal in refuse:
                    self._receive_refusal(refusal)
            case messages.Endpoints(endpoints, can_serve):
                self._can_serve = can_serve
                self._see_endpoints(endpoints)
                self._has_router.set()
            case messages.Revisions():
                self._learn(message)
                self._flush()  # requests for versions that are unlisted now must precede the answer
                link.send(messages.HasRevision(message.revision))
            case messages.Reply(call):
                future = self._calls.pop(call, None)
                if future is not None and not future.done():
                    future.set_result(message)

    def _receive_refusal(self, refusal: Refuse) -> None:
        found = self._open.get(refusal.request)
        if found is not None:
            log.warning("request %s is refused: %s", refusal.request, refusal.error.message)
            self._send(found, messages.CancelAttempt(refusal.request, found.ledger.attempt))
            self._refuse(found, refusal.error)

    def _assign(self, order: Assign, router: int) -> None:
        found = self._open.get(order.request)
        if found is None or order.attempt <= found.ledger.attempt:
            return  # the request has ended, or the order is old
        self._send(found, messages.CancelAttempt(order.request, found.ledger.attempt))
        self._waiting.discard(order.request)
        link = self._replicas.get(order.replica)
        request = found.assign(order, link.endpoint.epoch if link is not None else -1)
        if link is None or link.is_lost:
            self._tasks.spawn(self._ask_again([found]))
        else:
            link.send(messages.Attempt(request, order.number, router))

    def _withdraw(self, order: Withdraw) -> None:
        found = self._open.get(order.request)
        if found is not None and found.ledger.attempt == order.attempt:
            self._send(found, messages.ReleaseAttempt(order.request, order.attempt))

    # ------------------------------------------------------------ adapters

    def _learn(self, news: messages.Revisions) -> None:
        if news.is_whole:
            self._listings.clear()
        for listing in news.listings:
            if listing.state == "gone":
                self._listings.pop(listing.id, None)
            else:
                self._listings[listing.id] = listing
        # An adapter of the start has no rank until a replica has served it.
        listed = (each for each in self._listings.values() if each.state == "listed" and each.rank)
        self._names = {each.name: each for each in listed}

    def card(self, name: str) -> AdapterCard | None:
        """See ReplacesAdapters."""
        listing = self._names.get(name)
        return None if listing is None else listing.card

    async def adapters(self) -> tuple[AdapterCard, ...]:
        return tuple(listing.card for listing in self._names.values())

    async def add_adapter(self, name: str, path: str) -> AdapterCard:
        return await self._load(name, path, replaces=False)

    async def replace_adapter(self, name: str, path: str) -> AdapterCard:
        """See ReplacesAdapters."""
        return await self._load(name, path, replaces=True)

    async def _load(self, name: str, path: str, *, replaces: bool) -> AdapterCard:
        reply = await self._call(messages.AdapterCall(next(self._call_ids), name, path, replaces))
        assert reply.listing is not None
        return reply.listing.card

    async def remove_adapter(self, name: str) -> None:
        await self._call(messages.AdapterCall(next(self._call_ids), name))

    async def _call(self, message: messages.AdapterCall | messages.AskStatus) -> messages.Reply:
        try:
            async with asyncio.timeout(CALL_S):
                while self._router is None:
                    await asyncio.sleep(REDIAL_S)
        except TimeoutError as error:
            raise EngineSilent("the cluster has no router at the moment") from error
        future = self._calls[message.call] = asyncio.get_running_loop().create_future()
        self._router.send(message)
        try:
            reply: messages.Reply = await future
        finally:
            self._calls.pop(message.call, None)
        if reply.status:
            raise AdapterError(reply.message, reply.status)
        return reply

    def _fail_calls(self) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineSilent("the router has gone; whether it was done is not known"))
        self._calls.clear()

    # ------------------------------------------------------------ what others look at

    async def cluster_status(self) -> dict[str, Any]:
        """Ask the router for the cluster's status (see ``status_of``). Raises EngineSilent and AdapterError."""
        reply = await self._call(messages.AskStatus(next(self._call_ids)))
        found: dict[str, Any] = msgspec.json.decode(reply.body)
        return found

    async def replica_stats(self) -> dict[ReplicaId, EngineStats | None]:
        """Ask each replica that is up for its engine's snapshot; None: it does not answer."""
        links = dict(sorted(self._replicas.items()))
        answers = await asyncio.gather(*(link.stats(next(self._call_ids)) for link in links.values()))
        return dict(zip(links, answers, strict=True))

    async def stats(self) -> EngineStats:
        """Add up the numbers of all replicas, where they can be added."""
        records = EngineStats().records
        for stats in (await self.replica_stats()).values():
            if stats is not None:
                records = tuple(map(_added, records, stats.records))
        return EngineStats(*records)

    def why_unready(self) -> str | None:
        router = self._router
        silent_s = time.monotonic() - self._lost_router_s if router is None else router.silent_s
        if silent_s > SILENT_S:  # the next router takes a moment, and requests wait for it
            return f"no sign of a router for {silent_s:.0f} s"
        return None if self._can_serve else "no replica takes requests"

    async def wait_dead(self) -> str:
        """Wait forever: a cluster's processes are started again when they die."""
        await asyncio.Event().wait()
        raise EngineDead("unreachable")

    async def close(self) -> None:
        self._tasks.cancel()
        for link in self._replicas.values():
            link.close()
        if self._router is not None:
            self._router.close()
        self._mailboxes.die("the front end was closed")


def _added(one: Any, other: Any) -> Any:
    """Add up the numbers of two records of one kind."""
    sums = {
        field.name: getattr(one, field.name) + getattr(other, field.name)
        for field in dataclasses.fields(one)
        if isinstance(getattr(one, field.name), int | float)
    }
    return dataclasses.replace(one, **sums)
