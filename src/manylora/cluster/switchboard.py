"""Connects the router (``router.router``) with front ends, replicas and the supervisor.

Gives the router each event that arrives over the links, and carries out its commands. All its state exists
elsewhere, too: another router rebuilds it from full reports and from the open requests of front ends. Tokens
do not pass here.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import logging
import socket
import time
from typing import Any

import msgspec

from manylora.cluster import children, messages
from manylora.cluster.children import Tasks
from manylora.cluster.link import Hello, Link, Listener, Role, credentials_of, why_strange
from manylora.cluster.members import Decisions, FrontendMember, Members, ReplicaMember, can_serve, status_of
from manylora.cluster.recording import TraceLines, open_of_router
from manylora.cluster.registry import AdapterLog, Rollout, serve_files
from manylora.config.declaring import ConfigError
from manylora.protocol import commands, events, routing
from manylora.protocol.executor import AdapterError
from manylora.protocol.routing import ReplicaId, RouterEvent
from manylora.router.router import Router
from manylora.solving import SolverProcess, solver_is_there
from manylora.types import AdapterId, RequestError, RequestId

log = logging.getLogger(__name__)

SETTLE_S = 2.0
"""The time that a router which replaces another waits for replicas and front ends before it decides."""
SOLVE_S = 2.0
HINT_S = 5.0
"""The time, in seconds, that a hint stays fresh beyond ``scale_down_s``, in which the router repeats a hint
that still holds."""


class Switchboard:
    """The router's process at its links. ``members``: the linked processes; ``table``: the processes that the
    supervisor has started; ``moved``: numbers of moves by reason; ``trace``: decisions as lines; ``held_back``:
    the notes of front ends that wait until the router decides, or None where it does."""

    def __init__(
        self, launch: children.Launch, adapter_log: AdapterLog, named: list[tuple[str, str]]
    ) -> None:
        """Build the router and its registry. ``named``: adapters of the start, and their folders. Raises
        ConfigError."""
        self.config = launch.cluster.router_config()
        self.launch = launch
        self.router = Router(self.config)
        self.members = Members()
        self.table = messages.ProcessTable([], {}, 0, launch.cluster.launcher)
        self.moved: collections.Counter[str] = collections.Counter()
        self.decisions = Decisions()
        self._hint: routing.ScaleHint | None = None
        self._hint_s = 0.0
        self.registry = Rollout(adapter_log, self.members, self.handle, self.config.queue_timeout_s)
        self._credentials = credentials_of(launch.secret, launch.cluster.tls, launch.router[0])
        self._owners: dict[RequestId, tuple[FrontendMember, AdapterId]] = {}
        self._orders: dict[Link, messages.Rulings] = {}
        self._fenced: dict[ReplicaId, int] = {}
        self._could_serve = False
        self.held_back: list[tuple[FrontendMember, messages.Note]] | None = [] if launch.takes_over else None
        if not launch.takes_over:
            try:
                self.registry.begin(named)
            except AdapterError as error:
                raise ConfigError(str(error)) from error
        self._is_served = asyncio.Event()  # a replica has been up
        self._tasks = Tasks()
        self._solver = SolverProcess(SOLVE_S) if solver_is_there() else None
        self._solving = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="manylora-solving")
        self._journal, trace = open_of_router(launch.engine, self.config, launch.epoch)
        self.trace = TraceLines(trace)

    async def start(self) -> None:
        """Listen, and take over the state of an earlier router."""
        self._loop = asyncio.get_running_loop()
        self.registry.take_over()
        self._tasks.spawn(self.registry.retry())
        roles: dict[str, Role] = {
            messages.FRONTEND: (messages.ToRouterFromFrontend, self._serve_frontend),
            messages.REPLICA: (messages.ToRouterFromReplica, self._serve_replica),
            messages.NEWCOMER: (messages.ToRouterFromFrontend, self._serve_newcomer),
            messages.PULLER: (messages.ToRouterFromPuller, lambda link: serve_files(link, self.registry)),
            messages.SUPERVISOR: (messages.ToRouterFromSupervisor, self._serve_supervisor),
        }
        sock, silence_s = socket.socket(fileno=self.launch.descriptor), self.launch.cluster.silence_s
        listener = Listener(sock, self._credentials, self.launch.epoch, silence_s, roles, self._judge)
        await listener.start()
        if self.held_back is not None:
            self._is_served.set()
            self._loop.call_later(SETTLE_S, self._settle)

    def close(self) -> None:
        """Write the remaining lines of the journal and the trace, and close them."""
        if self._journal is not None:
            self._journal.close()
        self.trace.close()
        if self._solver is not None:
            self._solver.close()

    @property
    def hint(self) -> routing.ScaleHint | None:
        """The router's last hint, or None where it is stale: the router repeats a hint that still holds."""
        is_fresh = time.monotonic() - self._hint_s <= self.config.scale_down_s + HINT_S
        return self._hint if is_fresh else None

    # ------------------------------------------------------------ the machine

    def handle(self, event: RouterEvent) -> None:
        """Have the router decide on an event, and carry out its commands."""
        now = time.monotonic()
        if self._journal is not None:
            self._journal.record(event, now)
        began_s = time.perf_counter()
        decided = self.router.handle(event, now)
        self.decisions.add(time.perf_counter() - began_s)
        if self._journal is not None:
            self._journal.answered(decided)
        for command in decided:
            self._carry_out(command, now)

    def _carry_out(self, command: Any, now: float) -> None:
        match command:
            case routing.Assign() | routing.Withdraw() | routing.Refuse():
                self._order(command)
            case commands.SetTimer(at):
                self._loop.call_later(max(0.0, at - now), self.handle, events.Timer())
            case routing.Fence(replica, epoch):
                self._fence(replica, epoch)
            case routing.AskReport(replica):
                if (member := self.members.replicas.get(replica)) is not None:
                    member.link.send(messages.AskWhole())
            case routing.Place(adapter, replica) | routing.Unplace(adapter, replica):
                if (member := self.members.replicas.get(replica)) is not None:
                    is_pinned = isinstance(command, routing.Place)
                    member.link.send(messages.KeepAdapter(adapter, is_pinned))
            case routing.Solve():
                if self._solver is not None:
                    solving = self._solving.submit(self._solver.solve, command)
                    solving.add_done_callback(self._receive_solution)
            case routing.ScaleHint():
                self._hint, self._hint_s = command, now
            case routing.Routed():
                if command.source is not None:
                    self.moved[command.reason] += 1
                self.trace.write(now, command)
            case routing.Planned():
                self.trace.write(now, command)

    def _order(self, command: routing.Assign | routing.Withdraw | routing.Refuse) -> None:
        if command.request not in self._owners:
            return
        member, _ = self._owners[command.request]
        if not self._orders:
            self._loop.call_soon(self._send_orders)
        orders = self._orders.setdefault(member.link, messages.Rulings())
        if isinstance(command, routing.Assign):
            orders.assign.append(command)
        elif isinstance(command, routing.Withdraw):
            orders.withdraw.append(command)
        else:
            orders.refuse.append(command)
            self._disown(command.request)

    def _send_orders(self) -> None:
        orders, self._orders = self._orders, {}
        for link, each in orders.items():
            link.send(each)

    def _receive_solution(self, done: concurrent.futures.Future[routing.Solved]) -> None:
        self._loop.call_soon_threadsafe(self.handle, done.result())

    def _fence(self, replica: ReplicaId, epoch: int) -> None:
        self._fenced[replica] = max(epoch, self._fenced.get(replica, 0))
        self.members.send_to_supervisor(messages.EndReplica(replica, epoch))
        self._forget_replica(replica, epoch)

    def _forget_replica(self, replica: ReplicaId, epoch: int) -> None:
        member = self.members.replicas.get(replica)
        if member is not None and member.epoch <= epoch:
            member.link.abort()
            del self.members.replicas[replica]
            self.registry.pulse()
        self._send_endpoints()

    def _send_endpoints(self) -> None:
        if self.held_back is not None:
            return  # replicas without a link may serve: front ends keep theirs
        endpoints = self.members.endpoints(self.router.fleet.up)
        self._could_serve = endpoints.can_serve
        self.members.send_to_frontends(endpoints)

    def look(self) -> None:
        """Send front ends the endpoints again where the answer to whether a replica can serve has changed."""
        if can_serve(self.router.fleet.up) != self._could_serve:
            self._send_endpoints()

    # ------------------------------------------------------------ links

    def _judge(self, hello: Hello) -> str | None:
        if hello.role == messages.REPLICA:
            slot = next((slot for slot in self.table.slots if slot.id == hello.id), None)
            least = max(self._fenced.get(hello.id, 0) + 1, 0 if slot is None else slot.epoch)
            is_left = slot is not None and slot.epoch == hello.epoch and slot.pid not in (0, hello.pid)
            if hello.epoch < least or is_left:  # or its supervisor has died
                return f"epoch {hello.epoch} of replica {hello.id} is over"
        return why_strange(hello, hello.model if hello.role == messages.NEWCOMER else self.launch.model)

    async def _serve_replica(self, link: Link) -> None:
        hello = link.peer
        before = self.members.replicas.get(hello.id)
        if before is not None:
            before.link.abort()
        member = self.members.replicas[hello.id] = ReplicaMember(hello.id, hello.epoch, link)
        while (message := await link.receive()) is not None:
            member.received_s = time.monotonic()
            match message:
                case messages.Up():
                    member.up = message
                    self.registry.greet(member, message.adapters)
                    self._see_if_up(member)
                case messages.Alive(sent_s, report):
                    link.send(messages.Lease(sent_s))
                    if report is not None and self._is_up(member):
                        self.handle(report)
                case messages.AdapterReady() | messages.AdapterGone():
                    self.registry.receive(member, message)
                    self._see_if_up(member)
        # A replica that was up may link again. Otherwise the supervisor reports its end, or its lease ends.
        if self.members.replicas.get(hello.id) is member and not self._is_up(member):
            del self.members.replicas[hello.id]
            self.registry.pulse()

    def _is_up(self, member: ReplicaMember) -> bool:
        return self.router.fleet.find(member.id, member.epoch) is not None

    def _see_if_up(self, member: ReplicaMember) -> None:
        if member.up is None or not member.has_answered or self.members.replicas.get(member.id) is not member:
            return
        up = self.router.fleet.up
        is_last = all(slot.id in up or slot.id == member.id for slot in self.table.slots)
        self.registry.settle(member, is_last=is_last)
        if not self._is_up(member):
            self.handle(
                routing.ReplicaUp(member.id, member.epoch, member.up.facts, self.registry.lacks(member))
            )
            if not self._is_up(member):
                return
            member.link.send(messages.AskWhole())
            self._is_served.set()
            self._settle_if_all_are_there()
        for each in self.members.replicas.values():
            if self._is_up(each) and each.has_answered:
                lacks = self.registry.lacks(each)
                if lacks != tuple(sorted(up[each.id].lacks)):
                    self.handle(routing.Lacks(each.id, each.epoch, lacks))
        self._send_endpoints()

    async def _serve_supervisor(self, link: Link) -> None:
        self.members.supervisor = link
        link.send(self.registry.whole())
        for replica, epoch in self._fenced.items():
            link.send(messages.EndReplica(replica, epoch))
        while (message := await link.receive()) is not None:
            match message:
                case messages.ProcessTable():
                    if not self.table.supervisor:  # the first table: of an earlier router's processes
                        self._loop.call_later(1.2 * self.config.lease_s, self._end_unlinked, message.slots)
                    self.table = message
                    self._settle_if_all_are_there()
                case messages.Exited(replica, epoch, reason, is_crash, blamed):
                    level = logging.WARNING if is_crash else logging.INFO
                    log.log(level, "replica %d (epoch %d) has ended: %s", replica, epoch, reason)
                    self._fenced[replica] = max(epoch, self._fenced.get(replica, 0))
                    names = None if blamed is None else tuple(blamed)
                    self.handle(routing.ReplicaDown(replica, epoch, reason, is_crash, names))
                    self._forget_replica(replica, epoch)
        if self.members.supervisor is link:
            self.members.supervisor = None

    async def _serve_newcomer(self, link: Link) -> None:
        timeout_s = self.config.queue_timeout_s
        link.send(messages.Joining(self.launch.engine, self.table.info, self.launch.model, timeout_s))
        await link.receive()  # no message follows: it links again as a front end

    async def _serve_frontend(self, link: Link) -> None:
        await self._is_served.wait()
        member = FrontendMember(link.peer.id, link)
        before = self.members.frontends.get(member.id)
        if before is not None:
            before.link.abort()
            self._lose_frontend(before)
        self.members.frontends[member.id] = member
        link.send(self.registry.whole())
        if self.held_back is None:
            link.send(self.members.endpoints(self.router.fleet.up))
        while (message := await link.receive()) is not None:
            match message:
                case messages.Note():
                    if self.held_back is not None:
                        self.held_back.append((member, message))
                    else:
                        self._receive_note(member, message)
                case messages.Synced():
                    member.is_synced = True
                    self._settle_if_all_are_there()
                case messages.HasRevision(revision):
                    member.revision = max(member.revision, revision)
                    self.registry.pulse()
                case messages.AdapterCall():
                    self._tasks.spawn(self._answer_adapter_call(link, message))
                case messages.AskStatus(call):
                    link.send(messages.Reply(call, body=msgspec.json.encode(status_of(self))))
        if self.members.frontends.get(member.id) is member:
            del self.members.frontends[member.id]
            self._lose_frontend(member)
        self.registry.pulse()

    # ------------------------------------------------------------ front ends

    def _receive_note(self, member: FrontendMember, note: messages.Note) -> None:
        member.stale_tokens, member.recomputed_tokens = note.stale_tokens, note.recomputed_tokens
        for asked in note.asked:
            if self._own(member, asked):
                self.handle(asked)
        for held in note.held:
            if self._own(member, held.asked):
                self.handle(held)
        news: list[routing.Progress | routing.Withdrawn] = [*note.progress, *note.withdrawn]
        for event in news:
            if event.request in self._owners:
                self.handle(event)
        ends: list[routing.Ended | routing.Cancelled] = [*note.ended, *note.cancelled]
        for end in ends:
            if self._disown(end.request, member):
                self.handle(end)

    def _own(self, member: FrontendMember, asked: routing.Asked) -> bool:
        """Return whether the request is this front end's. Refuse it if another front end has one with the
        same id."""
        owner = self._owners.get(asked.request)
        if owner is None:
            self._owners[asked.request] = member, asked.adapter
            self.registry.use(asked.adapter)
        elif owner[0] is not member:
            error = RequestError(400, f"request id {asked.request!r} is already in use")
            member.link.send(messages.Rulings(refuse=[routing.Refuse(asked.request, error)]))
            return False
        return True

    def _disown(self, request: RequestId, member: FrontendMember | None = None) -> bool:
        """Forget a request that has ended. Returns False where it is not the front end's."""
        owner = self._owners.get(request)
        if owner is None or (member is not None and owner[0] is not member):
            return False
        del self._owners[request]
        self.registry.unuse(owner[1])
        return True

    def _lose_frontend(self, member: FrontendMember) -> None:
        """Cancel all requests of a front end."""
        if self.held_back is not None:
            self.held_back = [each for each in self.held_back if each[0] is not member]
        for request, (owner, _) in list(self._owners.items()):
            if owner is member:
                self._disown(request)
                self.handle(routing.Cancelled(request))

    async def _answer_adapter_call(self, link: Link, call: messages.AdapterCall) -> None:
        reply = messages.Reply(call.call)
        try:
            if call.path:
                reply.listing = await self.registry.load(call.name, call.path, replaces=call.replaces)
            else:
                await self.registry.unload(call.name)
        except AdapterError as error:
            reply.status, reply.message = error.status, str(error)
        link.send(reply)

    # ------------------------------------------------------------ taking over

    def _settle_if_all_are_there(self) -> None:
        running = [slot for slot in self.table.slots if slot.state == "running"]
        are_up = all(slot.id in self.router.fleet.up for slot in running)
        linked = self.members.frontends
        are_synced = all(number in linked and linked[number].is_synced for number in self.table.frontends)
        if self.members.supervisor is not None and are_up and are_synced:
            self._settle()

    def _end_unlinked(self, slots: list[messages.Slot]) -> None:
        """End replicas that ran before this router did and have not linked to it. Each has had the time of a
        lease to link again, or to end."""
        linked = {each.id: each.epoch for each in self.members.replicas.values()}
        for slot in slots:
            is_unlinked = slot.state == "running" and linked.get(slot.id, 0) < slot.epoch
            if is_unlinked and slot.epoch > self._fenced.get(slot.id, 0):
                log.error("replica %d has not come back to the router: it is ended", slot.id)
                self._fence(slot.id, slot.epoch)

    def _settle(self) -> None:
        """Begin to decide, first on the notes that front ends have sent so far."""
        if self.held_back is None:
            return
        held_back, self.held_back = self.held_back, None
        log.info("the router has taken over")
        for member, note in held_back:
            self._receive_note(member, note)
        self._send_endpoints()
