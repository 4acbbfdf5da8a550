"""Serving systems that a simulated replica can be: ours, and those that the papers compare with.

- ``ours``: as its settings say.
- ``peft``: one adapter a batch, with paging and iteration-level batching (dLoRA §7.1).
- ``vllm-uniform``: each adapter merged into a model of its own, shared out equally over the replicas; whole models
  are swapped in over the host's link where they do not all fit (dLoRA §7.1).
- ``static-batch``: a batch is as long as its longest request, and nothing joins it.

Decides what runs where ours would decide otherwise; the rest is the engine's own policy.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Literal

from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.config.queueing import QueueConfig
from manylora.policy.replica import Replica
from manylora.protocol.commands import Command, EndSequence, Finish, Released, RunStep
from manylora.protocol.events import Abort, Arrive, Event, Release
from manylora.router.fleet import Fleet
from manylora.router.policies.policy import RoutingPolicy
from manylora.router.replicas import ReplicaState
from manylora.router.requests import LiveRequest
from manylora.types import AdapterId, RequestId, SequenceId
from manylora_lab.pricing.costs import StepCosts
from manylora_lab.sim.cluster import Member
from manylora_lab.sim.device import Answer, SimulatedDevice
from manylora_lab.sim.loop import VirtualDevice

System = Literal["ours", "peft", "vllm-uniform", "static-batch"]
UNIFORM_ROUTER = "manylora_lab.sim.systems:UniformAllocation"
_MODELS_SHARE = 0.7
"""Of the device's memory: what whole models may take, so that the rest is left for KV."""


def member_of(
    system: System, config: PolicyConfig, costs: StepCosts, adapter_pages: Sequence[int], weight_bytes: int
) -> Member:
    """A replica that is such a system; ``config``'s pool is what one model of ``weight_bytes`` leaves."""
    one_adapter = dataclasses.replace(
        config, cache=CacheConfig("lru"), queue=QueueConfig(adapter_batch_limit="1:hard")
    )
    match system:
        case "ours":
            return Member(config, costs, adapter_pages)
        case "peft":
            return Member(one_adapter, costs, adapter_pages)
        case "static-batch":
            return Member(one_adapter, costs, adapter_pages, machine=StaticBatches)
        case "vllm-uniform":
            memory = config.num_pages * config.page_bytes + weight_bytes
            num_models = max(int(_MODELS_SHARE * memory / weight_bytes), 1)
            num_pages = (memory - num_models * weight_bytes) // config.page_bytes
            few_pages = dataclasses.replace(one_adapter, num_pages=num_pages)

            def device(member: Member) -> VirtualDevice:
                return WholeModels(member.costs, weight_bytes, num_models, len(adapter_pages))

            # The policy keeps one page for each: what it is in the tree.
            return Member(few_pages, costs, (1,) * len(adapter_pages), device=device)


class UniformAllocation(RoutingPolicy):
    """Each adapter has one replica, by its number, round and round."""

    name = "uniform"

    def choose(self, view: Fleet, request: LiveRequest) -> ReplicaState | None:
        """See RoutingPolicy."""
        if not view.open_ids:
            return None
        replica = view.up[view.open_ids[request.adapter % len(view.open_ids)]]
        return replica if view.fits_ever(replica, request) else None


class WholeModels(SimulatedDevice):
    """Steps of one model each, all of its weights merged; another model comes over the link first, in the place
    of that which ran longest ago."""

    def __init__(self, costs: StepCosts, model_bytes: int, most_models: int, num_adapters: int) -> None:
        super().__init__(costs, 0, dict.fromkeys(range(1, num_adapters + 1), 0))
        self._model_bytes = model_bytes
        self._most_models = most_models
        self._models = collections.OrderedDict[AdapterId, None]()
        self._adapter_of: dict[SequenceId, AdapterId] = {}
        self.num_swaps = 0

    def obey(self, command: Command, now: float) -> Answer | None:
        """See VirtualDevice."""
        if isinstance(command, RunStep):
            for start in command.starts:
                self._adapter_of[start.sequence] = start.adapter
            self._bring(self._adapter_of[command.rows[0].sequence], now)
        elif isinstance(command, EndSequence):
            self._adapter_of.pop(command.sequence, None)
        return super().obey(command, now)

    def _bring(self, adapter: AdapterId, now: float) -> None:
        if adapter not in self._models:
            if len(self._models) == self._most_models:
                self._models.popitem(last=False)
            self._models[adapter] = None
            self.num_swaps += 1
            self.wait(now, self._costs.copy_s(self._model_bytes))
        self._models.move_to_end(adapter)


class StaticBatches:
    """A replica whose requests run in batches that nothing joins; a machine like that within it."""

    def __init__(self, config: PolicyConfig) -> None:
        self._replica = Replica(config)
        self._most = config.max_num_seqs
        self._waiting: collections.deque[Arrive] = collections.deque()
        self._running: set[RequestId] = set()

    def handle(self, event: Event, now: float) -> list[Command]:
        """See Machine."""
        commands: list[Command] = []
        if isinstance(event, Arrive):
            self._waiting.append(event)
        elif isinstance(event, Abort | Release) and (found := self._take(event.request)) is not None:
            if isinstance(event, Abort):
                commands.append(Finish(event.request, 0, event.reason))
            else:
                commands.append(Released(event.request, event.attempt, tuple(map(len, found.resume))))
        else:
            commands += self._told(event, now)
        while not self._running and self._waiting:
            adapter = self._waiting[0].request.adapter
            batch = [each for each in self._waiting if each.request.adapter == adapter][: self._most]
            chosen = {each.request.id for each in batch}
            self._waiting = collections.deque(each for each in self._waiting if each.request.id not in chosen)
            self._running = chosen
            for place, each in enumerate(batch, 1):
                commands += self._told(dataclasses.replace(each, more=place < len(batch)), now)
        return commands

    def _take(self, request: RequestId) -> Arrive | None:
        """Out of those that wait."""
        found = next((each for each in self._waiting if each.request.id == request), None)
        if found is not None:
            self._waiting.remove(found)
        return found

    def _told(self, event: Event, now: float) -> list[Command]:
        commands = self._replica.handle(event, now)
        for command in commands:
            if isinstance(command, Finish):
                self._running.discard(command.request)
        return commands
