"""A Replica on the dictionary device, with a clock and hands: tests say what lands when."""

from __future__ import annotations

from typing import Any

from manylora.config.merging import MergeConfig
from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.policy.replica import Replica
from manylora.protocol.commands import (
    Command,
    Emit,
    Finish,
    ReadAdapter,
    Reject,
    RunStep,
    SetTimer,
    SwapPages,
)
from manylora.protocol.events import AdapterAdded, AdapterRead, Arrive, CopyDone, Event, Timer
from manylora.types import Request, SamplingParams
from tests.policy.device_model import DeviceModel, undisturbed
from tests.policy.invariants import check

PAGE = 4


class Rig:
    """``commands`` collects everything that was commanded; ``tokens`` and ``ends`` what requests got."""

    def __init__(
        self,
        policy: str = "manylora",
        num_pages: int = 20,
        num_host_pages: int = 40,
        max_num_seqs: int = 4,
        trace: bool = False,
        copy_page_s: float = 1e-5,
        pipeline_depth: int = 1,
        merge: MergeConfig | None = None,
        admission: str = "fcfs",
        slo_ttft_s: float = 5.0,
        **marks: float,
    ) -> None:
        merge = merge or MergeConfig()
        cache = CacheConfig(policy, trace=trace, **{"adapter_share": 0.4, **marks})
        self.config = PolicyConfig(
            num_pages,
            PAGE,
            200,
            max_num_seqs,
            64,
            num_host_pages,
            2**21,
            cache,
            admission,
            slo_ttft_s,
            pipeline_depth,
            merge=merge,
        )
        self.replica = Replica(self.config)
        self.device = DeviceModel(PAGE, pipeline_depth, merge.times.steps_wait)
        self.copy_page_s = copy_page_s
        self.now = 0.0
        self.timer: float | None = None
        self.commands: list[Command] = []
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Any] = {}
        self.sources_gone: set[int] = set()
        self.requests: dict[str, Request] = {}

    def feed(self, event: Event) -> list[Command]:
        commands = self.replica.handle(event, self.now)
        if self.config.pipeline_depth == 1:
            check_order(commands)
        for command in commands:
            match command:
                case SetTimer():
                    self.timer = command.at
                case Emit():
                    self.tokens.setdefault(command.request, []).append(command.token)
                case Finish() | Reject():
                    self.ends[command.request] = command
            self.device.obey(command)
        self.commands += commands
        check(self.replica)
        return commands

    def add(self, adapter: int, num_pages: int = 3) -> None:
        self.feed(AdapterAdded(adapter, num_pages))

    def ask(
        self, name: str, adapter: int, prompt: list[int], max_tokens: int = 1, scope: str = ""
    ) -> list[Command]:
        params = SamplingParams(max_tokens=max_tokens, seed=0)
        request = Request(name, adapter, tuple(prompt), params, (), scope)
        self.requests[name] = request
        return self.feed(Arrive(request))

    def land_copy(self, copy: int | None = None, ok: bool = True) -> None:
        copy = min(self.device.copies) if copy is None else copy
        copy_s = self.copy_page_s * len(self.device.copies[copy][0].pairs)
        self.device.end_copy(copy, ok)
        self.feed(CopyDone(copy, ok, copy_s, "" if ok else "made to fail"))

    def land_read(self) -> None:
        read = self.device.reads[0]
        ok = read.adapter not in self.sources_gone
        self.device.land(read, ok)
        self.feed(AdapterRead(read.adapter, ok, "" if ok else "the folder is gone", 0.1))

    def end_step(self) -> None:
        self.feed(self.device.finish_step(ok=True))

    def end_switch(self) -> None:
        self.feed(self.device.end_switch())

    def ring(self) -> None:
        assert self.timer is not None
        self.now, self.timer = max(self.now, self.timer), None
        self.feed(Timer())

    def settle(self, rings: int = 0) -> None:
        """Let everything happen, in this order of preference; then so many intervals pass."""
        for _ in range(100_000):
            self.now += 0.001
            if self.device.reads:
                self.land_read()
            elif self.device.copies:
                self.land_copy()
            elif self.device.switches:
                self.end_switch()
            elif self.device.steps:
                self.end_step()
            elif rings and self.timer is not None:
                rings -= 1
                self.ring()
            else:
                return
        raise AssertionError("it never ends")

    def settle_copies(self) -> None:
        """Let all reads and copies end, but no step."""
        while self.device.reads or self.device.copies:
            self.now += 0.001
            if self.device.reads:
                self.land_read()
            else:
                self.land_copy()

    def serve(self, name: str, adapter: int, prompt: list[int], max_tokens: int = 1, scope: str = "") -> None:
        """One request from its arrival to its end, with the right tokens."""
        self.ask(name, adapter, prompt, max_tokens, scope)
        self.settle()
        self.check_answer(name)

    def check_answer(self, name: str) -> None:
        request = self.requests[name]
        assert self.ends[name].reason == "length", self.ends[name]
        expected = undisturbed(request.adapter, request.prompt, request.params, (), 0)
        assert self.tokens[name] == expected

    def check_answers(self) -> int:
        """Of all requests that came to their end; how many."""
        answered = [name for name, end in self.ends.items() if end.reason == "length"]
        for name in answered:
            self.check_answer(name)
        return len(answered)

    def of(self, kind: type[Any]) -> list[Any]:
        return [command for command in self.commands if isinstance(command, kind)]

    def swaps(self, to_device: bool) -> int:
        """Pages that were commanded to be copied this way."""
        return sum(len(c.pairs) for c in self.of(SwapPages) if c.to_device is to_device)

    def computed_tokens(self) -> int:
        return sum(row.num_tokens for step in self.of(RunStep) for row in step.rows)


def check_order(commands: list[Command]) -> None:
    """A driver that waits for its step must have started before it what is to run beside it."""
    kinds = [type(command) for command in commands]
    if RunStep in kinds:
        after = kinds[kinds.index(RunStep) + 1 :]
        assert not {SwapPages, ReadAdapter} & set(after), "copies are commanded before the step"


def prompt(seed: int, num_pages: int, extra: int = 1) -> list[int]:
    """Tokens of its own: so many full pages, and a few more."""
    return [1000 * seed + i for i in range(num_pages * PAGE + extra)]
