"""What comes to the device beside the steps: copies with their gates, and the entries of what lands.

Owns a gate from its copy's command on until no step can name it. Does not copy and does not read.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterable

from manylora.adapters.pack import AdapterLayout, cell_offsets
from manylora.executor.cold_rows import ColdAdapter, ColdStep
from manylora.executor.reading import Landed
from manylora.executor.tables import AdapterTables
from manylora.kernels.shapes import AdapterGeometry
from manylora.memory.copier import Copier, one_line
from manylora.memory.gates import Awaited, CopyGate
from manylora.protocol import commands, events
from manylora.protocol.executor import AdapterError
from manylora.types import AdapterId, CopyId, PageId

_log = logging.getLogger(__name__)


class Coming:
    """Used by the step loop's thread, but for ``landed`` and what copies call at their end.

    ``landed``: adapters that have landed and are not in the tables yet.
    """

    def __init__(
        self,
        copier: Copier,
        tables: AdapterTables,
        geometry: AdapterGeometry,
        layout_of: Callable[[AdapterId], AdapterLayout],
    ) -> None:
        """``layout_of`` raises AdapterError for an adapter that is not known."""
        self._copier = copier
        self._tables = tables
        self._geometry = geometry
        self._layout_of = layout_of
        self.landed: collections.deque[Landed] = collections.deque()
        self._ahead: dict[AdapterId, CopyId] = {}  # entered before they have landed, by which copy
        self._gates: dict[CopyId, CopyGate] = {}
        self._commands: dict[CopyId, commands.SwapPages] = {}  # of the gates
        self._answered: list[CopyId] = []  # at the last step's end

    def enter(self) -> None:
        """Enter what has landed into the tables. It is among it before its ``done`` is heard of."""
        while self.landed:
            landed = self.landed.popleft()
            if self._ahead.get(landed.adapter) not in self._gates:  # else it may fail on another rank
                self._ahead.pop(landed.adapter, None)
            self._tables.put(landed.adapter, landed.layout, landed.offsets)

    def leave(self, adapter: AdapterId) -> None:
        """Drop the adapter's entry, landed or ahead."""
        self.enter()
        self._ahead.pop(adapter, None)
        self._tables.drop(adapter)

    def claim(self, command: commands.SwapPages | commands.ReadAdapter) -> None:
        """Before an adapter is brought to device pages: drop what was entered ahead there for another. Its copy
        has failed, maybe on another rank, and the policy has given the pages away, so no later step names it."""
        others = [(adapter, copy) for adapter, copy in self._ahead.items() if adapter != command.adapter]
        if not others:
            return
        pages = _device_pages(command)
        for adapter, copy in others:
            if not pages.isdisjoint(_device_pages(self._commands[copy])):
                del self._ahead[adapter]
                self._tables.drop(adapter)

    # ------------------------------------------------------------ copies

    def swap(self, command: commands.SwapPages, tell: Callable[[events.CopyDone], None]) -> None:
        """Carries out SwapPages; ``tell`` gets the one answer."""
        self.claim(command)
        gate: CopyGate | None = None
        if command.groups:
            gate = self._gates[command.copy] = CopyGate()
            self._commands[command.copy] = command

        try:
            self._copier.start(command, self._landing(command, gate), tell, gate)
        except (AdapterError, RuntimeError, ValueError) as error:
            # Removed meanwhile, closed, or a wrong command: no thread will answer.
            tell(events.CopyDone(command.copy, False, error=one_line(error)))
            if gate is not None:
                gate.answer(False)
            return
        if gate is not None and command.adapter is not None:
            # Now that the copy is on its way: for a large adapter it takes longer than the step.
            try:
                self._enter_ahead(self._landed(command, command.adapter), command.copy)
            except (AdapterError, RuntimeError, ValueError):
                _log.exception("adapter %d has no entry", command.adapter)
                gate.fail()

    def _enter_ahead(self, landed: Landed, copy: CopyId) -> None:
        """Steps that await the copy look for it."""
        self.enter()
        self._tables.put(landed.adapter, landed.layout, landed.offsets)
        self._ahead[landed.adapter] = copy

    def _landed(self, command: commands.SwapPages, adapter: AdapterId) -> Landed:
        """What the copy brings to the device. Raises AdapterError, ValueError."""
        pages = [destination for _, destination in command.pairs]
        return Landed.at(adapter, self._layout_of(adapter), self._geometry, pages)

    def _landing(self, command: commands.SwapPages, gate: CopyGate | None) -> Callable[[], None]:
        """What to do on the copier's thread once the pages have landed. Raises AdapterError, and ValueError for a
        wrong command."""
        adapter = command.adapter
        if adapter is None or not command.to_device:
            return lambda: None
        self._layout_of(adapter)
        landed = None if gate is not None else self._landed(command, adapter)

        def note() -> None:
            self._layout_of(adapter)  # it is known still
            if landed is not None:
                self.landed.append(landed)
            elif gate is not None and gate.has_failed:
                raise RuntimeError("the adapter has no entry")

        return note

    # ------------------------------------------------------------ steps

    def awaited(self, step: commands.RunStep) -> Awaited:
        """What the step has to pass. Raises ValueError where it names a copy that is not known."""
        self._check_known(step)
        return Awaited([(self._gates[wanted.copy], wanted.sequences) for wanted in step.awaits])

    def cold(self, step: commands.RunStep) -> ColdStep:
        """What the CPU is to compute for the step, and what it has to pass beside. Raises ValueError likewise, and
        AdapterError where an adapter was removed."""
        self._check_known(step)
        found: dict[AdapterId, ColdAdapter] = {}
        for wanted in step.cpu:
            command = self._commands[wanted.copy]
            if command.adapter is None:
                raise ValueError(f"copy {wanted.copy} brings no adapter")
            layout = self._layout_of(command.adapter)
            offsets = cell_offsets(layout, self._geometry, [source for source, _ in command.pairs])
            gate = self._gates[wanted.copy]
            found[command.adapter] = ColdAdapter(layout, offsets, gate, wanted.sequences)
        return ColdStep(found)

    def _check_known(self, step: commands.RunStep) -> None:
        copies = [wanted.copy for wanted in step.awaits] + [served.copy for served in step.cpu]
        unknown = [copy for copy in copies if copy not in self._gates]
        if unknown:
            raise ValueError(f"the step awaits copy {unknown[0]}, which is not on its way")

    def step_ended(self) -> None:
        """Before a step's end is told. A copy that was answered by the end before is forgotten: its answer
        was told before that end, which has been acted upon, so no step names it any more. Between both one may:
        what came before the answer is acted upon first."""
        self.forget((copy, self._gates[copy].wait_answer()) for copy in self._answered)
        self._answered = [copy for copy, gate in self._gates.items() if gate.is_answered]

    def forget(self, answered: Iterable[tuple[CopyId, bool]]) -> None:
        """No step names these copies any more, each with whether it went well; what was entered ahead of one that
        did not is dropped. Until then steps may name it, whose rows are spoilt."""
        for copy, ok in answered:
            del self._gates[copy]
            adapter = self._commands.pop(copy).adapter
            if adapter is not None and self._ahead.get(adapter) == copy:
                del self._ahead[adapter]
                if not ok:
                    self._tables.drop(adapter)


def _device_pages(command: commands.SwapPages | commands.ReadAdapter) -> set[PageId]:
    """Those that an adapter is brought to."""
    if isinstance(command, commands.ReadAdapter):
        return set(command.pages) if command.tier == "device" else set()
    return {page for _, page in command.pairs} if command.to_device and command.adapter is not None else set()
