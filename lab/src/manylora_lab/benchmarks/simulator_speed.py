"""How fast the simulator is: many requests of 220 prompt and 100 output tokens at 10/s, on one replica, one core.

From the repository's root:

    python -m manylora_lab.benchmarks.simulator_speed --requests 1000000 --out speed.json

The requests are made up: Poisson arrivals, 100 adapters at random, no shared prefixes; the pools are those of
the chat runs and the costs those of a shipped profile. Every step goes through ``Replica.handle``.
What is timed is the replay alone, by the clock and by the process's own time: on a busy machine only the latter
says what the simulator takes.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manylora.config import CACHE_POLICIES, CacheConfig, ConfigError, PolicyConfig
from manylora.pricing.fit import fit_profile
from manylora_lab.bench.provenance import Provenance, add_flags
from manylora_lab.sim.replay import Replay
from manylora_lab.sim.shipped import find_profile
from manylora_lab.sim.summary import summarize
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

RATE_PER_S = 10.0
PROMPT_TOKENS, OUTPUT_TOKENS = 220, 100
NUM_ADAPTERS, ADAPTER_PAGES = 100, 8
PAGE_BYTES = 8 * 2**20


def stream_of(num_requests: int, seed: int = 0) -> Stream:
    """Equal for equal arguments, on every machine."""
    source = random.Random(seed)
    arrival_s = 0.0
    requests = []
    for number in range(num_requests):
        arrival_s += source.expovariate(RATE_PER_S)
        adapter = source.randrange(NUM_ADAPTERS)
        pieces = (Piece(number, PROMPT_TOKENS),)
        requests.append(StreamRequest(arrival_s, adapter, number, 0, pieces, OUTPUT_TOKENS))
    return Stream("even", tuple(requests), (32,) * NUM_ADAPTERS)


def measure(num_requests: int, policy: str, profile: str) -> dict[str, Any]:
    """The report. Raises ConfigError."""
    costs = fit_profile(find_profile(profile))
    config = PolicyConfig(
        num_pages=1612, page_tokens=16, max_model_len=4096, max_num_seqs=64, max_batch_tokens=8192,
        num_host_pages=6144, page_bytes=PAGE_BYTES, cache=CacheConfig(policy),
    )  # fmt: skip
    replay = Replay(stream_of(num_requests), config, costs, [ADAPTER_PAGES] * NUM_ADAPTERS)
    before_kib = _most_kib()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    replay.run()
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    found = summarize(replay)
    return {
        "requests": num_requests,
        "policy": policy,
        "profile": profile,
        "virtual_s": replay.now,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "times_real_time": replay.now / wall_s,
        "times_real_time_by_cpu": replay.now / cpu_s,
        "events": replay.num_events,
        "cpu_us_per_event": 1e6 * cpu_s / replay.num_events,
        "most_memory_mib": _most_kib() / 1024,
        "of_it_before_the_replay_mib": before_kib / 1024,
        "simulated": {
            name: found[name] for name in ("ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms", "done_per_s")
        },
    }


def _most_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--policy", default="manylora", choices=CACHE_POLICIES)
    parser.add_argument("--profile", default="h200-llama-2-7b", help="a shipped profile or a file")
    add_flags(parser)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.requests < 1:
        parser.error("--requests must be at least 1")
    recording = Provenance.of(args, 0)
    try:
        report = measure(args.requests, args.policy, args.profile)
    except ConfigError as error:
        parser.error(str(error))
    machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
    report = {"benchmark": "simulator_speed", "commit": recording.commit, "machine": machine, **report}
    report["provenance"] = recording.provenance()
    text = json.dumps(report, indent=1) + "\n"
    print(text, end="")
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
