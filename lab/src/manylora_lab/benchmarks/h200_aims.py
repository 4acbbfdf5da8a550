"""The workloads that vLLM 0.26 was measured with on one H200, on manylora: Llama-2-7B shape, dummy weights.

One engine's worker serves them all, in process, bfloat16, token ids in and out, greedy, ``ignore_eos``, with the
tail. Parts: ``offline`` (1,000 requests at once, by number of sequences and popularity), ``prefill`` (8 prompts of
2,000), ``first`` (the first token of a prompt of 64: adapter in the pool, in host memory, not read), ``chat``
(the shipped traces, one pool of 12.6 GiB), ``many`` (Distinct over 1,000 adapters; needs a host pool of
80 GiB), ``conformance`` (chat, recorded and replayed, one and two steps in flight), ``http`` (chat
through a server), ``start`` (a process, until it is ready). From the repository's root:

    python -m manylora_lab.benchmarks.h200_aims --out aims.json --commit "$(git rev-parse --short HEAD)"

vLLM's figures and the byte floors of the same workloads stand beside (another machine of the kind). ``--toy``
does it all on the demo model on a CPU. What does not fit into ``--time-budget`` seconds is left out and named.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import gzip
import json
import logging
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from manylora.config import PolicyConfig
from manylora.devices import staging
from manylora.engine.driver import Driver
from manylora.engine.journal import JournalWriter
from manylora.executor.build import build_worker
from manylora.flags import build_settings
from manylora.models.config import read_model_config
from manylora.protocol import (
    AdapterRead,
    CopyDone,
    DeviceCommand,
    DeviceEvent,
    Executor,
    ReadAdapter,
    RunStep,
    StepResult,
    SwapPages,
)
from manylora.types import EngineInfo
from manylora.warmup.random_adapters import write_random_adapters
from manylora_lab.bench.lending import LentExecutor
from manylora_lab.bench.provenance import Provenance, add_flags
from manylora_lab.bench.targets import EngineTarget, TargetRequest, TargetResult
from manylora_lab.benchmarks import h200, h200_cache
from manylora_lab.benchmarks.h200_aims_chat import chat, conformance, http
from manylora_lab.benchmarks.h200_aims_first import first
from manylora_lab.workloads.chat import TRACES

RANK = 16
NUM_ADAPTERS = 128
OFFLINE = TRACES / "offline_1000.jsonl.gz"
CELLS = (
    (32, "distinct"), (128, "distinct"), (32, None), (128, None), (32, "uniform"), (32, "identical"),
    (32, "skewed"),
)  # fmt: skip
"""``max_num_seqs`` and popularity."""
VLLM = {
    "32 None": 3298, "32 distinct": 1150, "32 uniform": 1363, "32 skewed": 1583, "32 identical": 1760,
    "128 None": 5271, "128 distinct": 1788, "prefill None": 44767, "prefill adapters": 30914,
}  # fmt: skip
FLOOR = {
    "32 None": 5081, "32 distinct": 4643, "32 uniform": 4788, "32 skewed": 4960, "32 identical": 5062,
    "128 None": 7856, "128 distinct": 7051, "prefill None": 58800,
}  # fmt: skip
AIM = {
    "32 None": 4300, "32 distinct": 3600, "32 uniform": 3850, "32 skewed": 3900, "32 identical": 4000,
    "128 None": 6300, "128 distinct": 5300, "prefill None": 46000, "prefill adapters": 43000,
}  # fmt: skip
"""Tokens a second: generated, and of prompts in ``prefill``."""


STEP_TOKENS = (64, 128, 192, 256, 320, 384, 512, 1024, 2048, 10**9)


class Lent(LentExecutor):
    """The worker for one engine, which notes the moments of what passes."""

    def __init__(self, worker: Executor) -> None:
        super().__init__(worker)
        self._issued: dict[int, tuple[int, int, float]] = {}  # rows, tokens, when; then the host's seconds
        self.steps: list[tuple[int, int, float, float]] = []
        """Rows, tokens, seconds, and of them the host's."""
        self.moments: list[tuple[str, float]] = []
        """What was asked of the worker and answered by it, and when."""

    def begins(self, command: DeviceCommand) -> None:
        match command:
            case RunStep():
                num_tokens = sum(row.num_tokens for row in command.rows)
                self._issued[command.step] = len(command.rows), num_tokens, self.note("issue")
            case ReadAdapter():
                self.note("read")
            case SwapPages():
                self.note("swap")

    def has_begun(self, command: DeviceCommand) -> None:
        if isinstance(command, RunStep) and command.step in self._issued:
            num_rows, num_tokens, began_s = self._issued[command.step]
            self._issued[command.step] = num_rows, num_tokens, self.note("issued") - began_s

    def says(self, event: DeviceEvent) -> None:
        match event:
            case StepResult():
                num_rows, num_tokens, issue_s = self._issued.pop(event.done.step)
                if event.done.ok:
                    self.note("computed")
                    self.steps.append((num_rows, num_tokens, event.done.device_s, issue_s))
            case AdapterRead():
                self.note("was read")
            case CopyDone():
                self.note("swapped")

    def note(self, what: str) -> float:
        """The moment. Copies and reads note theirs from other threads."""
        now_s = time.monotonic()
        self.moments.append((what, now_s))
        return now_s

    def by_tokens(self) -> dict[str, list[float]]:
        """Of decoding steps, and of others by tokens up to: how many, mean rows, mean tokens, mean seconds, mean
        seconds of the host's; and the longest steps."""
        found: dict[str, list[tuple[int, int, float, float]]] = {}
        for step in self.steps:
            size = next((size for size in STEP_TOKENS if step[1] <= size), STEP_TOKENS[-1])
            found.setdefault("decode" if step[0] == step[1] else f"<={size}", []).append(step)
        means: dict[str, list[Any]] = {
            name: [len(steps), *(round(statistics.fmean(column), 4) for column in zip(*steps))]
            for name, steps in found.items()
        }
        longest = sorted(self.steps, key=lambda step: -step[2])[:4]
        return means | {
            "longest": [[*step[:2], *(round(seconds, 4) for seconds in step[2:])] for step in longest]
        }


