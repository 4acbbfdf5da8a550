"""An executor without a driver: each command is a call that returns its answer."""

from __future__ import annotations

import queue

from manylora.protocol.commands import (
    Ask,
    EndSequence,
    EvictAdapter,
    ForgetAdapter,
    InspectAdapter,
    ReadAdapter,
    ReportState,
    RunStep,
    SetMerged,
    SwapPages,
    VerifyAdapter,
    ask_of,
)
from manylora.protocol.events import AdapterRead, CopyDone, SwitchDone
from manylora.protocol.executor import (
    AdapterChecked,
    AdapterError,
    DeviceEvent,
    Executor,
    ExecutorLost,
    ExecutorState,
    StepResult,
)
from manylora.types import AdapterId, SequenceId

_ANSWER_S = 600.0
"""How long an answer may take."""


class DirectExecutor:
    """Gives commands to an executor, which it connects to itself, and waits for their answers. For one thread."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._results: dict[int, StepResult] = {}
        self._landed: dict[Ask, queue.SimpleQueue[DeviceEvent]] = {}
        self._checked: queue.SimpleQueue[AdapterChecked] = queue.SimpleQueue()
        self._states: queue.SimpleQueue[ExecutorState] = queue.SimpleQueue()
        executor.connect(self._hear)

    def _hear(self, answer: DeviceEvent) -> None:
        match answer:
            case StepResult():
                self._results[answer.done.step] = answer
            case AdapterChecked():
                self._checked.put(answer)
            case ExecutorState():
                self._states.put(answer)
            case CopyDone() | AdapterRead() | SwitchDone():
                if ask_of(answer) in self._landed:  # else it was asked for by another
                    self._landed[ask_of(answer)].put(answer)
            case ExecutorLost():
                for waiting in list(self._landed.values()):
                    waiting.put(answer)

    # ------------------------------------------------------------ steps

    def run_step(self, step: RunStep) -> StepResult:
        """Issue a step and wait for it, and for those issued before."""
        self._executor.obey(step)
        return self.wait_step(step)

    def issue_step(self, step: RunStep) -> None:
        """Issue a step; ``wait_step`` follows."""
        self._executor.obey(step)

    def has_ended(self, step: RunStep) -> bool:
        """Whether the step's result is known: at once where it could not be issued."""
        return step.step in self._results

    def wait_step(self, step: RunStep) -> StepResult:
        """The result of a step that was issued; those issued before it end first, and theirs is kept.

        Raises what the end of a step raises, and RuntimeError where the step is not on its way, such as one whose
        end has raised.
        """
        while step.step not in self._results:
            num_results = len(self._results)
            self._executor.wait_step()
            if len(self._results) == num_results:
                raise RuntimeError(f"step {step.step} is not on its way")
        return self._results.pop(step.step)

    def end_sequence(self, sequence: SequenceId) -> None:
        """Forget a sequence."""
        self._executor.obey(EndSequence(sequence))

    def state(self) -> ExecutorState:
        """How the executor stands."""
        self._executor.obey(ReportState())
        return self._states.get(timeout=_ANSWER_S)

    # ------------------------------------------------------------ adapters and copies

    def add_adapter(self, adapter: AdapterId, path: str) -> AdapterChecked:
        """Inspect an adapter by its headers. Raises AdapterError."""
        return self._check(InspectAdapter(adapter, path))

    def verify_adapter(self, adapter: AdapterId) -> AdapterChecked:
        """Read all weights of an adapter that was added. Raises AdapterError."""
        return self._check(VerifyAdapter(adapter))

    def _check(self, command: InspectAdapter | VerifyAdapter) -> AdapterChecked:
        self._executor.obey(command)
        found = self._checked.get(timeout=_ANSWER_S)
        if not found.ok:
            raise AdapterError(found.error, found.status)
        return found

    def forget_adapter(self, adapter: AdapterId) -> None:
        """Forget an adapter that is not resident."""
        self._executor.obey(ForgetAdapter(adapter))

    def evict_adapter(self, adapter: AdapterId) -> None:
        """Forget where the adapter lies."""
        self._executor.obey(EvictAdapter(adapter))

    def read_adapter(self, command: ReadAdapter) -> AdapterRead:
        """Read an adapter into its pages."""
        self.begin(command)
        answer = self.wait_for(command)
        assert isinstance(answer, AdapterRead)
        return answer

    def swap_pages(self, command: SwapPages) -> CopyDone:
        """Copy pages between the tiers."""
        self.begin(command)
        answer = self.wait_for(command)
        assert isinstance(answer, CopyDone)
        return answer

    def set_merged(self, command: SetMerged) -> SwitchDone:
        """Merge an adapter into the base's weights."""
        self.begin(command)
        answer = self.wait_for(command)
        assert isinstance(answer, SwitchDone)
        return answer

    def begin(self, command: ReadAdapter | SwapPages | SetMerged) -> None:
        """Begin a transfer or a switch; ``wait_for`` follows."""
        self._landed[ask_of(command)] = queue.SimpleQueue()
        self._executor.obey(command)
        self._executor.flush()

    def has_landed(self, command: ReadAdapter | SwapPages | SetMerged) -> bool:
        """Whether what was begun has been answered."""
        return not self._landed[ask_of(command)].empty()

    def wait_for(self, command: ReadAdapter | SwapPages | SetMerged) -> DeviceEvent:
        """The answer to what was begun. Raises RuntimeError where the executor is lost."""
        answer = self._landed[ask_of(command)].get(timeout=_ANSWER_S)
        del self._landed[ask_of(command)]
        if isinstance(answer, ExecutorLost):
            raise RuntimeError(answer.reason)
        return answer
