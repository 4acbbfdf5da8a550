"""One cluster's router: events in, commands out. It decides which replica serves which request.

Owns requests from Asked to their one end: the queue, attempts, moves, refusals. Owns the belief which replicas
are alive. A policy (``router.policies``) chooses among replicas. Knows no clock, no link, no token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from manylora.config.routing import RouterConfig, read_parameters
from manylora.protocol import commands, events
from manylora.protocol.routing import (
    Asked,
    AskReport,
    Assign,
    Cancelled,
    Drain,
    Ended,
    Fence,
    Held,
    Lacks,
    Listed,
    MoveAsked,
    Planned,
    Progress,
    Refuse,
    ReplicaDown,
    ReplicaId,
    ReplicaReport,
    ReplicaUp,
    Routed,
    RouterCommand,
    RouterEvent,
    Solved,
    Unlisted,
    Withdraw,
    Withdrawn,
)
from manylora.router.fleet import Fleet
from manylora.router.policies.policy import Relocation, Wish, find_router
from manylora.router.queue import Quarantine, RouterQueue
from manylora.router.replicas import ReplicaState
from manylora.router.requests import LiveRequest
from manylora.router.scaling import ScaleHints
from manylora.types import RequestError, RequestId


class Router:
    """The state machine. ``handle`` is the only way to change it; commands come in execution order.

    It ignores unknown ids, late reports and old attempts.
    """

    def __init__(self, config: RouterConfig) -> None:
        """Raise ConfigError if the policy's settings cannot work."""
        self._config = config
        kind = find_router(config.policy)
        self._policy = kind(read_parameters(config.policy, kind.parameters, config.settings))
        self._drops = kind.handover == "drop"
        self._fleet = Fleet(config)
        self._scaling = ScaleHints(config)
        self._requests: dict[RequestId, LiveRequest] = {}
        self._queue = RouterQueue()
        self._quarantine = Quarantine()
        self._stranded: dict[RequestId, LiveRequest] = {}  # no replica that is up can hold them
        self._epochs: dict[ReplicaId, int] = {}  # the last of each replica that ever was up
        self._num_asked = 0
        self._timer_is_set = False
        self._may_serve = False  # waiting requests may find room now
        self._commands: list[RouterCommand] = []

    # ------------------------------------------------------------ the door

    def handle(self, event: RouterEvent, now: float) -> list[RouterCommand]:
        """React to one event at time ``now`` (seconds, any origin, never decreasing)."""
        self._fleet.now = now
        match event:
            case Asked():
                self._asked(event)
            case Held():
                self._held(event)
            case Progress():
                request = self._requests.get(event.request)
                if request is not None:
                    request.note_progress(event.sample, event.position)
                    if self._quarantine.is_cleared(request):
                        self._end_quarantine(request)
            case ReplicaReport():
                self._report(event)
            case Ended():
                self._ended(event)
            case Cancelled():
                self._end(event.request)
            case Withdrawn():
                self._withdrawn(event)
            case events.Timer():
                self._timer_is_set = False
                self._tick()
            case ReplicaUp():
                self._replica_up(event)
            case ReplicaDown():
                replica = self._fleet.up.get(event.replica)
                if replica is not None and replica.epoch == event.epoch:
                    self._lose(replica, event.is_crash, event.blamed)
            case Drain():
                self._drain(event)
            case MoveAsked():
                self._move(event)
            case Listed():
                self._fleet.list_adapter(event.adapter, event.rank, event.num_pages)
            case Unlisted():
                self._fleet.unlist_adapter(event.adapter)
            case Lacks():
                self._lacks(event)
            case Solved():
                self._carry_out(self._policy.on_solved(self._fleet, event))
        if self._may_serve:
            self._may_serve = False
            self._serve_quarantined()
            self._serve_queue()
        if not self._timer_is_set and (self._fleet.up or self._requests):
            self._timer_is_set = True
            self._commands.append(commands.SetTimer(now + self._config.tick_s))
        decided, self._commands = self._commands, []
        return decided

    @property
    def fleet(self) -> Fleet:
        """The replicas as the router knows them, for reading."""
        return self._fleet

    @property
    def num_waiting(self) -> int:
        """The number of requests that are on no replica."""
        return len(self._queue) + len(self._stranded) + len(self._quarantine)

    def requests(self) -> tuple[RequestId, ...]:
        """Return the live requests, oldest first."""
        return tuple(self._requests)

    def can_leave(self, request: RequestId) -> bool:
        """Return whether a move of the request can begin."""
        found = self._requests.get(request)
        return found is not None and found.can_leave

    # ------------------------------------------------------------ requests

    def _asked(self, asked: Asked) -> None:
        request = self._requests.get(asked.request)
        if request is not None:
            self._asked_again(request, asked)
            return
        size = self._fleet.adapters.get(asked.adapter)
        if size is None:
            error = RequestError(404, "the adapter is not served any more", "model")
            self._commands.append(Refuse(asked.request, error))
            return
        request = self._open(asked, size)
        if not self._is_refused(request):
            self._place(request)

    def _open(self, asked: Asked, size: tuple[int, int]) -> LiveRequest:
        self._num_asked += 1
        request = LiveRequest(asked, *size, self._fleet.now, self._num_asked)
        self._requests[request.id] = request
        return request

    def _held(self, held: Held) -> None:
        """Take over a request that another router assigned to a replica."""
        asked, replica = held.asked, self._fleet.up.get(held.replica)
        if asked.request in self._requests:
            return
        size = self._fleet.adapters.get(asked.adapter)
        if replica is None or replica.epoch != held.epoch or size is None:
            self._asked(asked)
            return
        request = self._open(asked, size)
        if self._fleet.fits_ever(replica, request):
            request.hold(replica.id, replica.shape[-1])
            self._fleet.hold(replica, request)
        elif not self._is_refused(request):
            self._place(request)

    def _asked_again(self, request: LiveRequest, asked: Asked) -> None:
        """Take a repeated request: the front end may know sooner than the router that an attempt is lost."""
        if asked.attempts < request.attempt or request.replica is None:
            return
        for sample, position in enumerate(asked.generated):
            request.note_progress(sample, position)
        request.attempt = asked.attempts
        self._take_off(request, "lost")
        request.failures += 1
        if not self._is_refused(request):
            self._place(request)

    def _is_refused(self, request: LiveRequest) -> bool:
        """Refuse a request that cannot be served, if so."""
        if request.deaths > self._config.poison_deaths:
            self._refuse(request, 503, f"{request.deaths} replicas have died with the request {request.id}")
        elif request.failures >= self._config.max_attempts:
            self._refuse(request, 503, f"the request was tried {request.failures} times in vain")
        elif self._fleet.knows_shapes and not self._fleet.is_any_shape_right(request):
            self._refuse(request, 400, "no replica can ever hold the request")
        else:
            return False
        return True

    def _refuse(self, request: LiveRequest, status: int, message: str) -> None:
        self._forget(request)
        self._commands.append(Refuse(request.id, RequestError(status, message)))

    def _ended(self, event: Ended) -> None:
        request = self._requests.get(event.request)
        if request is None:
            return
        if event.output_tokens:
            self._fleet.lengths.saw(request.adapter, event.output_tokens)
        if request.replica is not None:
            self._fleet.prefixes.add(event.blocks, self._fleet.up[request.replica])
        self._forget(request)

    def _end(self, name: RequestId) -> None:
        """End a request in any state."""
        request = self._requests.get(name)
        if request is not None:
            self._forget(request)

    def _forget(self, request: LiveRequest) -> None:
        if request.replica is not None:
            self._take_off(request, "ended")
        elif request in self._quarantine:
            self._quarantine.remove(request)
            self._end_quarantine(request)
        elif self._stranded.pop(request.id, None) is None and request in self._queue:
            self._queue.remove(request)
            self._may_serve = True  # it may have blocked others
        del self._requests[request.id]

    def _take_off(self, request: LiveRequest, reason: str) -> None:
        """Take the request off its replica."""
        assert request.replica is not None
        self._fleet.drop(self._fleet.up[request.replica], request)
        request.leave(reason)
        self._end_quarantine(request)
        self._may_serve = True

    def _end_quarantine(self, request: LiveRequest) -> None:
        """Give up the replica that is reserved for the request."""
        self._quarantine.leave(self._fleet, request)
        self._may_serve = True

    # ------------------------------------------------------------ placing

    def _place(self, request: LiveRequest) -> None:
        """Assign the request to a replica, or queue it."""
        if self._runs_alone(request):
            self._wait(request)
            return
        others_wait = len(self._queue) > 0
        if (not others_wait and self._try(request)) or self._is_stranded(request):
            return
        self._queue.put(request)
        if others_wait and self._queue.first() is request:
            self._may_serve = True

    def _runs_alone(self, request: LiveRequest) -> bool:
        return request.deaths >= self._config.poison_deaths

    def _wait(self, request: LiveRequest) -> None:
        """Queue the request, or quarantine it."""
        if self._runs_alone(request):
            self._quarantine.put(request)
        else:
            self._queue.put(request)
        self._may_serve = True

    def _try(self, request: LiveRequest) -> bool:
        replica = self._policy.choose(self._fleet, request)
        if replica is None:
            return False
        self._assign(request, replica)
        return True

    def _is_stranded(self, request: LiveRequest) -> bool:
        """Set the request aside if no replica that is up can serve it, so that it blocks no others."""
        if self._fleet.is_any_right(request):
            return False
        request.gap_s = self._fleet.now
        self._stranded[request.id] = request
        return True

    def _assign(self, request: LiveRequest, replica: ReplicaState) -> None:
        number = self._fleet.take(replica, request)
        request.assign(replica.id, number, replica.shape[-1])
        resume = tuple(request.positions) if request.num_generated else ()
        failures, deaths = request.failures, request.deaths
        self._commands.append(
            Assign(request.id, request.attempt, replica.id, number, resume, failures, deaths)
        )
        if self._config.trace:
            waited_s = self._fleet.now - request.key[0]
            source = request.source
            self._commands.append(
                Routed(request.id, request.attempt, replica.id, request.reason, waited_s, source)
            )

    def _serve_queue(self) -> None:
        """Assign waiting requests, oldest first, until one finds no replica."""
        while (request := self._queue.first()) is not None:
            if not (self._try(request) or self._is_stranded(request)):
                return
            self._queue.remove(request)

    def _serve_quarantined(self) -> None:
        """Assign quarantined requests whose reserved replica is empty; reserve one for each of the others."""
        for request in self._quarantine.waiting():
            if self._is_stranded(request):
                self._quarantine.remove(request)
                self._quarantine.leave(self._fleet, request)
            elif (replica := self._quarantine.replica_for(self._fleet, request)) is not None:
                self._quarantine.remove(request)
                self._assign(request, replica)

    # ------------------------------------------------------------ moves

    def _move(self, event: MoveAsked) -> None:
        request = self._requests.get(event.request)
        if request is None or request.replica == event.replica:
            return
        if self._fleet.can_take(self._fleet.up.get(event.replica), request):
            self._withdraw(request, event.replica, "asked")

    def _carry_out(self, wishes: Sequence[Wish]) -> None:
        for wish in wishes:
            if isinstance(wish, Relocation):
                self._relocate(wish)
            elif self._config.trace or not isinstance(wish, Planned):
                self._commands.append(wish)

    def _relocate(self, wish: Relocation) -> None:
        """Begin a move, if its request is still where the policy saw it."""
        request = self._requests.get(wish.request)
        if request is None or (request.attempt, request.replica) != (wish.attempt, wish.source):
            return
        if wish.target is not None and not self._fleet.can_take(self._fleet.up.get(wish.target), request):
            return
        if not wish.is_forced:
            now, config = self._fleet.now, self._config
            if now - request.moved_s < config.move_cooldown_s:
                return
            if wish.gain_s <= wish.cost_s * 2**request.num_moves:
                return
        if self._withdraw(request, wish.target, wish.reason) and not wish.is_forced:
            request.moved_s = self._fleet.now
            request.num_moves += 1

    def _withdraw(self, request: LiveRequest, target: ReplicaId | None, reason: str) -> bool:
        """Ask its replica to release the request, if that has it and was not asked yet."""
        if request.replica is None or not request.can_leave:
            return False
        self._commands.append(Withdraw(request.id, request.attempt, request.replica))
        request.withdraw(target, reason)
        if self._drops:
            self._hand_over(request)
        return True

    def _withdrawn(self, event: Withdrawn) -> None:
        request = self._requests.get(event.request)
        if request is None or not request.is_withdrawing or request.attempt != event.attempt:
            return
        for sample, position in enumerate(event.positions):
            request.note_progress(sample, position)
        self._hand_over(request)

    def _hand_over(self, request: LiveRequest) -> None:
        """Move the request to its target, or to a replica that is chosen now."""
        name, reason = request.target, request.reason
        self._take_off(request, reason)
        target = None if name is None or self._runs_alone(request) else self._fleet.up.get(name)
        if target is not None and self._fleet.can_take(target, request) and target.has_room(request):
            self._assign(request, target)
        else:
            self._place(request)

    # ------------------------------------------------------------ replicas

    def _replica_up(self, event: ReplicaUp) -> None:
        if event.epoch <= self._epochs.get(event.replica, -1):
            known = self._fleet.up.get(event.replica)
            if known is None or known.epoch != event.epoch:
                self._commands.append(Fence(event.replica, event.epoch))
            return
        before = self._fleet.up.get(event.replica)
        if before is not None:
            self._lose(before, is_crash=False)
        self._epochs[event.replica] = event.epoch
        replica = self._fleet.add(event.replica, event.epoch, event.facts)
        self._fleet.note_lacks(replica, event.lacks)
        self._requeue_stranded()

    def _lacks(self, event: Lacks) -> None:
        """Note the adapters that a replica cannot serve, and move their requests elsewhere."""
        if (replica := self._fleet.up.get(event.replica)) is None or replica.epoch != event.epoch:
            return
        self._fleet.note_lacks(replica, event.adapters)
        for request in list(replica.requests.values()):
            if request.adapter in replica.lacks:
                self._take_off(request, "lost")
                self._wait(request)
        self._requeue_stranded()

    def _requeue_stranded(self) -> None:
        """Queue requests that were set aside and may find a replica now; refuse those that never can."""
        self._may_serve = True
        for request in list(self._stranded.values()):
            if self._fleet.is_any_right(request):
                del self._stranded[request.id]
                self._wait(request)
            elif not self._fleet.is_any_shape_right(request):
                self._refuse(request, 400, "no replica can ever hold the request")

    def _report(self, report: ReplicaReport) -> None:
        replica = self._fleet.up.get(report.replica)
        if replica is None or replica.epoch != report.epoch:
            if report.epoch <= self._epochs.get(report.replica, -1):
                self._commands.append(Fence(report.replica, report.epoch))
            return
        if report.status.seq <= replica.report.seq:
            return
        had_gap = replica.has_gap
        for name in self._fleet.receive(replica, report):
            self._requests[name].is_accepted = True
        if replica.has_gap and not had_gap:
            self._commands.append(AskReport(replica.id))
        self._may_serve = len(self._queue) + len(self._quarantine) > 0
        if report.status.is_exhausted:
            self._carry_out(self._policy.on_timer(self._fleet))

    def _lose(
        self, replica: ReplicaState, is_crash: bool, blamed: Collection[RequestId] | None = None
    ) -> None:
        """Remove a replica that is down and move its requests elsewhere, oldest first.

        Only a crash counts against the requests.
        """
        self._quarantine.lose(replica)
        lost = sorted(replica.requests.values(), key=lambda request: request.key)
        for request in lost:
            self._take_off(request, "lost")
            if is_crash:
                request.die(request.is_accepted if blamed is None else request.id in blamed)
        self._fleet.remove(replica)
        for request in lost:
            if not self._is_refused(request):
                self._wait(request)
        self._may_serve = True

    def _drain(self, event: Drain) -> None:
        replica = self._fleet.up.get(event.replica)
        if replica is None:
            return
        since_s = self._fleet.now - (self._config.drain_timeout_s if event.migrate else 0.0)
        self._fleet.drain(replica, since_s)
        if event.migrate:
            self._empty(replica)

    def _empty(self, replica: ReplicaState) -> None:
        for request in list(replica.requests.values()):
            self._withdraw(request, None, "drain")

    # ------------------------------------------------------------ the clock

    def _tick(self) -> None:
        fleet, config, now = self._fleet, self._config, self._fleet.now
        for replica in list(fleet.up.values()):
            silent_s = now - replica.reported_s
            if silent_s > config.lease_s:
                self._commands.append(Fence(replica.id, replica.epoch))
                self._lose(replica, is_crash=False)
            elif silent_s > config.suspect_s and not replica.is_suspect:
                fleet.suspect(replica)
            elif replica.drains_from_s is not None and now - replica.drains_from_s >= config.drain_timeout_s:
                self._empty(replica)
        for request in list(self._stranded.values()):
            if request.gap_s is not None and now - request.gap_s >= config.queue_timeout_s:
                self._refuse(request, 503, self._fleet.why_none(request))
        self._carry_out(self._policy.on_timer(fleet))
        hint = self._scaling.tick(fleet, self.num_waiting)
        if hint is not None:
            self._commands.append(hint)
