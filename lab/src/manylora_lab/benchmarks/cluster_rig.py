"""Clusters of the demo as real processes, each replica bound to one core; what they are, and what they serve."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from manylora.config import PolicyConfig
from manylora.config.routing import RouterConfig
from manylora.engine.journal import REPLICA, ROUTER
from manylora.pricing.profile import Profile, load_profile
from manylora.protocol.routing import Listed
from manylora_lab.bench.http_client import HttpClient
from manylora_lab.bench.http_target import HttpTarget
from manylora_lab.bench.provenance import ROOT
from manylora_lab.bench.replay import ReplaySettings, RequestResult
from manylora_lab.bench.serve import measure
from manylora_lab.benchmarks.cluster_pairs import DEMO, START_S, server
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

Row = dict[str, Any]

ADAPTERS = tuple(sorted(folder.name for folder in (DEMO / "adapters").iterdir()))
SETTINGS = ("--device-pool", "48MiB", "--host-pool", "16MiB", "--max-adapter-rank", "64", "--lease", "10")
_NAMES = ReplaySettings(adapter_name=",".join(ADAPTERS))
_REHEARSED = 16
_SAMPLE_S = 0.25
_TOKENS = re.compile(r'vllm:generation_tokens_total\{.*replica="(\d+)"')


@dataclasses.dataclass(frozen=True, slots=True)
class ServedStream:
    """What a stream measured. ``tokens``: that each replica generated; ``working_sets``: moments, and how many
    requests each replica had."""

    results: list[RequestResult]
    tokens: list[float]
    working_sets: list[tuple[float, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """A cluster, as its own journals have it: settings of its replicas and of its router, each adapter's rank and
    pages."""

    policy: PolicyConfig
    router: RouterConfig
    ranks: tuple[int, ...]
    adapter_pages: list[int]


def cores() -> list[int]:
    """Those that this process may use."""
    return sorted(os.sched_getaffinity(0))


def profiles(folder: Path, most_seqs: int, budget_s: float) -> list[Profile]:
    """A replica's costs on each core, measured on all of them at the same time."""
    running = []
    for core in cores():
        out = folder / f"core-{core}.json"
        args = ["--model", str(DEMO / "model"), "--device", "cpu", "--quick", "--adapter-modules", "all"]
        args += ["--max-num-seqs", str(most_seqs), "--budget", str(budget_s), "--out", str(out)]
        words = [sys.executable, "-m", "manylora", "profile", *args]
        with _bound({core}):
            running.append((out, subprocess.Popen(words, env=_environment(), stdout=subprocess.DEVNULL)))
    try:
        if any(process.wait() for _, process in running):
            raise SystemExit("a profile could not be measured")
    finally:
        for _, process in running:
            process.kill()
    return [load_profile(out) for out, _ in running]


@contextlib.contextmanager
def _bound(places: set[int]) -> Iterator[None]:
    """Processes that are started meanwhile have these cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, places)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _environment() -> dict[str, str]:
    paths = f"{ROOT / 'src'}:{ROOT / 'lab' / 'src'}"
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def facts_of(replicas: int, args: Sequence[str]) -> Facts:
    """Of a cluster that is started for it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _started(folder, replicas, (*args, "--journal", str(folder / "journal"))) as url:
            asyncio.run(_rehearse(url))
        policy, _ = REPLICA.read_answered(folder / "journal.r0.e1")
        router, events = ROUTER.read_answered(folder / "journal.router")
        listed = {event.adapter: event for _, event, _ in events if isinstance(event, Listed)}
    found = [listed[adapter] for adapter in sorted(listed)]
    return Facts(policy, router, tuple(each.rank for each in found), [each.num_pages for each in found])


def serve(stream: Stream, replicas: int, args: Sequence[str]) -> ServedStream:
    """The stream on a cluster of its own, which has served some requests of the base before."""
    with tempfile.TemporaryDirectory() as name, _started(Path(name), replicas, args) as url:
        return asyncio.run(_serve(url, stream, replicas))


