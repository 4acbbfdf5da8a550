"""The router between its links: the machine of ``router.router`` between front ends, replicas and the supervisor.

Tells it what comes over the links, and carries out what it commands. It keeps nothing that the others do not have:
another router takes its place from full reports and from what front ends have open. Tokens do not pass here.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import logging
import time
from typing import Any

import msgspec

from manylora.cluster import children, messages
from manylora.cluster.children import Tasks
from manylora.cluster.link import Hello, Link, Listener, adopt, credentials_of, why_strange
from manylora.cluster.members import Decisions, FrontendMember, Members, ReplicaMember, can_serve, status
from manylora.cluster.recording import TraceLines, open_of_router
from manylora.cluster.registry import AdapterLog, Rollout, serve_files
from manylora.config.declaring import ConfigError
from manylora.protocol import commands, events
from manylora.protocol.executor import AdapterError
from manylora.protocol.routing import (
    Asked,
    AskReport,
    Assign,
    Cancelled,
    Ended,
    Fence,
    Lacks,
    Place,
    Planned,
    Progress,
    Refuse,
    ReplicaDown,
    ReplicaId,
    ReplicaUp,
    Routed,
    RouterEvent,
    ScaleHint,
    Solve,
    Unplace,
    Withdraw,
    Withdrawn,
)
from manylora.router.router import Router
from manylora.solving import SolverProcess, solver_is_there
from manylora.types import AdapterId, RequestError, RequestId

log = logging.getLogger(__name__)

SETTLE_S = 2.0
"""A router that takes another's place waits so long for replicas and front ends before it decides."""
SOLVE_S = 2.0
HINT_S = 5.0
"""How much later than it may a router repeats a hint."""

_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
    messages.FRONTEND: msgspec.msgpack.Decoder(messages.ToRouterFromFrontend),
    messages.REPLICA: msgspec.msgpack.Decoder(messages.ToRouterFromReplica),
    messages.NEWCOMER: msgspec.msgpack.Decoder(messages.ToRouterFromFrontend),
    messages.PULLER: msgspec.msgpack.Decoder(messages.ToRouterFromPuller),
    messages.SUPERVISOR: msgspec.msgpack.Decoder(messages.ToRouterFromSupervisor),
}


