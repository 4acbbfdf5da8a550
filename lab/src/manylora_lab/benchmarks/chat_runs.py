"""The shipped chat traces on an engine: as streams of some scale, in process, through a server, and recorded and
replayed."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manylora.config.declaring import ConfigError
from manylora.engine.journal import fingerprint, read_answered
from manylora_lab.bench.lending import LentExecutor
from manylora_lab.bench.replay import ReplaySettings
from manylora_lab.bench.serve import MeasuredReplay, measure
from manylora_lab.bench.targets import EngineTarget
from manylora_lab.benchmarks.engine_rig import EngineRig
from manylora_lab.benchmarks.offline_runs import again
from manylora_lab.benchmarks.run_report import RunReport
from manylora_lab.sim.conformance import recorded_commands, replay_difference, simulation_difference
from manylora_lab.workloads.chat import TRACES, Turn, conversations, read_turns, shrunk, to_stream
from manylora_lab.workloads.stream import Stream

REHEARSAL_SEED, REHEARSED_TURNS = 1_000_003, 120
VLLM_CHAT = {
    rate: {"ttft_mean_ms": ttft, "tpot_mean_ms": tpot}
    for rate, ttft, tpot in ((2.0, 27.4, 6.86), (5.0, 34.1, 8.46), (10.0, 66.4, 14.13), (20.0, 4594, 19.52))
}
"""vLLM's on an H200 by requests a second, one run each: its defaults, 10 GiB of KV and 20 adapter slots of rank 64
beside it (2.6 GiB), no KV offloading."""
_ENTRY = re.compile(r"(\d+)(?:\*(\d+\.?\d*))?(?:x(\d+))?")


@dataclasses.dataclass(frozen=True)
class ChatScale:
    """What the traces are served with, and what is made of them; adapters, on q, k, v and o, have the ranks in
    turn. ``divisor``: of lengths; ``speed``: how much faster than they were."""

    num_adapters: int = 100
    ranks: tuple[int, ...] = (32, 64)
    device_pool: str = "12.6GiB"
    max_num_seqs: int = 64
    divisor: int = 1
    num_conversations: int | None = None
    speed: float = 1.0


REAL = ChatScale()
"""Chats as the traces have them."""
TOY = ChatScale(8, (4, 8), "2MiB", 8, divisor=16, num_conversations=8, speed=25.0)


@dataclasses.dataclass(frozen=True)
class RateLoad:
    """A trace by its rate, replayed ``scale`` times as fast, ``rounds`` times one after another."""

    rate: str
    scale: float = 1.0
    rounds: int = 1

    @property
    def offered_per_s(self) -> float:
        return float(self.rate) * self.scale

    def stream(self, scale: ChatScale) -> Stream:
        """The trace, said over and over in new words, so that a 99th percentile is of enough requests."""
        turns = turns_of(self.rate, scale)
        span_s = turns[-1].arrival_s * (1 + 1 / len(turns))
        count = 1 + max(turn.conversation for turn in turns)
        repeated = [
            dataclasses.replace(
                turn,
                arrival_s=turn.arrival_s + number * span_s,
                conversation=turn.conversation + number * count,
            )
            for number in range(self.rounds)
            for turn in turns
        ]
        return stream_of(repeated, scale).with_rate(self.scale)


def loads_from(text: str) -> list[RateLoad]:
    """Parses "5x2,10,20*0.6": the 5/s trace twice, the 10/s one, the 20/s one at 12/s. Raises ConfigError."""
    loads = []
    for entry in text.split(","):
        found = _ENTRY.fullmatch(entry)
        if found is None:
            raise ConfigError(f"--rates: {entry!r} is not RATE, RATE*SCALE or RATE*SCALExROUNDS")
        rate, scale, rounds = found.groups()
        if not (TRACES / f"chat_{rate}rps.jsonl.gz").is_file():
            raise ConfigError(f"there is no trace of {rate!r}/s in {TRACES}")
        load = RateLoad(rate, float(scale or 1), int(rounds or 1))
        if not load.scale > 0 or load.rounds < 1:
            raise ConfigError(f"--rates: scale and rounds must be above 0 in {entry!r}")
        loads.append(load)
    return loads


def turns_of(rate: str, scale: ChatScale) -> tuple[Turn, ...]:
    """A trace's turns on the adapters of the scale."""
    turns = read_turns(TRACES / f"chat_{rate}rps.jsonl.gz")
    if scale.num_conversations is not None:
        kept = list(conversations(turns))[: scale.num_conversations]
        turns = tuple(turn for turn in turns if turn.conversation in kept)
    if scale.divisor > 1:
        turns = shrunk(turns, scale.divisor)
    served = [(turn, turn.adapter % scale.num_adapters) for turn in turns]
    return tuple(
        dataclasses.replace(turn, adapter=adapter, rank=scale.ranks[adapter % len(scale.ranks)])
        for turn, adapter in served
    )


def stream_of(turns: list[Turn], scale: ChatScale) -> Stream:
    ranks = [scale.ranks[adapter % len(scale.ranks)] for adapter in range(scale.num_adapters)]
    return to_stream(turns, ranks=ranks).with_rate(scale.speed)


def beginning(stream: Stream, seconds: float) -> Stream:
    """What arrives in the first so many."""
    kept = tuple(request for request in stream.requests if request.arrival_s < seconds)
    return dataclasses.replace(stream, requests=kept)