@dataclasses.dataclass
class Aims:
    """The worker, what it serves, and the report, which is written after every measurement."""

    worker: Any
    policy: PolicyConfig
    info: EngineInfo
    adapters: Mapping[str, str]
    report: dict[str, Any]
    recording: Provenance
    args: argparse.Namespace
    began_s: float
    num_runs: int = 0
    lent: Any = None

    def open(
        self, adapters: Mapping[str, str] | None = None, journal: Path | None = None, **limits: int
    ) -> EngineTarget:
        """A new engine on the worker. ``limits``: of its policy."""
        policy = dataclasses.replace(self.policy, **limits)
        info = dataclasses.replace(self.info, num_pages=policy.num_pages, max_num_seqs=policy.max_num_seqs)
        self.lent = Lent(self.worker)
        record = None if journal is None else JournalWriter(journal, policy)
        driver = Driver(policy, self.lent, info, journal=record)
        for name, path in (self.adapters if adapters is None else adapters).items():
            driver.add_adapter(name, path, verify=False)
        return EngineTarget(driver)

    def prompt(self, length: int) -> tuple[int, ...]:
        """Random tokens, other ones each time: nothing is found in a cache."""
        self.num_runs += 1
        return tuple(random.Random(self.num_runs).choices(range(3, self.info.vocab_size), k=length))

    def call(self, length: int, max_tokens: int, adapter: int | None) -> TargetRequest:
        return TargetRequest(
            self.prompt(length), max_tokens, None if adapter is None else f"adapter-{adapter}"
        )

    def has(self, seconds: float, what: str) -> bool:
        """Whether so much time is left."""
        left = self.args.time_budget - (time.monotonic() - self.began_s)
        if left < seconds:
            self.report["left_out"].append(what)
        return left >= seconds

    def note(self, part: str, row: dict[str, Any]) -> None:
        row = {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
        self.report.setdefault(part, []).append(row)
        print(f"{time.monotonic() - self.began_s:6.1f} s  {part}: {json.dumps(row)}", flush=True)
        self.report["provenance"] = self.recording.provenance()
        Path(self.args.out).write_text(json.dumps(self.report, indent=1))
        gc.collect()


def beside(key: str) -> dict[str, Any]:
    """vLLM's rate, the aim and the floor."""
    return {name: figures.get(key) for name, figures in (("vllm", VLLM), ("aim", AIM), ("floor", FLOOR))}


def failed(answers: Sequence[TargetResult]) -> list[str]:
    return [answer.error for answer in answers if answer.error is not None][:1]


def offline_rows(is_toy: bool) -> list[dict[str, int]]:
    with gzip.open(OFFLINE, "rt") as file:
        rows = [json.loads(line) for line in file]
    if not is_toy:
        return rows
    lengths = ("prompt_tokens", "output_tokens")
    return [{**row, **{name: row[name] // 16 + 1 for name in lengths}} for row in rows[:40]]


async def run_offline(
    aims: Aims, target: EngineTarget, rows: Sequence[dict[str, int]], adapters: Sequence[int | None]
) -> dict[str, Any]:
    """All at once, until the last has ended."""
    calls = [
        aims.call(row["prompt_tokens"], row["output_tokens"], adapter) for row, adapter in zip(rows, adapters)
    ]
    before = await target.counters()
    aims.lent.steps.clear()
    aims.lent.moments.clear()
    began_s = time.monotonic()
    answers = await asyncio.gather(*(target.generate(call) for call in calls))
    seconds = time.monotonic() - began_s
    after = await target.counters()
    passed = {name: after[name] - before[name] for name in after if name in before}
    num_tokens = sum(len(answer.tokens) for answer in answers)
    return {
        "tokens_per_s": num_tokens / seconds, "seconds": seconds, "tokens": num_tokens,
        "steps": passed["steps"], "busy": passed["step_s"] / seconds, "preemptions": passed["preemptions"],
        "pages_swapped_in": passed["pages_swapped_in"], "steps_by_tokens": aims.lent.by_tokens(),
        "errors": failed(answers),
    }  # fmt: skip


async def offline(aims: Aims) -> None:
    """1,000 requests given at once."""
    rows = offline_rows(aims.args.toy)
    for num_seqs, popularity in CELLS:
        key = f"{num_seqs} {popularity}"
        if not aims.has(10.0 if aims.args.toy else 32.0, f"offline {key}"):
            continue
        target = aims.open(max_num_seqs=num_seqs)
        adapters = [None if popularity is None else row[popularity] % len(aims.adapters) for row in rows]
        named = sorted({adapter for adapter in adapters if adapter is not None})
        warm = await asyncio.gather(
            *(target.generate(aims.call(8, 2, adapter)) for adapter in (*named, None))
        )
        found = await run_offline(aims, target, rows, adapters)
        await target.close()
        row = {"max_num_seqs": num_seqs, "popularity": popularity, **beside(key), **found}
        aims.note("offline", {**row, "errors": failed(warm) + found["errors"]})


async def many(aims: Aims, folder: Path) -> None:
    """Every one of the 1,000 requests on an adapter of its own, all of which are in host memory."""
    rows = offline_rows(aims.args.toy)
    if not aims.has(5.0 if aims.args.toy else 130.0, "many"):
        return
    source = Path(aims.adapters["adapter-0"])
    adapters = {}
    for number in range(len(rows)):
        own = folder / f"adapter-{number}"
        own.mkdir(parents=True)
        for file in source.iterdir():
            (own / file.name).symlink_to(file.resolve())
        adapters[own.name] = str(own)
    target = aims.open(adapters, max_num_seqs=32)
    began_s = time.monotonic()
    warm = await asyncio.gather(*(target.generate(aims.call(8, 1, number)) for number in range(len(rows))))
    read_s = time.monotonic() - began_s
    row = await run_offline(aims, target, rows, list(range(len(rows))))
    await target.close()
    aims.note("many", {"max_num_seqs": 32, "read_s": read_s, **row, "errors": failed(warm) + row["errors"]})


async def prefill(aims: Aims) -> None:
    """8 prompts of 2,000 tokens, one token out: the median of five."""
    length = 60 if aims.args.toy else 2000
    target = aims.open()
    for kind in (None, "adapters"):
        if not aims.has(8.0, f"prefill {kind}"):
            continue
        seconds, errors = [], []
        for _ in range(6):  # the first one compiles
            calls = [aims.call(length, 1, None if kind is None else number) for number in range(8)]
            began_s = time.monotonic()
            answers = await asyncio.gather(*(target.generate(call) for call in calls))
            seconds.append(time.monotonic() - began_s)
            errors += failed(answers)
        middle = statistics.median(seconds[1:])
        row = {"kind": kind, "tokens_per_s": 8 * length / middle, **beside(f"prefill {kind}")}
        aims.note("prefill", {**row, "ms": [round(1e3 * one, 2) for one in seconds], "errors": errors[:1]})
    aims.report["prefill_steps"] = aims.lent.by_tokens()
    await target.close()


def start_again(settings: Mapping[str, Any]) -> float:
    """Seconds from the start of a process to an engine that is ready, compile caches being warm."""
    code = (
        "import json, sys; from manylora import LLM; values = json.loads(sys.argv[1]); "
        "llm = LLM(values.pop('model'), **values); print('ready', flush=True); llm.close()"
    )
    began_s = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(settings)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        return time.monotonic() - began_s


def tell_compilations() -> None:
    """Print when a kernel has been compiled, or taken from the compile cache: a step waited for it."""
    import triton

    def tell(**told: Any) -> None:
        print(f"        compiled {told['fn'].name} at {time.monotonic():.1f} s", flush=True)

    triton.knobs.runtime.jit_post_compile_hook = tell


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    add_flags(parser)
    parser.add_argument(
        "--numbers-by-engine",
        action="store_true",
        help="a step's own transfers by copy engines, not by kernels",
    )
    parser.add_argument("--parts", default="prefill,first,offline,chat")
    parser.add_argument("--rates", default="2,10,20", help="of chat, requests a second")
    parser.add_argument("--host-pool", default="24GiB")
    parser.add_argument("--time-budget", type=float, default=500.0)
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE, a setting of the engine")
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args()
    began_s = time.monotonic()
    staging.NUMBERS_BY_KERNEL = not args.numbers_by_engine
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s")
    recording = Provenance.of(args, "0 of the chat's tokens; the other requests are stored")
    report: dict[str, Any] = {
        "command": recording.command, "commit": recording.commit,
        "torch": torch.__version__, "left_out": [],
    }  # fmt: skip
    if not args.toy:
        report |= {"device": torch.cuda.get_device_name(), "ceilings": h200_cache.ceilings()}
        torch.cuda.empty_cache()
        tell_compilations()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if args.toy:
            engine: dict[str, Any] = {
                **h200_cache.TOY.engine, "max_num_seqs": 32, "device_pool": "32MiB", "host_pool": "16MiB",
                "model": str(h200_cache.TOY.model),
            }  # fmt: skip
        else:
            h200.write_model(folder / "model", h200.SHAPES["llama-2-7b"])
            engine = {
                "model": str(folder / "model"), "device": "cuda", "dtype": "bfloat16", "load_format": "dummy",
                "max_model_len": 4096, "max_num_seqs": 128, "max_batch_tokens": 8192, "device_pool": "76GiB",
                "host_pool": args.host_pool,
            }  # fmt: skip
        engine |= dict(one.split("=", 1) for one in args.set)
        config = read_model_config(Path(engine["model"]))
        count = 8 if args.toy else NUM_ADAPTERS
        paths = write_random_adapters(folder / "adapters", config, engine["dtype"], [RANK], count)
        adapters = {path.name: str(path) for path in paths}
        build_s = time.monotonic()
        worker, policy, info = build_worker(
            build_settings(engine)[0], registry_path=folder / "registry.sqlite"
        )
        report["build_s"] = round(time.monotonic() - build_s, 2)
        report["policy"] = dataclasses.asdict(policy)
        aims = Aims(worker, policy, info, adapters, report, recording, args, began_s)
        try:
            for part in args.parts.split(","):
                if part == "many":
                    asyncio.run(many(aims, folder / part))
                elif part in ("chat", "conformance"):
                    asyncio.run({"chat": chat, "conformance": conformance}[part](aims, folder / "chat"))
                elif part not in ("start", "http"):
                    asyncio.run({"offline": offline, "prefill": prefill, "first": first}[part](aims))
        finally:
            worker.close()
        if "http" in args.parts.split(","):
            http(aims, folder / "chat", engine, args.rates.split(","))
        if "start" in args.parts.split(","):
            aims.note("start", {"again_s": start_again({**engine, "host_pool": 0})})
    print(
        "AIMS "
        + json.dumps(
            {
                name: report.get(name)
                for name in ("prefill", "first", "many", "conformance", "start", "left_out")
            }
        )
    )


if __name__ == "__main__":
    main()
