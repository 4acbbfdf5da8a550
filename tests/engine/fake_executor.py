"""An Executor without tensors: its "model" is the hash of tests.policy.device_model."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable

from manylora.protocol import (
    AdapterError,
    AdapterRead,
    CopyDone,
    IssuedStep,
    ReadAdapter,
    RunStep,
    SequenceStart,
    StepDone,
    StepResult,
    SwapPages,
)
from manylora.types import AdapterId, PageId, SequenceId, TokenLogprobs
from tests.policy.device_model import next_token


class FakeExecutor:
    def __init__(self) -> None:
        self.sequences: dict[SequenceId, tuple[SequenceStart, list[int]]] = {}
        self.known: dict[AdapterId, str] = {}
        self.resident: set[AdapterId] = set()
        self.failing_steps = 0
        self.failing_reads = 0
        self.failing_swaps = 0
        self.swaps: list[SwapPages] = []
        self.swap_gate = threading.Event()  # closed, no copy lands
        self.swap_gate.set()
        self.step_gate = threading.Event()  # closed, a step does not end
        self.step_gate.set()
        self.is_held = threading.Event()  # a step has come to the closed gate
        self._copier = concurrent.futures.ThreadPoolExecutor(1)  # so copies land in the order given
        self.step_s = 0.0
        self.reads = 0
        self.closed = 0
        self.verified: list[str] = []
        self.verify_gate = threading.Event()  # closed, weights are read for ever
        self.verify_gate.set()
        self.failing_verifications = 0
        self.host_pages_pinned = 0
        self.preparation_s = 0.0

    def issue_step(self, step: RunStep) -> IssuedStep:
        result = self.run_step(step)
        return IssuedStep(lambda: result)

    def run_step(self, step: RunStep) -> StepResult:
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
        for row in step.rows:
            start, tokens = self.sequences[row.sequence]
            if not row.num_samples:
                continue
            new = tuple(
                next_token(start.adapter, tuple(tokens), start.sample + i) for i in range(row.num_samples)
            )
            for i, token in enumerate(new):
                logprobs[row.sequence, i] = TokenLogprobs(token, -float(token))
            tokens.append(new[0])
            drawn.append((row.sequence, new))
        return StepResult(StepDone(step.step, True, tuple(drawn)), logprobs)

    def end_sequence(self, sequence: SequenceId) -> None:
        self.sequences.pop(sequence, None)

    def copy_pages(self, pairs: tuple[tuple[PageId, PageId], ...]) -> None:
        pass

    def swap_pages(self, command: SwapPages, done: Callable[[CopyDone], None]) -> None:
        self.swaps.append(command)
        fails = self.failing_swaps > 0
        self.failing_swaps -= fails

        def swap() -> None:
            self.swap_gate.wait()
            if fails:
                done(CopyDone(command.copy, False, error="made to fail"))
                return
            if command.to_device and command.adapter is not None:
                self.resident.add(command.adapter)
            done(CopyDone(command.copy, True, 0.001))

        self._copier.submit(swap)

    def read_adapter(self, command: ReadAdapter, done: Callable[[AdapterRead], None]) -> None:
        def read() -> None:
            self.reads += 1
            time.sleep(0.01)
            if self.failing_reads:
                self.failing_reads -= 1
                done(AdapterRead(command.adapter, False, "made to fail"))
            else:
                if command.tier == "device":
                    self.resident.add(command.adapter)
                done(AdapterRead(command.adapter, True))

        threading.Thread(target=read).start()

    def evict_adapter(self, adapter: AdapterId) -> None:
        self.resident.remove(adapter)

    def add_adapter(self, adapter: AdapterId, path: str) -> tuple[int, int]:
        if path == "bad":
            raise AdapterError("no good")
        self.known[adapter] = path
        return int(path), 8

    def verify_adapter(self, adapter: AdapterId) -> None:
        self.verified.append(self.known[adapter])
        self.verify_gate.wait()
        if self.failing_verifications:
            self.failing_verifications -= 1
            raise AdapterError("made to fail")

    def remove_adapter(self, adapter: AdapterId) -> None:
        del self.known[adapter]

    def wait_for_copies(self) -> None:
        """Until each has been answered; there can be no more then."""
        self._copier.shutdown()

    def close(self) -> None:
        self.closed += 1