class Switchboard:
    """``members``: what is linked; ``table``: what the supervisor has started; ``moved``: by reason;
    ``trace``: decisions as lines."""

    def __init__(
        self, launch: children.Launch, adapter_log: AdapterLog, named: list[tuple[str, str]]
    ) -> None:
        """``named``: adapters of the start, and their folders. Raises ConfigError."""
        self.config = launch.cluster.router_config()
        self.epoch = launch.epoch
        self.router = Router(self.config)
        self.members = Members()
        self.table = messages.ProcessTable([], [], 0, launch.cluster.launcher)
        self.moved: collections.Counter[str] = collections.Counter()
        self.decisions = Decisions()
        self._hint: ScaleHint | None = None
        self._hint_s = 0.0
        self.registry = Rollout(adapter_log, self.members, self.handle, self.config.queue_timeout_s)
        self._model = launch.model
        self._credentials = credentials_of(launch.secret, launch.cluster.tls, launch.router[0])
        self._engine = launch.engine
        self._owners: dict[RequestId, tuple[FrontendMember, AdapterId]] = {}
        self._orders: dict[int, tuple[Link, messages.Rulings]] = {}
        self._fenced: dict[ReplicaId, int] = {}
        self._could_serve = False
        self._held_back: list[tuple[FrontendMember, messages.Note]] | None = None
        if launch.takes_over:
            self._held_back = []
        else:
            try:
                self.registry.begin(named)
            except AdapterError as error:
                raise ConfigError(str(error)) from error
        self._is_served = asyncio.Event()  # a replica has been up
        self._tasks = Tasks()
        self._timer: asyncio.TimerHandle | None = None
        self._solver = SolverProcess(SOLVE_S) if solver_is_there() else None
        self._solving = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="manylora-solving")
        self._journal, trace = open_of_router(launch.engine, self.config, launch.epoch)
        self.trace = TraceLines(trace)

    async def start(self, launch: children.Launch) -> None:
        """Listen, and take over what another router has left."""
        self._loop = asyncio.get_running_loop()
        self.registry.take_over()
        self._tasks.spawn(self.registry.retry())
        listener = Listener(
            adopt(launch.descriptor),
            self._credentials,
            self.epoch,
            launch.cluster.silence_s,
            _decoders.get,
            self._judge,
            self._serve,
        )
        await listener.start()
        if self._held_back is not None:
            self._is_served.set()
            self._loop.call_later(SETTLE_S, self._settle)

    def close(self) -> None:
        """Write what is still to be written."""
        if self._journal is not None:
            self._journal.close()
        self.trace.close()
        if self._solver is not None:
            self._solver.close()

    @property
    def hint(self) -> ScaleHint | None:
        """Give the router's last hint, while it is fresh: the router repeats it at least so often."""
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
            case Assign() | Withdraw() | Refuse():
                self._order(command)
            case commands.SetTimer(at):
                self._timer = self._loop.call_later(max(0.0, at - now), self.handle, events.Timer())
            case Fence(replica, epoch):
                self._fence(replica, epoch)
            case AskReport(replica):
                if (member := self.members.replicas.get(replica)) is not None:
                    member.link.send(messages.AskWhole())
            case Place(adapter, replica):
                self._keep(adapter, replica, True)
            case Unplace(adapter, replica):
                self._keep(adapter, replica, False)
            case Solve():
                self._solve(command)
            case ScaleHint():
                self._hint, self._hint_s = command, now
            case Routed():
                if command.source is not None:
                    self.moved[command.reason] += 1
                self.trace.write(now, command)
            case Planned():
                self.trace.write(now, command)

    def _keep(self, adapter: AdapterId, replica: ReplicaId, is_kept: bool) -> None:
        if (member := self.members.replicas.get(replica)) is not None:
            member.link.send(messages.KeepAdapter(adapter, is_kept))

    def _order(self, command: Assign | Withdraw | Refuse) -> None:
        owner = self._owners.get(command.request)
        if owner is None:
            return
        member, _ = owner
        if not self._orders:
            self._loop.call_soon(self._send_orders)
        _, orders = self._orders.setdefault(id(member.link), (member.link, messages.Rulings()))
        if isinstance(command, Assign):
            orders.assign.append(command)
        elif isinstance(command, Withdraw):
            orders.withdraw.append(command)
        else:
            orders.refuse.append(command)
            self._disown(command.request)

    def _send_orders(self) -> None:
        orders, self._orders = self._orders, {}
        for link, each in orders.values():
            link.send(each)

    def send_to_supervisor(self, message: messages.ToSupervisorFromRouter) -> None:
        """Send a message; without a link the cluster is ending, and it is dropped."""
        if self.members.supervisor is not None:
            self.members.supervisor.send(message)

    def _solve(self, problem: Solve) -> None:
        solver = self._solver
        if solver is None:
            return

        def work() -> None:
            answer = solver.solve(problem)
            self._loop.call_soon_threadsafe(self.handle, answer)

        self._solving.submit(work)

    def _fence(self, replica: ReplicaId, epoch: int) -> None:
        self._fenced[replica] = max(epoch, self._fenced.get(replica, 0))
        self.send_to_supervisor(messages.EndReplica(replica, epoch))
        self._forget_replica(replica, epoch)

    def _forget_replica(self, replica: ReplicaId, epoch: int) -> None:
        member = self.members.replicas.get(replica)
        if member is not None and member.epoch <= epoch:
            member.link.abort()
            del self.members.replicas[replica]
            self.registry.pulse()
        self._send_endpoints()

    def _send_endpoints(self) -> None:
        if self._held_back is not None:
            return  # what is not linked yet may serve: front ends keep their links to it
        endpoints = self.members.endpoints(self.router.fleet.up)
        self._could_serve = endpoints.can_serve
        self.members.send_to_frontends(endpoints)

    def look(self) -> None:
        """Tell front ends where replicas have become silent, drain, or serve again."""
        if can_serve(self.router.fleet.up) != self._could_serve:
            self._send_endpoints()

    # ------------------------------------------------------------ links

    def _judge(self, hello: Hello) -> str | None:
        if hello.role == messages.REPLICA:
            slot = next((slot for slot in self.table.slots if slot.id == hello.id), None)
            least = max(self._fenced.get(hello.id, 0) + 1, 0 if slot is None else slot.epoch)
            is_left = slot is not None and slot.epoch == hello.epoch and slot.pid not in (0, hello.pid)
            if hello.epoch < least or is_left:  # or of a supervisor that has died
                return f"epoch {hello.epoch} of replica {hello.id} is over"
        return why_strange(hello, hello.model if hello.role == messages.NEWCOMER else self._model)

    async def _serve(self, link: Link) -> None:
        if link.peer.role == messages.REPLICA:
            await self._serve_replica(link)
        elif link.peer.role == messages.FRONTEND:
            await self._serve_frontend(link)
        elif link.peer.role == messages.NEWCOMER:
            await self._serve_newcomer(link)
        elif link.peer.role == messages.PULLER:
            await serve_files(link, self.registry)
        else:
            await self._serve_supervisor(link)

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
        # One that is up may come back. If it does not, the supervisor says so, or its lease runs out.
        if self.members.replicas.get(hello.id) is member and not self._is_up(member):
            del self.members.replicas[hello.id]
            self.registry.pulse()

    def _is_up(self, member: ReplicaMember) -> bool:
        known = self.router.fleet.up.get(member.id)
        return known is not None and known.epoch == member.epoch

    def _see_if_up(self, member: ReplicaMember) -> None:
        if member.up is None or not member.has_answered or self.members.replicas.get(member.id) is not member:
            return
        up = self.router.fleet.up
        is_last = all(slot.id in up or slot.id == member.id for slot in self.table.slots)
        self.registry.settle(member, is_last=is_last)
        if not self._is_up(member):
            self.handle(ReplicaUp(member.id, member.epoch, member.up.facts, self.registry.lacks(member)))
            if not self._is_up(member):
                return
            member.link.send(messages.AskWhole())
            self._is_served.set()
            self._settle_if_all_are_there()
        for each in self.members.replicas.values():
            if self._is_up(each) and each.has_answered:
                lacks = self.registry.lacks(each)
                if lacks != tuple(sorted(up[each.id].lacks)):
                    self.handle(Lacks(each.id, each.epoch, lacks))
        self._send_endpoints()

    async def _serve_supervisor(self, link: Link) -> None:
        self.members.supervisor = link
        link.send(self.registry.whole())
        for replica, epoch in self._fenced.items():
            link.send(messages.EndReplica(replica, epoch))
        while (message := await link.receive()) is not None:
            match message:
                case messages.ProcessTable():
                    if not self.table.supervisor:  # the first one: of what another router has left
                        self._loop.call_later(1.2 * self.config.lease_s, self._end_unlinked, message.slots)
                    self.table = message
                    self._settle_if_all_are_there()
                case messages.Exited(replica, epoch, reason, is_crash, blamed):
                    level = logging.WARNING if is_crash else logging.INFO
                    log.log(level, "replica %d (epoch %d) has ended: %s", replica, epoch, reason)
                    self._fenced[replica] = max(epoch, self._fenced.get(replica, 0))
                    names = None if blamed is None else tuple(blamed)
                    self.handle(ReplicaDown(replica, epoch, reason, is_crash, names))
                    self._forget_replica(replica, epoch)
        if self.members.supervisor is link:
            self.members.supervisor = None

    async def _serve_newcomer(self, link: Link) -> None:
        timeout_s = self.config.queue_timeout_s
        link.send(messages.Joining(self._engine, self.table.info, self._model, timeout_s))
        await link.receive()  # nothing: it comes again as a front end

    async def _serve_frontend(self, link: Link) -> None:
        await self._is_served.wait()
        member = FrontendMember(link.peer.id, link)
        before = self.members.frontends.get(member.id)
        if before is not None:
            before.link.abort()
            self._lose_frontend(before)
        self.members.frontends[member.id] = member
        link.send(self.registry.whole())
        if self._held_back is None:
            link.send(self.members.endpoints(self.router.fleet.up))
        while (message := await link.receive()) is not None:
            match message:
                case messages.Note():
                    if self._held_back is not None:
                        self._held_back.append((member, message))
                    else:
                        self._receive_note(member, message)
                case messages.Synced():
                    member.is_synced = True
                    self._settle_if_all_are_there()
                case messages.HasRevision(revision):
                    self.registry.receive_revision(member, revision)
                case messages.AdapterCall():
                    self._tasks.spawn(self._answer_adapter_call(link, message))
                case messages.AskStatus(call):
                    link.send(messages.Reply(call, body=msgspec.json.encode(self.status())))
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
        news: list[Progress | Withdrawn] = [*note.progress, *note.withdrawn]
        for event in news:
            if event.request in self._owners:
                self.handle(event)
        ends: list[Ended | Cancelled] = [*note.ended, *note.cancelled]
        for end in ends:
            if self._disown(end.request, member):
                self.handle(end)

    def _own(self, member: FrontendMember, asked: Asked) -> bool:
        """Tell whether the request is this front end's; refuse it if another front end has one of the same id."""
        owner = self._owners.get(asked.request)
        if owner is None:
            self._owners[asked.request] = member, asked.adapter
            self.registry.use(asked.adapter)
        elif owner[0] is not member:
            error = RequestError(400, f"request id {asked.request!r} is already in use")
            member.link.send(messages.Rulings(refuse=[Refuse(asked.request, error)]))
            return False
        return True

    def _disown(self, request: RequestId, member: FrontendMember | None = None) -> bool:
        """Forget a request that has ended; False where it is not the front end's."""
        owner = self._owners.get(request)
        if owner is None or (member is not None and owner[0] is not member):
            return False
        del self._owners[request]
        self.registry.unuse(owner[1])
        return True

    def _lose_frontend(self, member: FrontendMember) -> None:
        """Cancel all its requests."""
        if self._held_back is not None:
            self._held_back = [each for each in self._held_back if each[0] is not member]
        for request, (owner, _) in list(self._owners.items()):
            if owner is member:
                self._disown(request)
                self.handle(Cancelled(request))

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
        are_synced = all(
            child.id in self.members.frontends and self.members.frontends[child.id].is_synced
            for child in self.table.frontends
        )
        if self.members.supervisor is not None and are_up and are_synced:
            self._settle()

    def _end_unlinked(self, slots: list[messages.Slot]) -> None:
        """Of those that ran before this router did. Each has had the time of a lease to come back, or to end."""
        for slot in self.members.unlinked(slots):
            if slot.epoch > self._fenced.get(slot.id, 0):
                log.error("replica %d has not come back to the router: it is ended", slot.id)
                self._fence(slot.id, slot.epoch)

    def _settle(self) -> None:
        """Begin to decide, with the notes that front ends have sent meanwhile first."""
        if self._held_back is None:
            return
        held_back, self._held_back = self._held_back, None
        log.info("the router has taken over")
        for member, note in held_back:
            self._receive_note(member, note)
        self._send_endpoints()

    def status(self) -> dict[str, Any]:
        """See ``cluster.status``."""
        return status(
            self.router,
            self.members,
            self.table,
            policy=self.config.policy,
            epoch=self.epoch,
            is_settled=self._held_back is None,
            revision=self.registry.revision,
            num_adapters=self.registry.num_listed,
            hint=self.hint,
            moved=dict(self.moved),
            decisions=self.decisions,
            lacks=self.registry.names_lacking(),
        )
