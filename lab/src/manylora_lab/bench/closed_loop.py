"""A closed loop against an engine in this process: so many requests at once, first come first served.

Owns which requests join the batch next (``BatchGate``, ``StaticGate``); the simulator's loop uses them too. The
policy is the engine's own; a gate only holds requests back before it, as the front of a system would that batches
in this way.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from manylora.config.declaring import ConfigError
from manylora.engine.client import Delta, GenerationRequest
from manylora.engine.driver import Driver
from manylora.flags import build_settings
from manylora.types import SamplingParams
from manylora_lab.pricing.shapes import ModelShape

_FIRST_TOKEN = 3
"""Ids below it are special tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoopRequest:
    """Lengths in tokens. ``adapter``: its number, None for the base."""

    adapter: int | None
    prompt_tokens: int
    output_tokens: int


class LoopGate(Protocol):
    """What holds requests back, which are called by their numbers."""

    @property
    def is_done(self) -> bool:
        """All have joined and ended."""
        ...

    def join(self) -> Sequence[int]:
        """Those that run from now on; none where none may."""
        ...

    def leave(self, request: int) -> None:
        """The request has ended."""
        ...


class BatchGate:
    """First come first served, one at a time, at most ``at_once`` running. ``models``: of each request; unless
    ``is_mixed``, only requests of one model run together, and the first in line of another waits until all of them
    have ended."""

    def __init__(self, models: Sequence[int], at_once: int, is_mixed: bool) -> None:
        self._models = models
        self._at_once = at_once
        self._is_mixed = is_mixed
        self._num_joined = 0
        self._running: set[int] = set()

    @property
    def is_done(self) -> bool:
        """See LoopGate."""
        return self._num_joined == len(self._models) and not self._running

    def join(self) -> Sequence[int]:
        """See LoopGate."""
        first = self._num_joined
        if first == len(self._models) or len(self._running) >= self._at_once:
            return ()
        # All that run are of one model, unless they may be mixed.
        other = next(iter(self._running), first)
        if not self._is_mixed and self._models[other] != self._models[first]:
            return ()
        self._num_joined += 1
        self._running.add(first)
        return (first,)

    def leave(self, request: int) -> None:
        """See LoopGate."""
        self._running.remove(request)


class StaticGate:
    """Whole batches, which nothing joins: the next one once all of a batch have ended."""

    def __init__(self, batches: Iterable[Sequence[int]]) -> None:
        self._batches = collections.deque(batches)
        self._running: set[int] = set()

    @property
    def is_done(self) -> bool:
        """See LoopGate."""
        return not self._batches and not self._running

    def join(self) -> Sequence[int]:
        """See LoopGate."""
        if self._running or not self._batches:
            return ()
        batch = self._batches.popleft()
        self._running.update(batch)
        return batch

    def leave(self, request: int) -> None:
        """See LoopGate."""
        self._running.remove(request)


@dataclasses.dataclass(frozen=True, slots=True)
class LoopResult:
    """Seconds from the first request handed over to the last one's end."""

    duration_s: float
    prompt_tokens: int
    output_tokens: int
    num_steps: int


class ClosedLoop:
    """Asks a gate after every step what to hand over."""

    def __init__(self, driver: Driver) -> None:
        """Takes over ``driver``, not yet started."""
        self._driver = driver
        self._num_runs = 0
        self._asked: Sequence[GenerationRequest] = ()
        self._gate: LoopGate = BatchGate((), 0, True)
        self._ended = threading.Event()
        self._error: str | None = None
        driver.start(self._deliver, self._died)

    @property
    def machine(self) -> str:
        """The device's name."""
        return self._driver.info.device

    def warm_up(self, requests: Sequence[LoopRequest]) -> None:
        """Run these, mixed, for what only a first run costs: kernels to compile, adapters to read."""
        self.run(requests, BatchGate([0] * len(requests), self._driver.info.max_num_seqs, True))

    def run(self, requests: Sequence[LoopRequest], gate: LoopGate) -> LoopResult:
        """All requests to their ends; prompts are random and never those of an earlier run. Raises ConfigError."""
        self._num_runs += 1
        self._asked = [self._request(number, request) for number, request in enumerate(requests)]
        self._gate = gate
        self._ended.clear()
        steps = self._driver.stats().result().steps
        began_s = time.monotonic()
        self._hand_over()
        self._ended.wait()
        duration_s = time.monotonic() - began_s
        if self._error is not None:
            raise ConfigError(f"the engine failed: {self._error}")
        return LoopResult(
            duration_s,
            sum(request.prompt_tokens for request in requests),
            sum(request.output_tokens for request in requests),
            self._driver.stats().result().steps - steps,
        )

    def serve(self, name: str, path: str) -> None:
        """An adapter, by what requests call it: "adapter-7"."""
        self._driver.add_adapter(name, path, verify=False)

    def close(self) -> None:
        """Free the engine."""
        self._driver.close()

    def _request(self, number: int, request: LoopRequest) -> GenerationRequest:
        dice = random.Random(f"{self._num_runs} {number}")
        ids = range(_FIRST_TOKEN, self._driver.info.vocab_size)
        prompt = tuple(dice.choices(ids, k=request.prompt_tokens))
        params = SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True, seed=0)
        adapter = None if request.adapter is None else f"adapter-{request.adapter}"
        return GenerationRequest(f"{self._num_runs}-{number}", prompt, params, adapter)

    def _deliver(self, deltas: list[Delta]) -> None:
        """Runs on the driver's thread, once a step; what it hands over joins the step after the next to start."""
        for delta in deltas:
            if delta.error is not None:
                self._died(delta.error.message)
            elif delta.finish_reason is not None:
                self._gate.leave(int(delta.request.partition("-")[2]))
        if self._gate.is_done:
            self._ended.set()
        else:
            self._hand_over()

    def _hand_over(self) -> None:
        for number in self._gate.join():
            self._driver.submit(self._asked[number])

    def _died(self, reason: str) -> None:
        self._error = reason
        self._ended.set()


@contextmanager
def dummy_loop(
    shape: ModelShape,
    device: str,
    rank: int,
    num_adapters: int,
    at_once: int,
    max_tokens: int,
) -> Iterator[ClosedLoop]:
    """A loop on an engine with dummy weights and adapters of ``rank`` on all linear modules.

    ``max_tokens``: the longest request, reply included. Raises ConfigError.
    """
    # They bring torch, which a simulated loop does without.
    from manylora.executor.build import build_worker
    from manylora.models.config import read_model_config
    from manylora.warmup import write_random_adapters
    from manylora_lab.bench.dummies import dtype_name, write_model

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = write_model(folder / shape.name, shape, max_tokens)
        settings, _ = build_settings(
            {
                "model": str(model), "device": device, "dtype": dtype_name(shape), "load_format": "dummy",
                "max_model_len": max_tokens, "max_num_seqs": at_once, "cold_start": "wait",
                # Room for a whole prompt beside the decoding rows, so that none is cut.
                "max_batch_tokens": max_tokens + at_once,
                **({"device_pool": "128MiB", "host_pool": "256MiB"} if device == "cpu" else {}),
            }
        )  # fmt: skip
        worker, policy, info = build_worker(settings, registry_path=folder / "registry.sqlite")
        loop = ClosedLoop(Driver(policy, worker, info))
        try:
            adapters = folder / "adapters"
            for path in write_random_adapters(
                adapters, read_model_config(model), dtype_name(shape), [rank], num_adapters
            ):
                loop.serve(path.name, str(path))
            yield loop
        finally:
            loop.close()
