"""An executor that notes which requests each step is of, around the one that runs the steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

from manylora.cluster.last_step import StepNote
from manylora.protocol import DeviceCommand, DeviceEvent, EndSequence, Executor, RunStep, StepResult
from manylora.types import RequestId, SequenceId


class StepNotingExecutor:
    """See Executor. Owns which request each sequence is of, and which steps are in flight."""

    def __init__(self, executor: Executor, note: StepNote) -> None:
        self._executor = executor
        self._note = note
        self._requests: dict[SequenceId, RequestId] = {}
        self._in_flight: dict[int, frozenset[RequestId]] = {}
        self._noting = threading.Lock()  # a step may end on another thread than it begins on

    def connect(self, tell: Callable[[DeviceEvent], None]) -> None:
        """See Executor."""

        def hear(event: DeviceEvent) -> None:
            if isinstance(event, StepResult):
                with self._noting:
                    self._in_flight.pop(event.done.step, None)
                    self._write()
            tell(event)

        self._executor.connect(hear)

    def obey(self, command: DeviceCommand) -> None:
        """See Executor."""
        match command:
            case RunStep():
                for start in command.starts:
                    self._requests[start.sequence] = start.request
                found = frozenset(self._requests[row.sequence] for row in command.rows)
                with self._noting:
                    self._in_flight[command.step] = found
                    self._write()
            case EndSequence():
                self._requests.pop(command.sequence, None)
        self._executor.obey(command)

    def _write(self) -> None:
        if self._in_flight:
            self._note.begin(frozenset().union(*self._in_flight.values()))
        else:
            self._note.end()

    def flush(self) -> None:
        """See Executor."""
        self._executor.flush()

    def wait_step(self) -> None:
        """See Executor."""
        self._executor.wait_step()

    def close(self, *, frees: bool = True) -> None:
        """See Executor."""
        self._executor.close(frees=frees)
