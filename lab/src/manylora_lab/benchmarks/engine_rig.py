"""A whole engine for a run: a model's shape with dummy weights, adapters, and a worker (or several ranks) that is
lent to one engine after the other.

Owns how a run is set up. What is served, and what is computed of it, is each run's own; ``run_report`` has how it
is written down.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from manylora.config.declaring import parse_size
from manylora.config.merging import MergeConfig
from manylora.engine.driver import Driver
from manylora.engine.journal import JournalWriter
from manylora.executor.build import build_worker
from manylora.executor.ranks.start import build_ranks
from manylora.executor.worker import Worker
from manylora.flags import build_settings
from manylora.models.config import read_model_config
from manylora.protocol.commands import DeviceCommand, ReadAdapter, RunStep, SwapPages
from manylora.protocol.events import AdapterRead, CopyDone
from manylora.protocol.executor import DeviceEvent, Executor, StepResult
from manylora.types import CopyId
from manylora.warmup import write_random_adapters
from manylora_lab.bench.dummies import DEMO, write_model
from manylora_lab.bench.lending import LentExecutor
from manylora_lab.bench.profile import projections_of
from manylora_lab.bench.targets import EngineTarget, TargetRequest
from manylora_lab.benchmarks.run_report import Row
from manylora_lab.pricing.shapes import SHAPES, ModelShape

POSITIONS = 4096
ON_GPU: Mapping[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "max_model_len": POSITIONS,
    "max_num_seqs": 128, "max_batch_tokens": 8192, "device_pool": "76GiB", "host_pool": "24GiB",
    "cold_start": "wait",
}  # fmt: skip
ON_CPU: Mapping[str, Any] = {
    "device": "cpu", "dtype": "float32", "load_format": "dummy", "max_model_len": 256,
    "max_num_seqs": 32, "max_batch_tokens": 256, "device_pool": "32MiB", "host_pool": "16MiB",
}  # fmt: skip
"""The settings of a toy, which is the demo's shape."""
UNMERGED = MergeConfig()
_MOST_PINNING_S = 120.0


# ---------------------------------------------------------------- the engine


