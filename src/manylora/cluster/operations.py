"""Carries out operations on a cluster, for operators and for scaling: drains, moves, resizing, rolling restarts.

Each consists of events to the router and orders to the supervisor. None loses a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from manylora.cluster import messages
from manylora.cluster.children import Tasks
from manylora.cluster.members import state_of
from manylora.cluster.switchboard import Switchboard
from manylora.config.cluster import MOST_REPLICAS, ClusterOptions
from manylora.protocol.routing import Drain, MoveAsked, ReplicaId, ScaleHint

log = logging.getLogger(__name__)

LOOK_S = 0.05
WATCH_S = 0.1
MOVE_S = 10.0
"""The time after which an operation stops waiting for a move."""
ANSWER_S = 300.0
"""The time after which an operator gets an answer although the operation still runs."""

_T = TypeVar("_T")


class Refusal(Exception):
    """An operation that cannot be done; the message gives the reason."""


class Operations:
    """The operations of one router."""

    def __init__(self, board: Switchboard, options: ClusterOptions) -> None:
        self._board = board
        self._options = options
        self._removing: set[ReplicaId] = set()
        self._asked: set[ReplicaId] = set()  # replicas that the supervisor is to start
        self._drained: set[tuple[ReplicaId, int]] = set()  # epochs whose drain was begun here
        self._hint: ScaleHint | None = None
        self._tasks = Tasks()

    async def watch(self) -> None:
        """Continue the operations that an earlier router had begun. With ``--autoscale on``, follow the
        router's hints."""
        while True:
            await asyncio.sleep(WATCH_S)
            self._board.look()
            for slot in self._board.table.slots:
                is_begun = (slot.id, slot.epoch) in self._drained
                if slot.drains_to and not is_begun and self._is_up(slot.id, slot.epoch):
                    self._resume(slot)
            hint = self._board.hint
            if hint is not None and hint is not self._hint:
                self._hint = hint
                self._follow(hint)

    # ------------------------------------------------------------ what there is

    def _slot(self, replica: ReplicaId) -> messages.Slot | None:
        return next((slot for slot in self._board.table.slots if slot.id == replica), None)

    def _staying(self) -> list[ReplicaId]:
        return sorted(self._used() - self._removing)

    def _used(self) -> set[ReplicaId]:
        there = {slot.id for slot in self._board.table.slots}
        self._asked -= there
        return there | self._asked

    def _is_drained(self, replica: ReplicaId) -> bool:
        """Return whether the replica was drained, and is to stay so."""
        slot = self._slot(replica)
        return slot is not None and slot.drains_to == "stay"

    def _is_up(self, replica: ReplicaId, epoch: int) -> bool:
        known = self._board.router.fleet.up.get(replica)
        return known is not None and known.epoch >= epoch

    def _is_empty(self, replica: ReplicaId, epoch: int) -> bool:
        known = self._board.router.fleet.find(replica, epoch)
        return known is None or not known.requests

    async def _until(self, is_so: Callable[[], bool], most_s: float = float("inf")) -> bool:
        left_s = most_s
        while not is_so():
            if left_s <= 0:
                return False
            await asyncio.sleep(LOOK_S)
            left_s -= LOOK_S
        return True

    async def _until_up(self, epochs: dict[ReplicaId, int]) -> None:
        """Wait until these replicas run, in these epochs or later ones, or are gone. Raises Refusal where a
        start fails; the start is tried again nevertheless."""

        def are_up() -> bool:
            there = self._used()
            for replica, epoch in epochs.items():
                slot = self._slot(replica)
                if slot is not None and slot.epoch >= epoch and slot.state == "waiting" and slot.why:
                    raise Refusal(f"replica {replica} does not come up, and is tried again: {slot.why}")
            return all(self._is_up(*each) or each[0] not in there for each in epochs.items())

        await self._until(are_up)

    async def in_time(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return an operation's result. Raises Refusal, also where it takes too long; the operation then
        continues."""
        doing = asyncio.ensure_future(work)
        try:
            return await asyncio.wait_for(asyncio.shield(doing), ANSWER_S)
        except TimeoutError as error:
            board = self._board
            states = (f"replica {slot.id} is {state_of(slot, board.router)}" for slot in board.table.slots)
            raise Refusal(f"not done within {ANSWER_S:g} s, and going on: {', '.join(states)}") from error

    # ------------------------------------------------------------ drains

    async def empty(self, replica: ReplicaId, drains_to: str, *, migrate: bool) -> int:
        """Give the replica no more work, and return its epoch when it has no requests. ``drains_to``: see
        NoteDrain. Raises Refusal."""
        slot = self._slot(replica)
        if slot is None:
            raise Refusal(f"there is no replica {replica}")
        self._board.members.send_to_supervisor(messages.NoteDrain(replica, drains_to))
        self._drained.add((replica, slot.epoch))
        if self._is_up(replica, slot.epoch):
            self._board.handle(Drain(replica, migrate))
            await self._until(lambda: self._is_empty(replica, slot.epoch))
        return slot.epoch

    def _resume(self, slot: messages.Slot) -> None:
        if slot.drains_to == "remove":
            self._tasks.spawn(self._by_itself(self._remove(slot.id)))
        elif slot.drains_to == "restart":
            self._tasks.spawn(self._by_itself(self._start_anew(slot.id)))
        else:
            self._tasks.spawn(self._by_itself(self.empty(slot.id, slot.drains_to, migrate=False)))

    # ------------------------------------------------------------ scaling

    async def scale(self, count: int) -> None:
        """Scale to ``count`` replicas, and return when these run, and no others. Drained ones end first;
        drained ones that are still needed are started anew. Raises Refusal."""
        await self._resize(count)
        drained = [replica for replica in self._staying() if self._is_drained(replica)]
        await asyncio.gather(*(self._start_anew(replica) for replica in drained))
        staying = [slot for slot in self._board.table.slots if slot.id not in self._removing]
        await self._until_up({slot.id: slot.epoch + (slot.state == "waiting") for slot in staying})

    async def _resize(self, count: int) -> None:
        options, most = self._options, self._board.table.most
        low = 1 if options.min_replicas is None else options.min_replicas
        high = MOST_REPLICAS if options.max_replicas is None else options.max_replicas
        if not low <= count <= high:
            raise Refusal(f"{count} replicas are asked for, and there may be {low} to {high}")
        if most is not None and count > most:
            raise Refusal(f"{count} replicas are asked for, and this machine has GPUs for {most}")
        staying = sorted(self._staying(), key=self._is_drained)
        used = self._used()
        if count < len(staying):
            await asyncio.gather(*(self._remove(replica) for replica in staying[count:]))
        elif count > len(staying):
            free = (replica for replica in range(2 * MOST_REPLICAS) if replica not in used)
            new = [next(free) for _ in range(count - len(staying))]
            self._asked.update(new)
            self._board.members.send_to_supervisor(messages.StartReplicas(new))
            await self._until_up(dict.fromkeys(new, 1))

    async def remove(self, replica: ReplicaId) -> None:
        """Move the replica's requests elsewhere, then end it for good. Raises Refusal."""
        if self._slot(replica) is None:
            raise Refusal(f"there is no replica {replica}")
        if not any(other != replica and not self._is_drained(other) for other in self._staying()):
            raise Refusal(f"replica {replica} is the last one that serves: end the server instead")
        await self._remove(replica)

    async def _remove(self, replica: ReplicaId) -> None:
        self._removing.add(replica)
        try:
            await self.empty(replica, "remove", migrate=True)
            self._board.members.send_to_supervisor(messages.EndSlot(replica))
            await self._until(lambda: self._slot(replica) is None)
        finally:
            self._removing.discard(replica)

    def _follow(self, hint: ScaleHint) -> None:
        if self._options.autoscale != "on" or self._tasks:
            return
        low, high = self._options.bounds
        staying = self._staying()
        if hint.delta > 0 and len(staying) < high:
            self._tasks.spawn(self._by_itself(self._resize(len(staying) + 1)))
        elif hint.delta < 0 and len(staying) > low:
            if hint.replica is not None and hint.replica in staying:
                self._tasks.spawn(self._by_itself(self._remove(hint.replica)))
            else:
                self._tasks.spawn(self._by_itself(self._resize(len(staying) - 1)))

    async def _by_itself(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do work for which no operator waits: a refusal goes to the log."""
        try:
            await work
        except Refusal as error:
            log.warning("%s", error)

    async def restart(self) -> int:
        """Restart all replicas, one after another, and return their number. Raises Refusal where one does not
        start again: the others are then left as they are."""
        replicas = self._staying()
        for replica in replicas:
            await self._start_anew(replica)
        return len(replicas)

    async def _start_anew(self, replica: ReplicaId) -> None:
        epoch = await self.empty(replica, "restart", migrate=True)
        self._board.members.send_to_supervisor(messages.EndReplica(replica, epoch))
        await self._until_up({replica: epoch + 1})

    # ------------------------------------------------------------ moves

    async def move(self, request: str, replica: ReplicaId) -> int:
        """Move a request, or all requests of one answer, to the replica, and return the number that arrived.
        Raises Refusal."""
        router = self._board.router
        known = router.fleet.up.get(replica)
        if known is None or not known.is_open:
            raise Refusal(f"there is no replica {replica} that may get work")
        names = [name for name in router.requests if request in (name, name.rpartition("-")[0])]
        if not names:
            raise Refusal(f"there is no request {request!r}")
        left, there, asked = set(names), set[str](), set[str]()

        def have_moved() -> bool:
            """Ask for the moves of requests that can leave by now."""
            live = router.requests
            for name in [name for name in left - asked if name in live and live[name].can_leave]:
                asked.add(name)
                self._board.handle(MoveAsked(name, replica))
            there.update(
                name for name in left if name in known.requests and not known.requests[name].is_withdrawing
            )
            left.intersection_update(live)
            left.difference_update(there)
            return not left

        if not await self._until(have_moved, MOVE_S):
            raise Refusal(
                f"{len(left)} of {len(names)} requests have not moved: the replica may have no room"
            )
        if not there:
            raise Refusal(f"the request {request!r} ended before it could move")
        return len(there)
