"""The chat traces on the engine of ``h200_aims``: in process, through a server, and recorded and replayed."""

from __future__ import annotations

import collections
import dataclasses
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manylora.engine.fingerprint import fingerprint
from manylora.engine.journal import read_answered
from manylora_lab.bench.replay import ReplaySettings
from manylora_lab.bench.serve import measure
from manylora_lab.bench.targets import EngineTarget
from manylora_lab.benchmarks import h200_cache
from manylora_lab.sim.conformance import recorded_commands, replay_difference, simulation_difference

if TYPE_CHECKING:
    from manylora_lab.benchmarks.h200_aims import Aims


@dataclasses.dataclass(frozen=True)
class Chat:
    """What the chat traces are served with: one pool of 12.6 GiB, adapters of rank 32 or 64 on q, k, v and o."""

    scale: h200_cache.Scale
    names: Mapping[str, str]
    limits: Mapping[str, int]

    @classmethod
    def of(cls, aims: Aims, folder: Path) -> Chat:
        scale = h200_cache.TOY if aims.args.toy else h200_cache.REAL
        if not folder.exists():
            demo = json.loads((h200_cache.ROOT / "demo" / "model" / "config.json").read_text())
            ranks = h200_cache.ranks_of(scale)
            h200_cache.write_adapters(folder, demo if aims.args.toy else scale.shape, ranks)
        names = {
            f"adapter-{number}": str(folder / f"adapter-{number}") for number in range(scale.num_adapters)
        }
        pages = h200_cache.parse_size(str(scale.engine["device_pool"])) // aims.policy.page_bytes
        longest = min(aims.policy.max_model_len, pages * aims.policy.page_tokens)
        num_seqs = int(scale.engine["max_num_seqs"])
        return cls(scale, names, {"num_pages": pages, "max_num_seqs": num_seqs, "max_model_len": longest})

    async def serve(self, target: EngineTarget, rate: str, most_s: float = 1e9) -> Any:
        """The trace's requests of its first ``most_s`` seconds, all adapters having been requested once."""
        stream = h200_cache.stream_of(h200_cache.turns_of(rate, self.scale), self.scale, self.scale.speed)
        stream = dataclasses.replace(
            stream, requests=tuple(one for one in stream.requests if one.arrival_s < most_s)
        )
        try:
            return await measure(
                target, stream, ReplaySettings(0), is_warm=True, extra_adapters=sorted(self.names)
            )
        finally:
            await target.close()


async def chat(aims: Aims, folder: Path) -> None:
    """The chat traces by requests a second."""
    bench = Chat.of(aims, folder)
    for rate in aims.args.rates.split(","):
        if not aims.has(10.0 if aims.args.toy else 65.0, f"chat {rate}"):
            continue
        found = await bench.serve(aims.open(bench.names, **bench.limits), rate)
        row = {"offered_per_s": float(rate), "summary": found.summary, "counters": found.engine}
        aims.note("chat", {**row, "steps_by_tokens": aims.lent.by_tokens()})


async def conformance(aims: Aims, folder: Path) -> None:
    """The chat trace's beginning, recorded, replayed by a fresh policy, and lived through in virtual time."""
    bench = Chat.of(aims, folder)
    for depth in (1, 2):
        if not aims.has(10.0 if aims.args.toy else 35.0, f"conformance {depth}"):
            continue
        journal = folder.parent / f"journal-{depth}"
        target = aims.open(bench.names, journal, pipeline_depth=depth, **bench.limits)
        await bench.serve(target, "10", 15.0)
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
        aims.note("conformance", row)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def http(aims: Aims, folder: Path, engine: Mapping[str, Any], rates: Sequence[str]) -> None:
    """The chat traces through a server: ``manylora serve``, and ``manylora bench serve`` as its client."""
    bench = Chat.of(aims, folder)
    pool = {name: engine[name] for name in ("device", "dtype", "load_format", "host_pool") if name in engine}
    pool |= {"device_pool": bench.scale.engine["device_pool"], "max_num_seqs": bench.limits["max_num_seqs"]}
    flags = [word for name, value in pool.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    port = "8765"
    words = ["serve", str(engine["model"]), *flags, "--adapter-dir", str(folder), "--port", port]
    with subprocess.Popen([sys.executable, "-m", "manylora", *words], stdout=subprocess.DEVNULL) as server:
        try:
            began_s = time.monotonic()
            url = f"http://127.0.0.1:{port}"
            while not answers(f"{url}/health"):
                if server.poll() is not None:
                    raise RuntimeError(f"the server ended with code {server.returncode}")
                time.sleep(0.2)
            print(f"the server answers after {time.monotonic() - began_s:.1f} s", flush=True)
            for rate in rates:
                if not aims.has(15.0 if aims.args.toy else 75.0, f"http {rate}"):
                    continue
                out = folder.parent / "http.json"
                trace = folder.parent / "trace.jsonl"
                turns = h200_cache.turns_of(rate, bench.scale)
                trace.write_text("".join(json.dumps(dataclasses.asdict(turn)) + "\n" for turn in turns))
                client = ["bench", "serve", "--url", url, "--trace-file", str(trace)]
                client += ["--adapter-name", "adapter-{}", "--warm-adapters", "--out", str(out)]
                if aims.args.toy:
                    client += ["--limit", "8", "--skip-too-long", "--vocab-size", "4000"]
                ran = subprocess.run(
                    [sys.executable, "-m", "manylora", *client], check=False, capture_output=True
                )
                if not out.exists():
                    raise RuntimeError(ran.stderr.decode()[-500:])
                found = json.loads(out.read_text())["summary"]
                aims.note("http", {"offered_per_s": float(rate), "summary": found})
        finally:
            server.terminate()