class Chat:
    """Engines of a rig for the chat traces: a pool of their scale, its adapters."""

    def __init__(self, rig: EngineRig, scale: ChatScale | None = None) -> None:
        self.rig = rig
        self.scale = scale or (TOY if rig.is_toy else REAL)
        self.adapters = rig.adapters("chat", self.scale.ranks, self.scale.num_adapters, "attention")
        self.limits = rig.limits(self.scale.device_pool, self.scale.max_num_seqs)

    def open(
        self, executor: LentExecutor | None = None, journal: Path | None = None, **more: Any
    ) -> EngineTarget:
        """A new engine."""
        return self.rig.open(self.adapters, executor, journal, **{**self.limits, **more})

    async def serve(
        self, stream: Stream, seed: int = 0, journal: Path | None = None, **more: Any
    ) -> MeasuredReplay:
        """Serve with a new engine, all adapters having been requested once."""
        target = self.open(None, journal, **more)
        try:
            return await measure(
                target, stream, ReplaySettings(seed), is_warm=True, extra_adapters=sorted(self.adapters)
            )
        finally:
            await target.close()

    async def rehearse(self) -> None:
        """Other prompts, unmeasured: kernels are compiled on first use."""
        turns = list(turns_of("20", self.scale)[:REHEARSED_TURNS])
        await self.serve(stream_of(turns, self.scale), REHEARSAL_SEED)


async def chat(rig: EngineRig, report: RunReport) -> None:
    """The chat traces by requests a second."""
    bench = Chat(rig)
    if report.args.rehearse:
        await bench.rehearse()
    policy = rig.policy.cache.policy
    for repeat in range(report.repeats):
        for load in loads_from(report.args.rates):
            if not report.has(65.0, f"chat {load.offered_per_s:g}{again(repeat)}"):
                continue
            found = await bench.serve(load.stream(bench.scale))
            row = {
                "policy": policy, "offered_per_s": load.offered_per_s, "repeat": repeat,
                "vllm": VLLM_CHAT.get(load.offered_per_s), "summary": found.summary,
                "counters": found.engine,
            }  # fmt: skip
            report.note("chat", {**row, "steps_by_tokens": rig.noted.by_tokens()})


async def conformance(rig: EngineRig, report: RunReport) -> None:
    """The chat trace's beginning, recorded, replayed by a fresh policy, and lived through in virtual time."""
    bench = Chat(rig)
    stream = beginning(RateLoad("10").stream(bench.scale), 15.0)
    for depth in (1, 2):
        if not report.has(35.0, f"conformance {depth}"):
            continue
        journal = rig.folder / f"journal-{depth}"
        await bench.serve(stream, journal=journal, pipeline_depth=depth)
        config, answered = read_answered(journal)
        entries = list(answered)
        told = list(recorded_commands(config, [(now, event) for now, event, _ in entries]))
        kinds = collections.Counter(
            type(thing).__name__ for one in told for thing in (one.event, *one.commands)
        )
        row = {
            "pipeline_depth": depth, "events": len(entries), "events_and_commands": dict(kinds),
            "replay_difference": str(replay_difference(config, entries, fingerprint)),
            "simulation_difference": str(simulation_difference(config, told)),
        }  # fmt: skip
        report.note("conformance", row)


def http(rig: EngineRig, report: RunReport) -> None:
    """The chat traces through a server: ``manylora serve``, and ``manylora bench serve`` as its client. The worker
    of the rig is closed."""
    bench = Chat(rig)
    names = ("device", "dtype", "load_format", "host_pool")
    settings = {name: rig.settings[name] for name in names}
    settings |= {"device_pool": bench.scale.device_pool, "max_num_seqs": bench.limits["max_num_seqs"]}
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    folder = str(Path(bench.adapters["adapter-0"]).parent)
    with served([str(rig.settings["model"]), *flags, "--adapter-dir", folder], report) as url:
        for repeat in range(report.repeats):
            for load in loads_from(report.args.rates):
                if report.has(75.0, f"http {load.offered_per_s:g}{again(repeat)}"):
                    row = {"offered_per_s": load.offered_per_s, "repeat": repeat}
                    report.note("http", {**row, "summary": _sent(bench, load, url)})


def _sent(bench: Chat, load: RateLoad, url: str) -> Any:
    """The summary of the client, a process of its own."""
    out, trace = bench.rig.folder / "http.json", bench.rig.folder / "trace.jsonl"
    turns = turns_of(load.rate, bench.scale)
    trace.write_text("".join(json.dumps(dataclasses.asdict(turn)) + "\n" for turn in turns))
    client = ["bench", "serve", "--url", url, "--trace-file", str(trace), "--out", str(out)]
    client += ["--adapter-name", "adapter-{}", "--warm-adapters", "--rate-scale", str(load.scale)]
    client += ["--limit", "8", "--skip-too-long"] if bench.rig.is_toy else []
    out.unlink(missing_ok=True)
    ran = subprocess.run([sys.executable, "-m", "manylora", *client], check=False, capture_output=True)
    if not out.exists():
        raise RuntimeError(ran.stderr.decode()[-500:])
    return json.loads(out.read_text())["summary"]


@contextlib.contextmanager
def served(words: list[str], report: RunReport) -> Iterator[str]:
    """A server's address, while it answers there."""
    port = "8765"
    arguments = [sys.executable, "-m", "manylora", "serve", *words, "--port", port]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            while not answers(f"{url}/health"):
                if server.poll() is not None:
                    raise RuntimeError(f"the server ended with code {server.returncode}")
                time.sleep(0.2)
            report.say("the server answers")
            yield url
        finally:
            server.terminate()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
