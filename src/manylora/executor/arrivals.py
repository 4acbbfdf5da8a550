"""Tracks copies and reads to the device that run beside the steps, and enters landed adapters into the
tables.

Owns each gate from its copy's command until no step can name that copy. Does not copy and does not read.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterable

from manylora.adapters.pack import AdapterLayout, cell_offsets
from manylora.executor.cold_rows import ColdAdapter, ColdRows
from manylora.executor.reading import Landed
from manylora.executor.tables import AdapterTables
from manylora.kernels.shapes import AdapterGeometry
from manylora.memory.copier import Copier, one_line
from manylora.memory.gates import Awaited, CopyGate
from manylora.protocol import commands, events
from manylora.protocol.executor import AdapterError
from manylora.types import AdapterId, CopyId, PageId

_log = logging.getLogger(__name__)


class Arrivals:
    """The copies on their way to the device, with their gates and adapters.

    Used by the step loop's thread, except ``landed`` and the functions that copies call at their end.
    ``landed``: adapters that have landed and are not in the tables yet.
    """

    def __init__(
        self,
        copier: Copier,
        tables: AdapterTables,
        geometry: AdapterGeometry,
        layout_of: Callable[[AdapterId], AdapterLayout],
    ) -> None:
        """Start with no copies. ``layout_of`` raises AdapterError for an unknown adapter."""
        self._copier = copier
        self._tables = tables
        self._geometry = geometry
        self._layout_of = layout_of
        self.landed: collections.deque[Landed] = collections.deque()
        self._ahead: dict[AdapterId, CopyId] = {}  # adapters entered before they land, with their copies
        self._gates: dict[CopyId, CopyGate] = {}
        self._commands: dict[CopyId, commands.SwapPages] = {}  # the command of each copy in ``_gates``
        self._answered: list[CopyId] = []  # copies that had been answered at the last step's end

    def enter(self) -> None:
        """Enter the adapters that have landed into the tables. An adapter is in ``landed`` before the
        ``done`` of its read or copy is called."""
        while self.landed:
            landed = self.landed.popleft()
            if self._ahead.get(landed.adapter) not in self._gates:  # else it may yet fail on another rank
                self._ahead.pop(landed.adapter, None)
            self._tables.put(landed.adapter, landed.layout, landed.offsets)

    def leave(self, adapter: AdapterId) -> None:
        """Drop the adapter's entry, whether the adapter has landed or was entered ahead."""
        self.enter()
        self._ahead.pop(adapter, None)
        self._tables.drop(adapter)

    def claim(self, command: commands.SwapPages | commands.ReadAdapter) -> None:
        """Drop entries of other adapters that were entered ahead in the device pages of ``command``. Call it
        before the command brings an adapter to these pages. The other adapter's copy has failed, perhaps on
        another rank, and the policy has given its pages away, so no later step names it."""
        others = [(adapter, copy) for adapter, copy in self._ahead.items() if adapter != command.adapter]
        if not others:
            return
        pages = _device_pages(command)
        for adapter, copy in others:
            if not pages.isdisjoint(_device_pages(self._commands[copy])):
                del self._ahead[adapter]
                self._tables.drop(adapter)

    # ------------------------------------------------------------ copies

    def swap(self, command: commands.SwapPages, report: Callable[[events.CopyDone], None]) -> None:
        """Carry out SwapPages; ``report`` is called once, with the answer. A command with layer groups gets a
        gate, and its adapter is entered into the tables before it lands."""
        self.claim(command)
        gate: CopyGate | None = None
        if command.groups:
            gate = self._gates[command.copy] = CopyGate()
            self._commands[command.copy] = command

        try:
            self._copier.start(command, self._landing(command, gate), report, gate)
        except (AdapterError, RuntimeError, ValueError) as error:
            # The adapter was removed, the copier is closed, or the command is wrong: no thread will answer.
            report(events.CopyDone(command.copy, False, error=one_line(error)))
            if gate is not None:
                gate.answer(False)
            return
        if gate is not None and command.adapter is not None:
            # Entered before it lands, so that steps that await the copy find it. But only once the copy is under
            # way: for a large adapter, entering takes longer than the step.
            try:
                landed = self._landed(command, command.adapter)
                self.enter()
                self._tables.put(landed.adapter, landed.layout, landed.offsets)
                self._ahead[landed.adapter] = command.copy
            except (AdapterError, RuntimeError, ValueError):
                _log.exception("adapter %d has no entry", command.adapter)
                gate.fail()

    def _landed(self, command: commands.SwapPages, adapter: AdapterId) -> Landed:
        """Return the adapter as the copy will place it on the device. Raises AdapterError where the adapter
        is not known, and ValueError where the number of pages is wrong."""
        layout, pages = self._layout_of(adapter), [destination for _, destination in command.pairs]
        return Landed(adapter, layout, cell_offsets(layout, self._geometry, pages))

    def _landing(self, command: commands.SwapPages, gate: CopyGate | None) -> Callable[[], None]:
        """Return the function that the copier's thread calls once the pages have landed. Raises AdapterError
        for an unknown adapter, and ValueError for a wrong command."""
        adapter = command.adapter
        if adapter is None or not command.to_device:
            return lambda: None
        self._layout_of(adapter)
        landed = None if gate is not None else self._landed(command, adapter)

        def note() -> None:
            self._layout_of(adapter)  # raises where the adapter has been removed
            if landed is not None:
                self.landed.append(landed)
            elif gate is not None and gate.has_failed:
                raise RuntimeError("the adapter has no entry")

        return note

    # ------------------------------------------------------------ steps

    def awaited(self, step: commands.RunStep) -> Awaited:
        """Return the gates that the step has to pass. Raises ValueError where the step names an unknown
        copy."""
        self._check_known(step)
        return Awaited([(self._gates[wanted.copy], wanted.sequences) for wanted in step.awaits])

    def cold(self, step: commands.RunStep) -> ColdRows:
        """Return the step's cold rows for the CPU, with the gates to pass where the CPU does not take them.
        Raises ValueError where the step names an unknown copy or one without an adapter. Raises AdapterError
        where an adapter was removed."""
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
        return ColdRows(found)

    def _check_known(self, step: commands.RunStep) -> None:
        copies = [wanted.copy for wanted in step.awaits] + [served.copy for served in step.cpu]
        unknown = [copy for copy in copies if copy not in self._gates]
        if unknown:
            raise ValueError(f"the step awaits copy {unknown[0]}, which is not on its way")

    def step_ended(self) -> None:
        """Forget copies that had been answered at the previous step's end. Call it before a step's end is
        reported.

        Such a copy's answer was reported before the previous end, and the policy has acted upon both, so no
        later step names the copy. A copy answered since then is kept, because a step issued before the policy
        acts upon its answer may still name it.
        """
        self.forget((copy, self._gates[copy].wait_answer()) for copy in self._answered)
        self._answered = [copy for copy, gate in self._gates.items() if gate.is_answered]

    def forget(self, answered: Iterable[tuple[CopyId, bool]]) -> None:
        """Forget copies that no step will name any more; each comes with whether it went well. Drop the
        adapters entered ahead whose copies failed. Until then steps may name a failed copy, and their rows
        are invalid."""
        for copy, ok in answered:
            del self._gates[copy]
            adapter = self._commands.pop(copy).adapter
            if adapter is not None and self._ahead.get(adapter) == copy:
                del self._ahead[adapter]
                if not ok:
                    self._tables.drop(adapter)


def _device_pages(command: commands.SwapPages | commands.ReadAdapter) -> set[PageId]:
    """Return the device pages to which the command brings an adapter; none where it brings none."""
    if isinstance(command, commands.ReadAdapter):
        return set(command.pages) if command.tier == "device" else set()
    return {page for _, page in command.pairs} if command.to_device and command.adapter is not None else set()