class EngineRig:
    """A worker that stays open, and its files. A context."""

    def __init__(
        self,
        shape: ModelShape,
        settings: Mapping[str, Any],
        model: Path | None = None,
        merging: MergeConfig = UNMERGED,
    ) -> None:
        """``model``: a folder, instead of dummy weights of the shape."""
        self._scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self._scratch.name)
        self.shape = shape
        model = model or write_model(self.folder / shape.name, shape, POSITIONS)
        self.settings = {**settings, "model": str(model)}
        self.config = read_model_config(model)
        began_s = time.monotonic()
        given = build_settings(self.settings)[0]
        given = dataclasses.replace(given, scheduler=dataclasses.replace(given.scheduler, merge=merging))
        build = build_ranks if given.tensor_parallel_size > 1 else build_worker
        self.executor: Executor
        self.executor, self.policy, self.info = build(given, registry_path=self.folder / "registry.sqlite")
        self.build_s = round(time.monotonic() - began_s, 2)
        self.noted = NotingExecutor(self.executor)
        """The last engine's."""
        self._num_prompts = 0

    @classmethod
    def of(
        cls,
        name: str,
        is_toy: bool,
        sizes: Mapping[str, Any] | None = None,
        merging: MergeConfig = UNMERGED,
        **settings: Any,
    ) -> EngineRig:
        """The named shape on the GPU. ``sizes``: settings that a toy has of its own."""
        if is_toy:
            return cls(DEMO, {**ON_CPU, **settings}, merging=merging)
        return cls(SHAPES[name], {**ON_GPU, **(sizes or {}), **settings}, merging=merging)

    def __enter__(self) -> EngineRig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._scratch.cleanup()

    def close(self) -> None:
        """Give the device's memory back; the files stay until the context ends."""
        self.executor.close()
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    @property
    def worker(self) -> Worker:
        """The executor, where it is one process: this one."""
        assert isinstance(self.executor, Worker)
        return self.executor

    @property
    def device(self) -> str:
        return str(self.settings["device"])

    @property
    def is_toy(self) -> bool:
        return self.device == "cpu"

    def adapters(self, name: str, ranks: Sequence[int], count: int, modules: str = "all") -> dict[str, str]:
        """adapter-0, ... of these ranks in turn, with their folders; those of one ``name`` are written once."""
        folder = self.folder / f"{name}-{count}"
        if not folder.exists():
            projections = projections_of(self.config, modules)
            write_random_adapters(folder, self.config, self.settings["dtype"], ranks, count, projections)
        return {f"adapter-{number}": str(folder / f"adapter-{number}") for number in range(count)}

    def open(
        self,
        adapters: Mapping[str, str],
        executor: LentExecutor | None = None,
        journal: Path | None = None,
        **limits: Any,
    ) -> EngineTarget:
        """A new engine on the executor. ``limits``: of its policy. ``executor``: in place of ``noted``."""
        policy = dataclasses.replace(self.policy, **limits)
        info = dataclasses.replace(
            self.info, num_pages=policy.num_pages, max_num_seqs=policy.max_num_seqs,
            max_model_len=policy.max_model_len,
        )  # fmt: skip
        if executor is None:
            executor = self.noted = NotingExecutor(self.executor)
        record = None if journal is None else JournalWriter(journal, policy)
        driver = Driver(policy, executor, info, journal=record)
        for name, path in adapters.items():
            driver.add_adapter(name, path, verify=False)
        return EngineTarget(driver)

    def limits(self, device_pool: str | int, max_num_seqs: int) -> Row:
        """An engine's own, with a smaller pool than the worker's."""
        pages = min(parse_size(str(device_pool)) // self.policy.page_bytes, self.policy.num_pages)
        longest = min(self.policy.max_model_len, pages * self.policy.page_tokens)
        return {"num_pages": pages, "max_num_seqs": max_num_seqs, "max_model_len": longest}

    def call(self, length: int, max_tokens: int, adapter: str | None) -> TargetRequest:
        """A prompt of random tokens, other ones each time: nothing is found in a cache."""
        self._num_prompts += 1
        prompt = random.Random(self._num_prompts).choices(range(3, self.info.vocab_size), k=length)
        return TargetRequest(tuple(prompt), max_tokens, adapter)

    def wait_pinned(self) -> float:
        """Wait until the host's pool is pinned, and say how long: meanwhile copies take several times as long.
        A machine may refuse to pin all of it."""
        host, began_s = self.worker._host, time.monotonic()
        while host.pages_pinned < host.num_pages and time.monotonic() - began_s < _MOST_PINNING_S:
            time.sleep(0.05)
        return time.monotonic() - began_s


STEP_TOKENS = (64, 128, 192, 256, 320, 384, 512, 1024, 2048, 10**9)


class NotingExecutor(LentExecutor):
    """The executor for one engine, with the moments of what passes."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self._issued: dict[int, tuple[int, int, float]] = {}  # rows, tokens, when; then the host's seconds
        self.steps: list[tuple[int, int, float, float]] = []
        """Rows, tokens, seconds, and of them the host's."""
        self.moments: list[tuple[str, float]] = []
        """What was asked of the executor and answered by it, and when; of copies, those to the device."""
        self._brought: set[CopyId] = set()

    def begins(self, command: DeviceCommand) -> None:
        """See LentExecutor."""
        match command:
            case RunStep():
                num_tokens = sum(row.num_tokens for row in command.rows)
                self._issued[command.step] = len(command.rows), num_tokens, self._note("issue")
            case ReadAdapter():
                self._note("read")
            case SwapPages(to_device=True):
                self._brought.add(command.copy)
                self._note("swap")

    def has_begun(self, command: DeviceCommand) -> None:
        """See LentExecutor."""
        if isinstance(command, RunStep) and command.step in self._issued:
            num_rows, num_tokens, began_s = self._issued[command.step]
            self._issued[command.step] = num_rows, num_tokens, self._note("issued") - began_s

    def says(self, event: DeviceEvent) -> None:
        """See LentExecutor."""
        match event:
            case StepResult():
                num_rows, num_tokens, issue_s = self._issued.pop(event.done.step)
                if event.done.ok:
                    self._note("computed")
                    self.steps.append((num_rows, num_tokens, event.done.device_s, issue_s))
            case AdapterRead():
                self._note("was read")
            case CopyDone(copy=copy) if copy in self._brought:
                self._brought.discard(copy)
                self._note("swapped")

    def _note(self, what: str) -> float:
        """The moment. Copies and reads note theirs from other threads."""
        now_s = time.monotonic()
        self.moments.append((what, now_s))
        return now_s

    def by_tokens(self) -> Row:
        """Of decoding steps, and of others by tokens up to: how many, mean rows, mean tokens, mean seconds, mean
        seconds of the host's; and the longest steps."""
        found: dict[str, list[tuple[int, int, float, float]]] = {}
        for step in self.steps:
            size = next(size for size in STEP_TOKENS if step[1] <= size)
            found.setdefault("decode" if step[0] == step[1] else f"<={size}", []).append(step)
        means: Row = {
            name: [len(steps), *(round(statistics.fmean(column), 4) for column in zip(*steps))]
            for name, steps in found.items()
        }
        longest = sorted(self.steps, key=lambda step: -step[2])[:4]
        return means | {"longest": [[*step[:2], *(round(s, 4) for s in step[2:])] for step in longest]}
