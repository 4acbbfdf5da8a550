"""An executor on loan: handed to one driver after the other, with whatever is noted on the way.

Owns what is to be undone when a driver ends; the executor itself stays open.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from manylora.protocol.commands import (
    Ask,
    DeviceCommand,
    EndSequence,
    EvictAdapter,
    ForgetAdapter,
    ReadAdapter,
    RunStep,
    SetMerged,
    SwapPages,
    ask_of,
)
from manylora.protocol.events import AdapterRead, CopyDone, SwitchDone
from manylora.protocol.executor import AdapterChecked, DeviceEvent, Executor
from manylora.types import BASE, AdapterId, SequenceId

_LANDING_S = 60.0


class LentExecutor:
    """``protocol.Executor`` that hands on to ``executor``. ``close`` waits for transfers and forgets what the
    driver's run left behind, merged or not. ``begins``, ``has_begun`` and ``says`` are for those that note what
    passes."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._sequences: set[SequenceId] = set()
        self._adapters: set[AdapterId] = set()
        self._moving: set[Ask] = set()
        self._switch: SetMerged | None = None

    def connect(self, tell: Callable[[DeviceEvent], None]) -> None:
        """See Executor."""
        self._tell = tell
        self._executor.connect(self._hear)

    def obey(self, command: DeviceCommand) -> None:
        """See Executor."""
        match command:
            case RunStep():
                self._sequences.update(start.sequence for start in command.starts)
            case EndSequence():
                self._sequences.discard(command.sequence)
            case ForgetAdapter():
                self._adapters.discard(command.adapter)
            case SwapPages() | ReadAdapter() | SetMerged():
                self._moving.add(ask_of(command))
                if isinstance(command, SetMerged):
                    self._switch = command
        self.begins(command)
        self._executor.obey(command)
        self.has_begun(command)

    def flush(self) -> None:
        """See Executor."""
        self._executor.flush()

    def wait_step(self) -> None:
        """See Executor."""
        self._executor.wait_step()

    def close(self, *, frees: bool = True) -> None:
        """Idempotent. What the executor holds is its owner's."""
        self._wait_landed()
        if self._switch is not None and self._switch.adapter != BASE:
            self.obey(SetMerged(self._switch.switch + 1, BASE))
            self._wait_landed()
        for sequence in list(self._sequences):
            self.obey(EndSequence(sequence))
        for adapter in list(self._adapters):
            self.obey(EvictAdapter(adapter))
            self.obey(ForgetAdapter(adapter))

    def _wait_landed(self) -> None:
        self._executor.flush()
        ends_at = time.monotonic() + _LANDING_S
        while self._moving and time.monotonic() < ends_at:
            time.sleep(0.001)

    def _hear(self, event: DeviceEvent) -> None:
        self.says(event)
        match event:
            case AdapterChecked() if event.ok:
                self._adapters.add(event.adapter)
            case CopyDone() | AdapterRead() | SwitchDone():
                self._moving.discard(ask_of(event))
        self._tell(event)

    # ------------------------------------------------------------ what passes

    def begins(self, command: DeviceCommand) -> None:
        """A command is about to be handed on."""

    def has_begun(self, command: DeviceCommand) -> None:
        """A command was handed on."""

    def says(self, event: DeviceEvent) -> None:
        """The executor says something; from whichever thread knows it."""
