"""One replica of a simulated cluster: the engine's own policy on a simulated device, in the cluster's time.

Owns what is on its way to this replica, and when it reports. Does not know the other replicas.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from manylora.protocol.commands import ClientCommand, Command, Emit, Finish, Machine, Released, Status
from manylora.protocol.events import (
    AdapterAdded,
    Arrive,
    Event,
    PinAdapter,
    Release,
    StatusDue,
    StepDone,
    Timer,
)
from manylora.protocol.routing import ReplicaId, ReplicaReport
from manylora.types import BASE, AdapterId, Request, RequestId
from manylora_lab.sim.front_end import FrontEnd, OpenRequest
from manylora_lab.sim.loop import VirtualDevice, VirtualLoop

Recorder = Callable[[float, object, list[Command]], None]
"""Told of every event with its moment and what it led to."""


class ReplicaLoop(VirtualLoop):
    """``due_s`` says when its next event is due, ``advance`` hands that over.

    ``progress``, ``ended``, ``released`` and ``reported``, a report that was made now, are what the cluster has to
    pass on, until it takes them.
    """

    def __init__(
        self,
        place: ReplicaId,
        machine: Machine,
        device: VirtualDevice,
        adapter_pages: Sequence[int],
        front: FrontEnd,
        report_delay_s: float | None,
        record: Recorder | None = None,
    ) -> None:
        """``report_delay_s``: how long a report is on its way, and no other is made meanwhile; None: never one."""
        super().__init__(machine, device)
        self.place = place
        self.machine = machine
        self.busy_s = 0.0
        self.progress: list[tuple[RequestId, int]] = []
        self.ended: list[Finish] = []
        self.released: list[Released] = []
        self.reported: ReplicaReport | None = None
        self.last_report_s = -math.inf
        self.held: dict[RequestId, OpenRequest] = {}
        self._adapter_pages = adapter_pages
        self._front = front
        self._report_delay_s = report_delay_s
        self._report_is_due = False
        self._on_way: dict[RequestId, tuple[int, OpenRequest]] = {}  # with the assignment's number
        self._seen_upto = 0
        self._known: set[AdapterId] = set()
        self._record = record

    # ------------------------------------------------------------ what comes from outside

    def add_adapters(self) -> None:
        """Requests may name any adapter from now on."""
        for adapter, num_pages in enumerate(self._adapter_pages, 1):
            self._known.add(adapter)
            self._tell(AdapterAdded(adapter, num_pages))

    def put(self, due: float, request: Request) -> None:
        """Hand the request over then; nothing is told of its tokens."""
        self._learn(due, request.adapter)
        self._put(due, Arrive(request))

    def send(self, due: float, sent: OpenRequest, number: int) -> None:
        """The request, as far as it is, reaches the replica then, before whatever else is due at that moment."""
        self._learn(due, sent.request.adapter)
        self._on_way[sent.request.id] = number, sent
        resume = (sent.generated,) if sent.num_tokens else ()
        waited_s = due - sent.arrived_s
        self._put_first(due, Arrive(sent.request, False, resume, (), waited_s, sent.attempt))

    def withdraw(self, due: float, request: RequestId, attempt: int) -> None:
        """The replica is told then to let the request go."""
        self._put(due, Release(request, attempt))

    def keep(self, due: float, adapter: AdapterId, is_pinned: bool) -> None:
        """The replica is told then to have a copy of the adapter on its device, or that it need not."""
        self._learn(due, adapter)
        self._put(due, PinAdapter(adapter, is_pinned))

    def _learn(self, due: float, adapter: AdapterId) -> None:
        if adapter != BASE and adapter not in self._known:
            self._known.add(adapter)
            self._put_first(due, AdapterAdded(adapter, self._adapter_pages[adapter - 1]))

    def _put_first(self, due: float, event: Event) -> None:
        self._num_due += 1
        heapq.heappush(self._due, (due, -1, self._num_due, event))

    def stop_reports(self) -> None:
        """No report is made any more."""
        self._report_delay_s = None

    def ask_report(self, now: float) -> None:
        """A report is due now, if none is."""
        if not self._report_is_due and self._report_delay_s is not None:
            self._report_is_due = True
            self._put(now, StatusDue(self.last_report_s < 0))

    # ------------------------------------------------------------ time

    @property
    def due_s(self) -> float:
        """When the next event is due; infinite where there is none."""
        while self._due:
            due, _, _, event = self._due[0]
            if type(event) is not Timer or (event is self._timer and due >= self._waits_until()):
                return due
            heapq.heappop(self._due)
            self._may_fire(event, due)  # it may not: later, or never
        return math.inf

    def drain(self) -> None:
        """Hand over all that is still due."""
        self.stop_reports()
        while self.advance():
            pass

    def _tell(self, event: Event) -> list[Command]:
        kind = type(event)
        if kind is Arrive:
            on_way = self._on_way.pop(event.request.id, None)  # type: ignore[union-attr]
            if on_way is not None:
                self._seen_upto, request = on_way
                self.held[request.request.id] = request
        elif kind is StepDone:
            self.busy_s += event.device_s  # type: ignore[union-attr]
        commands = super()._tell(event)
        if self._record is not None:
            self._record(self.now, event, commands)
        if kind is StatusDue:
            if self._report_is_due:
                self._make_report(commands)
        elif self._report_delay_s is not None and not self._report_is_due:
            self.ask_report(max(self.now, self.last_report_s + self._report_delay_s))
        return commands

    def _make_report(self, commands: list[Command]) -> None:
        (status,) = commands
        assert isinstance(status, Status)
        self._report_is_due = False
        if self._report_delay_s is not None:
            self.last_report_s = self.now
            self.reported = ReplicaReport(self.place, 1, self._seen_upto, status)

    # ------------------------------------------------------------ news

    def _note_token(self, command: Emit) -> None:
        count = self._front.hear_token(self.place, command, self.now)
        if count is not None:
            self.progress.append((command.request, count))

    def _note(self, command: ClientCommand) -> None:
        if type(command) is Finish:
            self.held.pop(command.request, None)
            self.ended.append(command)
        elif type(command) is Released:
            self.held.pop(command.request, None)
            self.released.append(command)
        else:
            self._front.hear(self.place, command, self.now)
