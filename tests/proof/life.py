"""A replica's life on the dictionary device: requests, adapters and failures drawn from a seed.

Owns what happens and when; does not know what the policy should answer. The same seed, scene and policy give the
same events as long as the policy decides alike, since the device answers what it is told.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

from manylora.config.merging import MergeConfig, MergeTimes, StepTimes
from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.policy.cache_policies import adapter_pages_limit
from manylora.policy.replica import Replica
from manylora.protocol.commands import AdapterFreed, Command, Emit, Finish, Reject, Released, SetTimer
from manylora.protocol.events import (
    Abort,
    AdapterAdded,
    AdapterRead,
    AdapterRemoved,
    Arrive,
    CopyDone,
    Event,
    PinAdapter,
    Release,
    Timer,
)
from manylora.types import BASE, Request, SamplingParams
from tests.policy.device_model import VOCABULARY, DeviceModel
from tests.policy.invariants import check

_CHECK_EVERY = 40
"""Events between two checks of all invariants, which take as long as many events."""
_MOST_OPEN = 40
_UNMERGED = MergeConfig()


@dataclasses.dataclass(frozen=True)
class Scene:
    """What a life is like. ``pause_s``: the shortest and the longest time between two events; one in a hundred is
    two hundred times as long. ``failures``: of a hundred steps, copies and reads, how many fail. ``slow_copies``:
    of a hundred copies, how many are so slow that computing KV again is cheaper."""

    num_pages: int
    num_host_pages: int
    page_tokens: int
    max_num_seqs: int
    max_batch_tokens: int
    num_adapters: int
    most_adapter_pages: int
    most_prompt: int
    most_tokens: int
    pause_s: tuple[float, float]
    failures: int = 2
    slow_copies: int = 2
    admission: str = "fcfs"
    slo_ttft_s: float | None = None
    traces: bool = False
    max_waiting: int | None = None
    cache: tuple[tuple[str, float], ...] = ()
    merge: MergeConfig = _UNMERGED
    moves: float = 0.0
    """Of all events, how many have a request leave, or come back with its tokens."""
    keeps: float = 0.0
    """Of all events, how many have a copy of an adapter kept, or not any more."""
    stem: int = 0
    """Tokens that all prompts of one adapter begin with: with pages of one token, a chain so deep."""
    scores: float = 0.0
    """Of all requests, how many ask for their prompts' log-probabilities, half of them for nothing else."""


SCENES: dict[str, Scene] = {
    # As the state machine of tests/policy draws them: hardly room for one request.
    "tiny": Scene(
        9,
        12,
        2,
        3,
        9,
        3,
        3,
        12,
        9,
        (0.01, 0.3),
        failures=8,
        slow_copies=10,
        traces=True,
        cache=(("low_mark", 0.4),),
    ),
    # Conversations over many adapters that come and go, in a pool that holds a third of them.
    "crowd": Scene(120, 150, 4, 8, 64, 24, 6, 60, 24, (0.0005, 0.02)),
    # Hardly a host: what leaves is gone, adapters are read again and again.
    "bare": Scene(60, 14, 4, 6, 40, 8, 5, 40, 40, (0.001, 0.05), failures=4, traces=True),
    # More requests than can run, samples that fork, aborts, and an objective that some miss.
    "crush": Scene(
        48,
        90,
        4,
        12,
        32,
        5,
        4,
        24,
        20,
        (0.0005, 0.01),
        admission="early-abort",
        slo_ttft_s=1.5,
        max_waiting=20,
    ),
}


DEEP = Scene(
    12_000, 13_000, 1, 4, 6_000, 2, 300, 5_100, 40, (0.001, 0.05), failures=4, traces=True, moves=0.05, keeps=0.02,
    stem=5_000,
)  # fmt: skip
"""Chains of 5,000 pages, of which either tier holds two: whatever walks them must not do so by recursion."""

_STEPS = (StepTimes(1, 1, 0.004, 0.002), StepTimes(8, 8, 0.006, 0.003))


def _merging(mode: str, steps_wait: bool = False, **merge: Any) -> Scene:
    """Few adapters, of which one often has most requests."""
    times = MergeTimes(steps_wait, 0.004, 0.004, _STEPS)
    return Scene(
        60, 60, 4, 6, 40, 3, 4, 20, 24, (0.0005, 0.01), failures=1, traces=True, max_waiting=30,
        merge=MergeConfig(mode, times=times, **merge),
    )  # fmt: skip


MERGING_SCENES: dict[str, Scene] = {
    "merged": _merging("merged", starve_s=0.5),
    "dlora": _merging("dlora", alpha=0.7, starve_s=0.5),
    "regret": _merging("manylora", steps_wait=True),
}
"""With one cache policy, since merging does not ask for it."""