@contextlib.contextmanager
def _started(folder: Path, replicas: int, args: Sequence[str]) -> Iterator[str]:
    given = ("--replicas", str(replicas), "--cluster-dir", str(folder / "cluster"), *SETTINGS, *args)
    with server(folder, *given) as url:
        places = cores()
        for number, each in enumerate(running(url, replicas)):
            for thread in Path(f"/proc/{each['pid']}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {places[number % len(places)]})
        yield url


def running(url: str, replicas: int, most_s: float = START_S) -> list[Row]:
    """Each of them, when all run. Raises SystemExit where they do not within ``most_s``."""
    until_s = time.monotonic() + most_s
    while True:
        found: list[Row] = asyncio.run(status_of(url))["replicas"]
        if [each["state"] for each in found] == ["running"] * replicas:
            return found
        if time.monotonic() > until_s:
            raise SystemExit(f"not all of {replicas} replicas run: {[each['state'] for each in found]}")
        time.sleep(0.1)


async def status_of(url: str) -> Row:
    """What ``GET /cluster`` says."""
    client = HttpClient(url)
    try:
        found: Row = json.loads(await client.fetch("/cluster"))
        return found
    finally:
        await client.close()


async def _rehearse(url: str) -> None:
    """Some requests of the base, all at once, so that every replica has served."""
    prompts = ((Piece(("rehearsed", number), 32),) for number in range(_REHEARSED))
    requests = [StreamRequest(0.0, None, number, 0, prompt, 32) for number, prompt in enumerate(prompts)]
    target = await HttpTarget.connect(url, needs_ids=False)
    await measure(target, Stream("rehearsal", tuple(requests)), _NAMES, client_processes=0)
    await target.close()


async def _serve(url: str, stream: Stream, replicas: int) -> ServedStream:
    await _rehearse(url)
    target = await HttpTarget.connect(url, needs_ids=False)
    sets: list[tuple[float, tuple[int, ...]]] = []
    sampling = asyncio.create_task(_sample(url, sets))
    try:
        found = await measure(target, stream, _NAMES, client_processes=0)
    finally:
        sampling.cancel()
        await target.close()
    failed = [result.error for result in found.results if result.error]
    if found.error or failed:
        raise SystemExit(f"a stream failed: {found.error or failed[0]}")
    tokens = [0.0] * replicas
    for name, grown in found.engine.items():
        if matched := _TOKENS.match(name):
            tokens[int(matched[1])] += grown
    return ServedStream(found.results, tokens, sets)


async def _sample(url: str, sets: list[tuple[float, tuple[int, ...]]]) -> None:
    client, began_s = HttpClient(url), time.monotonic()
    try:
        while True:
            status = json.loads(await client.fetch("/cluster"))
            sizes = tuple(each["requests"] for each in status["replicas"])
            sets.append((round(time.monotonic() - began_s, 3), sizes))
            await asyncio.sleep(_SAMPLE_S)
    finally:
        await client.close()


def numbers(served: ServedStream, slo_s: float | None = None) -> Row:
    """Under the names of ``summarize_cluster``, as far as they are compared."""
    results = served.results
    tokens = sum(result.reply_tokens for result in results)
    judged = [result.tpot_s for result in results if result.tpot_s is not None]
    return {
        "ttft_mean_ms": 1e3 * statistics.fmean(result.ttft_s for result in results),
        "tpot_mean_ms": 1e3 * statistics.fmean(judged),
        "latency_ms_token": 1e3 * sum(result.e2e_s for result in results) / tokens,
        "output_tokens_per_s": tokens / max(result.end_s for result in results),
        "slo_attainment": None if slo_s is None else sum(each <= slo_s for each in judged) / len(judged),
        "shares": [each / max(sum(served.tokens), 1.0) for each in served.tokens],
    }
