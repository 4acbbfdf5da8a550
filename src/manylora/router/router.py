"""One cluster's router: events in, commands out. It decides which replica serves which request.

Owns requests from Asked to their one end: the queue, attempts, moves, refusals. Owns the belief which replicas
are alive. A policy (``router.policies``) chooses among replicas. Knows no clock, no link, no token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any

from manylora.config.routing import RouterConfig, read_parameters
from manylora.protocol import commands, events, routing
from manylora.protocol.routing import ReplicaId, RouterCommand, RouterEvent
from manylora.router.fleet import Fleet
from manylora.router.policies.policy import Relocation, Wish, find_router
from manylora.router.queue import Quarantine, RouterQueue
from manylora.router.replicas import ReplicaState
from manylora.router.requests import LiveRequest
from manylora.router.scaling import ScaleHints
from manylora.types import RequestError, RequestId


class Router:
    """The state machine. ``handle`` is the only way to change it; commands come in execution order. For
    reading: ``fleet``, the replicas as the router knows them; ``requests``, the live ones, oldest first.

    It ignores unknown ids, late reports and old attempts.
    """

    def __init__(self, config: RouterConfig) -> None:
        """Raise ConfigError if the policy's settings cannot work."""
        self._config = config
        kind = find_router(config.policy)
        self._policy = kind(read_parameters(config.policy, kind.parameters, config.settings))
        self._drops = kind.handover == "drop"
        self.fleet = Fleet(config)
        self._scaling = ScaleHints(config)
        self.requests: dict[RequestId, LiveRequest] = {}
        self._queue = RouterQueue()
        self._quarantine = Quarantine()
        self._stranded: dict[RequestId, LiveRequest] = {}  # no replica that is up can hold them
        self._epochs: dict[ReplicaId, int] = {}  # the last of each replica that ever was up
        self._num_asked = 0
        self._timer_is_set = False
        self._may_serve = False  # waiting requests may find room now
        self._commands: list[RouterCommand] = []
        self._reactions: dict[type[RouterEvent], Callable[[Any], None]] = {
            routing.Asked: self._asked,
            routing.Held: self._held,
            routing.Progress: self._progress,
            routing.ReplicaReport: self._report,
            routing.Ended: self._ended,
            routing.Cancelled: self._cancelled,
            routing.Withdrawn: self._withdrawn,
            events.Timer: self._tick,
            routing.ReplicaUp: self._replica_up,
            routing.ReplicaDown: self._replica_down,
            routing.Drain: self._drain,
            routing.MoveAsked: self._move,
            routing.Listed: self.fleet.list_adapter,
            routing.Unlisted: self.fleet.unlist_adapter,
            routing.Lacks: self._lacks,
            routing.Solved: self._solved,
        }

    # ------------------------------------------------------------ the door

    def handle(self, event: RouterEvent, now: float) -> list[RouterCommand]:
        """React to one event at time ``now`` (seconds, any origin, never decreasing)."""
        self.fleet.now = now
        self._reactions[type(event)](event)
        if self._may_serve:
            self._may_serve = False
            self._serve_quarantined()
            self._serve_queue()
        if not self._timer_is_set and (self.fleet.up or self.requests):
            self._timer_is_set = True
            self._commands.append(commands.SetTimer(now + self._config.tick_s))
        decided, self._commands = self._commands, []
        return decided

    @property
    def num_waiting(self) -> int:
        """The number of requests that are on no replica."""
        return len(self._queue.waiting) + len(self._stranded) + len(self._quarantine.waiting)

    # ------------------------------------------------------------ requests

    def _asked(self, asked: routing.Asked) -> None:
        request = self.requests.get(asked.request)
        if request is not None:
            self._asked_again(request, asked)
            return
        size = self.fleet.adapters.get(asked.adapter)
        if size is None:
            error = RequestError(404, "the adapter is not served any more", "model")
            self._commands.append(routing.Refuse(asked.request, error))
            return
        request = self._open(asked, size)
        if not self._is_refused(request):
            self._place(request)

    def _open(self, asked: routing.Asked, size: tuple[int, int]) -> LiveRequest:
        self._num_asked += 1
        request = LiveRequest(asked, *size, self.fleet.now, self._num_asked)
        self.requests[request.id] = request
        return request

    def _held(self, held: routing.Held) -> None:
        """Take over a request that another router assigned to a replica."""
        asked, replica = held.asked, self.fleet.find(held.replica, held.epoch)
        if asked.request in self.requests:
            return
        size = self.fleet.adapters.get(asked.adapter)
        if replica is None or size is None:
            self._asked(asked)
            return
        request = self._open(asked, size)
        if self.fleet.fits_ever(replica, request):
            request.hold(replica.id, replica.shape[-1])
            self.fleet.hold(replica, request)
        elif not self._is_refused(request):
            self._place(request)

    def _asked_again(self, request: LiveRequest, asked: routing.Asked) -> None:
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
        elif self.fleet.known_shapes and not self.fleet.is_any_shape_right(request):
            self._refuse(request, 400, "no replica can ever hold the request")
        else:
            return False
        return True

    def _refuse(self, request: LiveRequest, status: int, message: str) -> None:
        self._forget(request)
        self._commands.append(routing.Refuse(request.id, RequestError(status, message)))

    def _ended(self, event: routing.Ended) -> None:
        request = self.requests.get(event.request)
        if request is None:
            return
        if event.output_tokens:
            self.fleet.lengths.saw(request.adapter, event.output_tokens)
        if request.replica is not None:
            self.fleet.prefixes.add(event.blocks, self.fleet.up[request.replica])
        self._forget(request)

    def _cancelled(self, event: routing.Cancelled) -> None:
        request = self.requests.get(event.request)
        if request is not None:
            self._forget(request)

    def _progress(self, event: routing.Progress) -> None:
        request = self.requests.get(event.request)
        if request is not None:
            request.note_progress(event.sample, event.position)
            if self._quarantine.is_cleared(request):
                self._end_quarantine(request)

    def _forget(self, request: LiveRequest) -> None:
        if request.replica is not None:
            self._take_off(request, "ended")
        elif self._quarantine.waiting.pop(request.id, None) is not None:
            self._end_quarantine(request)
        elif request.id in self._queue.waiting:
            del self._queue.waiting[request.id]
            self._may_serve = True  # it may have blocked others
        else:
            self._stranded.pop(request.id, None)
        del self.requests[request.id]

    def _take_off(self, request: LiveRequest, reason: str) -> None:
        """Take the request off its replica."""
        assert request.replica is not None
        self.fleet.drop(self.fleet.up[request.replica], request)
        request.leave(reason)
        self._end_quarantine(request)
        self._may_serve = True

    def _end_quarantine(self, request: LiveRequest) -> None:
        """Give up the replica that is reserved for the request."""
        self._quarantine.leave(self.fleet, request)
        self._may_serve = True

    # ------------------------------------------------------------ placing

    def _place(self, request: LiveRequest) -> None:
        """Assign the request to a replica, or queue it."""
        if self._runs_alone(request):
            self._wait(request)
            return
        others_wait = bool(self._queue.waiting)
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
            self._quarantine.waiting[request.id] = request
        else:
            self._queue.put(request)
        self._may_serve = True

    def _try(self, request: LiveRequest) -> bool:
        replica = self._policy.choose(self.fleet, request)
        if replica is None:
            return False
        self._assign(request, replica)
        return True

    def _is_stranded(self, request: LiveRequest) -> bool:
        """Set the request aside if no replica that is up can serve it, so that it blocks no others."""
        if self.fleet.is_any_right(request):
            return False
        request.gap_s = self.fleet.now
        self._stranded[request.id] = request
        return True

    def _assign(self, request: LiveRequest, replica: ReplicaState) -> None:
        number = self.fleet.take(replica, request)
        request.assign(replica.id, number, replica.shape[-1])
        resume = tuple(request.positions) if request.num_generated else ()
        failures, deaths = request.failures, request.deaths
        self._commands.append(
            routing.Assign(request.id, request.attempt, replica.id, number, resume, failures, deaths)
        )
        if self._config.trace:
            waited_s = self.fleet.now - request.key[0]
            source = request.source
            self._commands.append(
                routing.Routed(request.id, request.attempt, replica.id, request.reason, waited_s, source)
            )

    def _serve_queue(self) -> None:
        """Assign waiting requests, oldest first, until one finds no replica."""
        while (request := self._queue.first()) is not None:
            if not (self._try(request) or self._is_stranded(request)):
                return
            del self._queue.waiting[request.id]

    def _serve_quarantined(self) -> None:
        """Assign quarantined requests whose reserved replica is empty; reserve one for each of the others."""
        for request in sorted(self._quarantine.waiting.values(), key=attrgetter("key")):
            if self._is_stranded(request):
                del self._quarantine.waiting[request.id]
                self._quarantine.leave(self.fleet, request)
            elif (replica := self._quarantine.replica_for(self.fleet, request)) is not None:
                del self._quarantine.waiting[request.id]
                self._assign(request, replica)

    # ------------------------------------------------------------ moves

    def _move(self, event: routing.MoveAsked) -> None:
        request = self.requests.get(event.request)
        if request is None or request.replica == event.replica:
            return
        if self.fleet.can_take(self.fleet.up.get(event.replica), request):
            self._withdraw(request, event.replica, "asked")

    def _carry_out(self, wishes: Sequence[Wish]) -> None:
        for wish in wishes:
            if isinstance(wish, Relocation):
                self._relocate(wish)
            elif self._config.trace or not isinstance(wish, routing.Planned):
                self._commands.append(wish)

    def _relocate(self, wish: Relocation) -> None:
        """Begin a move, if its request is still where the policy saw it."""
        request = self.requests.get(wish.request)
        if request is None or (request.attempt, request.replica) != (wish.attempt, wish.source):
            return
        if wish.target is not None and not self.fleet.can_take(self.fleet.up.get(wish.target), request):
            return
        if not wish.is_forced:
            now, config = self.fleet.now, self._config
            if now - request.moved_s < config.move_cooldown_s:
                return
            if wish.gain_s <= wish.cost_s * 2**request.num_moves:
                return
        if self._withdraw(request, wish.target, wish.reason) and not wish.is_forced:
            request.moved_s = self.fleet.now
            request.num_moves += 1

    def _withdraw(self, request: LiveRequest, target: ReplicaId | None, reason: str) -> bool:
        """Ask its replica to release the request, if that has it and was not asked yet."""
        if request.replica is None or not request.can_leave:
            return False
        self._commands.append(routing.Withdraw(request.id, request.attempt, request.replica))
        request.withdraw(target, reason)
        if self._drops:
            self._hand_over(request)
        return True

    def _withdrawn(self, event: routing.Withdrawn) -> None:
        request = self.requests.get(event.request)
        if request is None or not request.is_withdrawing or request.attempt != event.attempt:
            return
        for sample, position in enumerate(event.positions):
            request.note_progress(sample, position)
        self._hand_over(request)

    def _hand_over(self, request: LiveRequest) -> None:
        """Move the request to its target, or to a replica that is chosen now."""
        name, reason = request.target, request.reason
        self._take_off(request, reason)
        target = None if name is None or self._runs_alone(request) else self.fleet.up.get(name)
        if target is not None and self.fleet.can_take(target, request) and target.has_room(request):
            self._assign(request, target)
        else:
            self._place(request)

    # ------------------------------------------------------------ replicas

    def _replica_up(self, event: routing.ReplicaUp) -> None:
        if event.epoch <= self._epochs.get(event.replica, -1):
            if self.fleet.find(event.replica, event.epoch) is None:
                self._commands.append(routing.Fence(event.replica, event.epoch))
            return
        if (before := self.fleet.up.get(event.replica)) is not None:
            self._lose(before, is_crash=False)
        self._epochs[event.replica] = event.epoch
        replica = self.fleet.add(event.replica, event.epoch, event.facts)
        self.fleet.note_lacks(replica, event.lacks)
        self._requeue_stranded()

    def _lacks(self, event: routing.Lacks) -> None:
        """Note the adapters that a replica cannot serve, and move their requests elsewhere."""
        if (replica := self.fleet.find(event.replica, event.epoch)) is None:
            return
        self.fleet.note_lacks(replica, event.adapters)
        for request in list(replica.requests.values()):
            if request.adapter in replica.lacks:
                self._take_off(request, "lost")
                self._wait(request)
        self._requeue_stranded()

    def _requeue_stranded(self) -> None:
        """Queue requests that were set aside and may find a replica now; refuse those that never can."""
        self._may_serve = True
        for request in list(self._stranded.values()):
            if self.fleet.is_any_right(request):
                del self._stranded[request.id]
                self._wait(request)
            elif not self.fleet.is_any_shape_right(request):
                self._refuse(request, 400, "no replica can ever hold the request")

    def _report(self, report: routing.ReplicaReport) -> None:
        replica = self.fleet.find(report.replica, report.epoch)
        if replica is None:
            if report.epoch <= self._epochs.get(report.replica, -1):
                self._commands.append(routing.Fence(report.replica, report.epoch))
            return
        if report.status.seq <= replica.report.seq:
            return
        had_gap = replica.has_gap
        for name in self.fleet.receive(replica, report):
            self.requests[name].is_accepted = True
        if replica.has_gap and not had_gap:
            self._commands.append(routing.AskReport(replica.id))
        self._may_serve = bool(self._queue.waiting or self._quarantine.waiting)
        if report.status.is_exhausted:
            self._carry_out(self._policy.on_timer(self.fleet))

    def _replica_down(self, event: routing.ReplicaDown) -> None:
        replica = self.fleet.find(event.replica, event.epoch)
        if replica is not None:
            self._lose(replica, event.is_crash, event.blamed)

    def _lose(
        self, replica: ReplicaState, is_crash: bool, blamed: Collection[RequestId] | None = None
    ) -> None:
        """Remove a replica that is down and move its requests elsewhere, oldest first.

        Only a crash counts against the requests.
        """
        self._quarantine.lose(replica)
        lost = sorted(replica.requests.values(), key=attrgetter("key"))
        for request in lost:
            self._take_off(request, "lost")
            if is_crash:
                request.die(request.is_accepted if blamed is None else request.id in blamed)
        self.fleet.remove(replica)
        for request in lost:
            if not self._is_refused(request):
                self._wait(request)
        self._may_serve = True

    def _drain(self, event: routing.Drain) -> None:
        replica = self.fleet.up.get(event.replica)
        if replica is None:
            return
        since_s = self.fleet.now - (self._config.drain_timeout_s if event.migrate else 0.0)
        self.fleet.drain(replica, since_s)
        if event.migrate:
            self._empty(replica)

    def _empty(self, replica: ReplicaState) -> None:
        for request in list(replica.requests.values()):
            self._withdraw(request, None, "drain")

    # ------------------------------------------------------------ the clock

    def _solved(self, event: routing.Solved) -> None:
        self._carry_out(self._policy.on_solved(self.fleet, event))

    def _tick(self, _: events.Timer) -> None:
        self._timer_is_set = False
        fleet, config, now = self.fleet, self._config, self.fleet.now
        for replica in list(fleet.up.values()):
            silent_s = now - replica.reported_s
            if silent_s > config.lease_s:
                self._commands.append(routing.Fence(replica.id, replica.epoch))
                self._lose(replica, is_crash=False)
            elif silent_s > config.suspect_s and not replica.is_suspect:
                fleet.suspect(replica)
            elif replica.drains_from_s is not None and now - replica.drains_from_s >= config.drain_timeout_s:
                self._empty(replica)
        for request in list(self._stranded.values()):
            if request.gap_s is not None and now - request.gap_s >= config.queue_timeout_s:
                self._refuse(request, 503, self.fleet.why_none(request))
        self._carry_out(self._policy.on_timer(fleet))
        hint = self._scaling.tick(fleet, self.num_waiting)
        if hint is not None:
            self._commands.append(hint)
