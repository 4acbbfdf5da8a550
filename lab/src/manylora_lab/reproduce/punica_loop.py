"""Punica's closed loop (§7.2) in virtual time: the engine's policy behind a gate, on a described device."""

from __future__ import annotations

from collections.abc import Sequence

from manylora.config.declaring import ConfigError
from manylora.config.policy import PolicyConfig
from manylora.policy.replica import Replica
from manylora.protocol.commands import ClientCommand, Command, Emit, Finish, Reject, RunStep
from manylora.protocol.events import AdapterAdded, Arrive
from manylora.types import BASE, Request, SamplingParams
from manylora_lab.bench.closed_loop import LoopGate, LoopRequest, LoopResult
from manylora_lab.pricing.costs import StepCosts
from manylora_lab.sim.device import SimulatedDevice
from manylora_lab.sim.loop import VirtualLoop

_WARM_TOKENS = 8


class SimulatedLoop(VirtualLoop):
    """One run. Every adapter is asked for once before it starts, so that all are in the host's memory at least.

    As ``bench.closed_loop`` does, it asks the gate after every step what to hand over.
    """

    def __init__(
        self,
        requests: Sequence[LoopRequest],
        gate: LoopGate,
        config: PolicyConfig,
        costs: StepCosts,
        adapter_pages: int,
    ) -> None:
        """``adapter_pages``: what each adapter takes."""
        named = sorted({r.adapter for r in requests if r.adapter is not None})
        pages = {adapter + 1: adapter_pages for adapter in named}  # the base model is 0 for the policy
        super().__init__(Replica(config), SimulatedDevice(costs, config.page_bytes, pages))
        self._requests = requests
        self._gate = gate
        self._num_tokens = 0  # handed out so far, so that no two prompts begin alike
        self._num_steps = 0
        self._num_warming = len(pages)
        self._has_emitted = False
        for adapter in pages:
            self._tell(AdapterAdded(adapter, adapter_pages))
            self._put(0.0, Arrive(self._request(f"warm {adapter}", adapter, _WARM_TOKENS, 1)))

    def run(self) -> LoopResult:
        """Run to the end. Raises RuntimeError where a request is forgotten, ConfigError where one does not fit."""
        while self._num_warming and self.advance():
            pass
        began_s, steps = self.now, self._num_steps
        self._hand_over()
        while not self._gate.is_done:
            self._has_emitted = False
            if not self.advance():
                raise RuntimeError("nothing comes any more, and requests wait")
            if self._has_emitted:
                self._hand_over()
        return LoopResult(
            self.now - began_s,
            sum(request.prompt_tokens for request in self._requests),
            sum(request.output_tokens for request in self._requests),
            self._num_steps - steps,
        )

    def _hand_over(self) -> None:
        joining = self._gate.join()
        for place, number in enumerate(joining, 1):
            asked = self._requests[number]
            adapter = BASE if asked.adapter is None else asked.adapter + 1
            request = self._request(str(number), adapter, asked.prompt_tokens, asked.output_tokens)
            self._put(self.now, Arrive(request, more=place < len(joining)))

    def _request(self, name: str, adapter: int, prompt_tokens: int, output_tokens: int) -> Request:
        first = self._num_tokens
        # The simulated device's replies count on from the prompt.
        self._num_tokens += prompt_tokens + output_tokens
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, seed=0, ignore_eos=True)
        return Request(name, adapter, tuple(range(first, first + prompt_tokens)), params)

    def _obey(self, command: Command) -> None:
        self._num_steps += type(command) is RunStep
        super()._obey(command)

    def _note(self, command: ClientCommand) -> None:
        match command:
            case Reject():
                raise ConfigError(f"the workload does not fit: {command.error.message}")
            case Finish() if command.request.startswith("warm"):
                self._num_warming -= 1
            case Finish():
                self._gate.leave(int(command.request))

    def _note_token(self, command: Emit) -> None:
        self._has_emitted = True