MOVING_SCENES: dict[str, Scene] = {
    # Requests leave and come back, as if other replicas had them in between.
    "moved": dataclasses.replace(SCENES["crush"], num_pages=60, failures=2, moves=0.05),
    # A router places copies of adapters beside that.
    "kept": dataclasses.replace(SCENES["crowd"], failures=2, moves=0.02, keeps=0.02),
}
"""Likewise."""

SCORING_SCENES: dict[str, Scene] = {
    "scored": dataclasses.replace(SCENES["tiny"], num_pages=20, most_prompt=20, moves=0.03, scores=0.5)
}
"""Likewise, and shorter."""


class Life:
    """Feeds one replica. ``told`` is given every event with its moment, and what the replica answered."""

    def __init__(self, policy: str, pipeline_depth: int, scene: Scene, seed: int) -> None:
        self._scene = scene
        self._rng = random.Random(seed)
        cache = CacheConfig(policy, adapter_share=0.5, trace=scene.traces, **dict(scene.cache))
        self.config = PolicyConfig(
            scene.num_pages, scene.page_tokens, scene.most_prompt + scene.most_tokens, scene.max_num_seqs,
            scene.max_batch_tokens, scene.num_host_pages, 2**20, cache, scene.admission, scene.slo_ttft_s,
            pipeline_depth, scene.max_waiting, merge=scene.merge,
        )  # fmt: skip
        self._replica = Replica(self.config)
        waits = scene.merge.times.steps_wait
        self._device = DeviceModel(scene.page_tokens, pipeline_depth, waits)
        self._most_pages = min(scene.most_adapter_pages, adapter_pages_limit(self.config))
        self._now = 0.0
        self._timer: float | None = None
        self._adapters: list[int] = []
        self._open: dict[str, tuple[Request, set[int]]] = {}
        self._histories: list[tuple[int, list[int]]] = []
        self._answers: dict[str, list[int]] = {}
        self._drawn: dict[str, list[list[int]]] = {}  # of open requests, where some move
        self._attempts: dict[str, int] = {}
        self._away: list[str] = []
        self._request_ids, self._adapter_ids = itertools.count(), itertools.count(1)
        self.told: list[tuple[float, Event, list[Command]]] = []

    def live(self, num_events: int) -> None:
        """At least so many events, and then whatever it takes until all requests have ended."""
        while len(self._adapters) < self._scene.num_adapters:
            self._add_adapter()
        while len(self.told) < num_events:
            self._something()
        device = self._device
        while self._open or device.steps or device.copies or device.reads or device.switches:
            if self._away:
                self._come_back(self._away[0])
            elif not self._answer_something():
                self._ring()

    # ------------------------------------------------------------ one event

    def _feed(self, event: Event) -> None:
        low_s, high_s = self._scene.pause_s
        pause_s = self._rng.uniform(low_s, high_s) * (200 if self._rng.random() < 0.01 else 1)
        self._now = round(self._now + pause_s, 5)
        commands = self._replica.handle(event, self._now)
        self.told.append((self._now, event, commands))
        for command in commands:
            self._note(command)
            self._device.obey(command)
        if len(self.told) % _CHECK_EVERY == 0:
            check(self._replica)

    def _note(self, command: Command) -> None:
        match command:
            case Emit():
                if self._scene.moves:
                    self._drawn[command.request][command.sample].append(command.token)
                if command.sample == 0:
                    self._answers[command.request].append(command.token)
            case Finish():
                self._ended(command.request, command.sample)
            case Reject():
                del self._open[command.request], self._answers[command.request]
            case SetTimer():
                self._timer = command.at
            case Released():
                if command.positions and command.request in self._open:
                    self._away.append(command.request)
            case AdapterFreed():
                pass

    def _ended(self, name: str, sample: int) -> None:
        request, samples = self._open[name]
        samples.remove(sample)
        if not samples:
            del self._open[name]
            said = [*request.prompt, *self._answers.pop(name)]
            if len(said) < self._scene.most_prompt - 4:
                self._histories.append((request.adapter, said))
                del self._histories[:-30]

    # ------------------------------------------------------------ what may happen

    def _something(self) -> None:
        if self._scene.moves and self._rng.random() < self._scene.moves:
            self._move()
            return
        if self._scene.keeps and self._adapters and self._rng.random() < self._scene.keeps:
            self._feed(PinAdapter(self._rng.choice(self._adapters), self._rng.random() < 0.7))
            return
        draw = self._rng.random()
        if draw < 0.12 and len(self._open) < _MOST_OPEN:
            self._arrive()
        elif draw < 0.13 and self._open:
            self._abort()
        elif draw < 0.132:
            self._feed(Abort("nobody's"))  # an id that the policy does not know
        elif draw < 0.135:
            self._come_or_go()
        elif self._timer is not None and self._timer <= self._now:
            self._ring()
        elif not self._answer_something():
            self._arrive()

    def _arrive(self) -> None:
        rng, scene = self._rng, self._scene
        together = rng.choice((1, 1, 1, 1, 2, 4))
        for num_more in reversed(range(together)):
            if self._histories and rng.random() < 0.5:
                adapter, prompt = rng.choice(self._histories)
                prompt = prompt + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))]
            else:
                # Popular ones first; an adapter that has been removed may be asked for all the same.
                adapter = BASE if rng.random() < 0.1 else self._popular()
                longest = (scene.most_prompt - scene.stem) // 2
                size = rng.randint(1, longest)
                prompt = [*self._stem(adapter), *(rng.randrange(VOCABULARY) for _ in range(size))]
            params = SamplingParams(
                n=rng.choice((1, 1, 1, 1, 1, 1, 2, 3)), max_tokens=rng.randint(1, scene.most_tokens), seed=0
            )
            if scene.scores and rng.random() < scene.scores:
                most = rng.choice((0, params.max_tokens))
                params = dataclasses.replace(params, prompt_logprobs=rng.choice((0, 3)), max_tokens=most)
            stop_ids = (VOCABULARY - 1,) if rng.random() < 0.3 else ()
            name = f"r{next(self._request_ids)}"
            scope = rng.choice(("", "", "", "tenant"))
            request = Request(name, adapter, tuple(prompt), params, stop_ids, scope)
            self._open[name] = request, set(range(params.n))
            self._answers[name] = []
            if scene.moves:
                self._drawn[name] = [[] for _ in range(params.n)]
            self._feed(Arrive(request, more=num_more > 0))

    def _stem(self, adapter: int) -> list[int]:
        return random.Random(adapter).choices(range(VOCABULARY), k=self._scene.stem)

    def _move(self) -> None:
        """A request leaves, or one that has left comes back."""
        here = sorted(self._open.keys() - set(self._away))
        if self._away and (not here or self._rng.random() < 0.5):
            self._come_back(self._away[0])
        elif here:
            name = self._rng.choice(here)
            self._feed(Release(name, self._attempts.get(name, 0)))

    def _come_back(self, name: str) -> None:
        self._away.remove(name)
        request, samples = self._open[name]
        attempt = self._attempts[name] = self._attempts.get(name, 0) + 1
        drawn = tuple(tuple(tokens) for tokens in self._drawn[name])
        closed = tuple(sample for sample in range(request.params.n) if sample not in samples)
        self._feed(Arrive(request, False, drawn if any(drawn) else (), closed, 0.25, attempt))

    def _popular(self) -> int:
        if not self._adapters:
            return BASE
        return self._adapters[min(int(self._rng.paretovariate(1.0)) - 1, len(self._adapters) - 1)]

    def _abort(self) -> None:
        here = [name for name in self._open if name not in self._away]
        if not here:
            return
        request, samples = self._open[self._rng.choice(here)]
        sample = None if self._rng.random() < 0.6 else self._rng.choice(sorted(samples))
        self._feed(Abort(request.id, sample))

    def _add_adapter(self) -> None:
        adapter = next(self._adapter_ids)
        self._adapters.insert(self._rng.randint(0, len(self._adapters)), adapter)
        self._feed(AdapterAdded(adapter, self._rng.randint(1, self._most_pages)))

    def _come_or_go(self) -> None:
        if len(self._adapters) < self._scene.num_adapters:
            self._add_adapter()
        else:
            self._feed(AdapterRemoved(self._adapters.pop(self._rng.randrange(len(self._adapters)))))

    def _ring(self) -> None:
        assert self._timer is not None, "live requests keep a timer or the device going"
        self._now, self._timer = max(self._now, self._timer), None
        self._feed(Timer())

    def _answer_something(self) -> bool:
        """A read, a copy or the oldest step ends, in no order; False where the device has nothing to do."""
        rng, device = self._rng, self._device
        kinds = [kind for kind in ("reads", "copies", "steps", "steps", "switches") if getattr(device, kind)]
        if not kinds:
            return False
        kind, ok = rng.choice(kinds), rng.randrange(100) >= self._scene.failures
        error = "" if ok else "made to fail"
        if kind == "switches":
            self._feed(device.end_switch(0.004))
            device.fails_switch = not ok
        elif kind == "reads":
            read = rng.choice(device.reads)
            device.land(read, ok)
            self._feed(AdapterRead(read.adapter, ok, error, 0.01, is_at_fault=not ok and rng.random() < 0.5))
        elif kind == "copies":
            copy = rng.choice(sorted(device.copies))
            page_s = 0.5 if rng.randrange(100) < self._scene.slow_copies else rng.choice((1e-5, 2e-5))
            seconds = page_s * len(device.copies[copy][0].pairs)
            device.end_copy(copy, ok)
            self._feed(CopyDone(copy, ok, round(seconds, 6), error))
        else:
            num_tokens = sum(row.num_tokens for row in device.steps[0].command.rows)
            done = device.finish_step(ok)
            done.device_s = round(0.002 + 0.001 * num_tokens, 6)
            if done.tokens and rng.random() < 0.01:
                done.unsound = (rng.choice(done.tokens)[0],)
            self._feed(done)
        return True
