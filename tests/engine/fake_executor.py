"""An Executor without tensors: its "model" is the hash of tests.policy.device_model."""

from __future__ import annotations

import collections
import concurrent.futures
import struct
import threading
import time
from collections.abc import Callable, Iterable

from manylora.protocol.commands import (
    DEVICE_COMMANDS,
    CopyPages,
    DeviceCommand,
    EndSequence,
    EvictAdapter,
    ForgetAdapter,
    InspectAdapter,
    ReadAdapter,
    ReportState,
    RunStep,
    SequenceStart,
    SetMerged,
    SwapPages,
    VerifyAdapter,
    handlers,
)
from manylora.protocol.events import AdapterRead, CopyDone, StepDone, SwitchDone
from manylora.protocol.executor import AdapterChecked, DeviceEvent, ExecutorState, StepResult
from manylora.types import AdapterId, PromptLogprobs, SequenceId, TokenLogprobs
from tests.policy.device_model import next_token


def prompt_logprobs(tokens: Iterable[int]) -> PromptLogprobs:
    """Each token with its own number, negative, as log-probability, a rank one higher, and no alternatives."""
    return PromptLogprobs(0, b"".join(struct.pack("=fi", -token, token + 1) for token in tokens))


class FakeExecutor:
    def __init__(self) -> None:
        self._handlers = handlers(self, DEVICE_COMMANDS)
        self._ended: collections.deque[StepResult] = collections.deque()
        self.sequences: dict[SequenceId, tuple[SequenceStart, list[int]]] = {}
        self.known: dict[AdapterId, str] = {}
        self.resident: set[AdapterId] = set()
        self.failing_steps = 0
        self.failing_reads = 0
        self.failing_swaps = 0
        self.swaps: list[SwapPages] = []
        self.switches: list[AdapterId] = []
        self.failing_switches = 0
        self.swap_gate = threading.Event()  # closed, no copy lands
        self.swap_gate.set()
        self.step_gate = threading.Event()  # closed, a step does not end
        self.step_gate.set()
        self.is_held = threading.Event()  # a step has come to the closed gate
        self._copier = concurrent.futures.ThreadPoolExecutor(1)  # so copies land in the order given
        self._put_off: list[Callable[[], None]] = []
        self.step_s = 0.0
        self.reads = 0
        self.closed = 0
        self.freed = 0
        self.verified: list[str] = []
        self.verify_gate = threading.Event()  # closed, weights are read for ever
        self.verify_gate.set()
        self.failing_verifications = 0
        self.host_pages_pinned = 0
        self.preparation_s = 0.0

    def connect(self, tell: Callable[[DeviceEvent], None]) -> None:
        self.tell = tell

    def obey(self, command: DeviceCommand) -> None:
        self._handlers[type(command)](command)

    def run_step(self, command: RunStep) -> None:
        self._ended.append(self.computed(command))
        self.flush()

    def flush(self) -> None:
        put_off, self._put_off = self._put_off, []
        for swap in put_off:
            self._copier.submit(swap)

    def wait_step(self) -> None:
        if self._ended:
            self.tell(self._ended.popleft())

    def computed(self, step: RunStep) -> StepResult:
        if not self.step_gate.is_set():
            self.is_held.set()
            self.step_gate.wait()
        time.sleep(self.step_s)
        for start in step.starts:
            self.sequences[start.sequence] = (start, list(start.tokens))
        if self.failing_steps:
            self.failing_steps -= 1
            return StepResult(StepDone(step.step, False, error="made to fail"), {})
        drawn = []
        logprobs = {}
        prompts = {}
        for row in step.rows:
            start, tokens = self.sequences[row.sequence]
            scored = range(
                max(row.start, start.num_scored), min(row.start + row.num_tokens, start.num_prompt_tokens - 1)
            )
            if start.params.prompt_logprobs is not None and scored:
                prompts[row.sequence] = prompt_logprobs(tokens[position + 1] for position in scored)
            if not row.num_samples:
                continue
            new = tuple(
                next_token(start.adapter, tuple(tokens), start.sample + i) for i in range(row.num_samples)
            )
            for i, token in enumerate(new):
                logprobs[row.sequence, i] = TokenLogprobs(token, -float(token))
            tokens.append(new[0])
            drawn.append((row.sequence, new))
        return StepResult(StepDone(step.step, True, tuple(drawn)), logprobs, prompts)

    def end_sequence(self, command: EndSequence) -> None:
        self.sequences.pop(command.sequence, None)

    def copy_pages(self, command: CopyPages) -> None:
        pass

    def swap_pages(self, command: SwapPages) -> None:
        self.swaps.append(command)
        fails = self.failing_swaps > 0
        self.failing_swaps -= fails

        def swap() -> None:
            self.swap_gate.wait()
            if fails:
                self.tell(CopyDone(command.copy, False, error="made to fail"))
                return
            if command.to_device and command.adapter is not None:
                self.resident.add(command.adapter)
            self.tell(CopyDone(command.copy, True, 0.001))

        # As an executor may: those from the device begin with the next step, or when the caller rests.
        self._put_off.append(swap)
        if command.to_device:
            self.flush()

    def read_adapter(self, command: ReadAdapter) -> None:
        def read() -> None:
            self.reads += 1
            time.sleep(0.01)
            if self.failing_reads:
                self.failing_reads -= 1
                self.tell(AdapterRead(command.adapter, False, "made to fail"))
            else:
                if command.tier == "device":
                    self.resident.add(command.adapter)
                self.tell(AdapterRead(command.adapter, True))

        threading.Thread(target=read).start()

    def set_merged(self, command: SetMerged) -> None:
        self.switches.append(command.adapter)
        fails = self.failing_switches > 0
        self.failing_switches -= fails
        self.tell(SwitchDone(command.switch, not fails, 0.001, "made to fail" if fails else ""))

    def evict_adapter(self, command: EvictAdapter) -> None:
        self.resident.remove(command.adapter)

    def inspect_adapter(self, command: InspectAdapter) -> None:
        adapter, path = command.adapter, command.path
        if path == "bad":
            self.tell(AdapterChecked(adapter, False, error="no good"))
            return
        self.known[adapter] = path
        self.tell(AdapterChecked(adapter, True, int(path), 8))

    def verify_adapter(self, command: VerifyAdapter) -> None:
        path = self.known[command.adapter]
        self.verified.append(path)
        self.verify_gate.wait()
        if self.failing_verifications:
            self.failing_verifications -= 1
            self.tell(AdapterChecked(command.adapter, False, error="made to fail"))
        else:
            self.tell(AdapterChecked(command.adapter, True, int(path), 8))

    def forget_adapter(self, command: ForgetAdapter) -> None:
        del self.known[command.adapter]

    def report_state(self, command: ReportState) -> None:
        self.tell(ExecutorState(self.host_pages_pinned, self.preparation_s))

    def wait_for_copies(self) -> None:
        """Until each has been answered; there can be no more then."""
        self._copier.shutdown()

    def close(self, *, frees: bool = True) -> None:
        self.closed += 1
        self.freed += frees
