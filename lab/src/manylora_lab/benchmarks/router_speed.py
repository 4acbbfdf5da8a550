"""How long a router takes to decide, and what it remembers: clusters of 60 replicas with 40,000 adapters and of
1,000 with 100,000.

From the repository's root:

    python -m manylora_lab.benchmarks.router_speed --out router_speed.json

The cluster is made up: every replica has 200 adapters and some 20 requests, adapters are asked for by Zipf's law
(exponent 1), half of the requests continue a chat of up to 1,000 tokens. Requests come and end one for one, so
that the load stays; every 50 ms each replica reports, with 4 adapters that came or went. Each event is timed
alone, with the collector off, as in a router that runs; the process's own time is not the machine's, so others
that use it are seen in the longest.
"""

from __future__ import annotations

import argparse
import bisect
import gc
import itertools
import json
import platform
import random
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manylora.config.routing import ROUTERS, RouterConfig
from manylora.policy.router import Router
from manylora.protocol.routing import (
    NOWHERE,
    ON_DEVICE,
    ON_HOST,
    Accepted,
    Asked,
    Assign,
    Ended,
    Listed,
    ReplicaFacts,
    ReplicaReport,
    ReplicaUp,
    RouterCommand,
    RouterEvent,
    StepPlane,
)
from manylora_lab.bench.provenance import Provenance, add_flags

CLUSTERS = ((60, 40_000), (1_000, 100_000))
INDEXED = ("manylora", "cache-aware", "punica", "round-robin", "random")
"""These look at few replicas; the others scan all of them."""
RESIDENT, REQUESTS, CHANGED = 200, 20, 4
REPORT_S = 0.05
FACTS = ReplicaFacts(
    num_pages=1612, page_tokens=16, max_model_len=4096, max_seqs=64,
    planes=(StepPlane(0.012, 6e-5, 1.5e-7, 2e-5, 2e-6), StepPlane(0.009, 9e-5, 1.3e-7)),
    token_s=2.2e-5, page_in_s=1.6e-4, page_read_s=9e-3, page_bytes=8 * 2**20,
)  # fmt: skip
COEFFICIENTS = (
    ("decode_slope_s", "4e-6"), ("decode_base_s", "0.03"), ("prefill_slope_s", "2e-5"), ("prefill_base_s", "0.01"),
    ("slo_s", "0.05"),
)  # fmt: skip
"""Of caraserve; made up, since only its time matters here."""


class Cluster:
    """A router and what it is told. All draws come from the seed."""

    def __init__(self, policy: str, num_replicas: int, num_adapters: int, seed: int) -> None:
        self._random = random.Random(seed)
        self.router = Router(RouterConfig(policy, COEFFICIENTS if policy == "caraserve" else ()))
        self._num_replicas = num_replicas
        self._num_adapters = num_adapters
        weights = itertools.accumulate(1 / (place + 1) for place in range(num_adapters))
        self._weights = list(weights)
        self.now = 0.0
        self._requests: list[str] = []
        self._num_asked = 0
        self._seqs = [0] * num_replicas
        self._seen = [0] * num_replicas
        self._chats: list[tuple[int, tuple[int, ...]]] = []

    def tell(self, event: RouterEvent) -> list[RouterCommand]:
        return self.router.handle(event, self.now)

    def build(self) -> None:
        """All replicas are up with their adapters and requests."""
        for adapter in range(1, self._num_adapters + 1):
            self.tell(Listed(adapter, (8, 16, 32, 64)[adapter % 4], (4, 8, 16, 32)[adapter % 4]))
        for replica in range(self._num_replicas):
            self.tell(ReplicaUp(replica, 1, FACTS))
            mostly_hot = {self._adapter() for _ in range(RESIDENT)}
            while len(mostly_hot) < RESIDENT:
                mostly_hot.add(self._random.randrange(1, self._num_adapters + 1))
            tiers = tuple((adapter, ON_DEVICE if adapter % 3 else ON_HOST) for adapter in sorted(mostly_hot))
            self.tell(self.report(replica, tiers, is_full=True))
        for number in range(REQUESTS * self._num_replicas):
            if number % 500 == 0:
                self.report_all()
            self.carry(self.tell(self.ask()))

    def _adapter(self) -> int:
        draw = self._random.random() * self._weights[-1]
        return 1 + bisect.bisect(self._weights, draw)

    def ask(self) -> Asked:
        """The next request: a chat goes on, or another one begins."""
        self._num_asked += 1
        if self._chats and self._random.random() < 0.5:
            adapter, prefix = self._chats[self._random.randrange(len(self._chats))]
        else:
            adapter = self._adapter()
            prefix = tuple(self._random.getrandbits(64) for _ in range(self._random.randrange(1, 16)))
            if len(self._chats) < 4 * self._num_replicas:
                self._chats.append((adapter, prefix))
            else:
                self._chats[self._random.randrange(len(self._chats))] = adapter, prefix
        return Asked(f"r{self._num_asked}", adapter, 64 * len(prefix) + 32, 256, prefix)

    def carry(self, commands: Sequence[RouterCommand]) -> None:
        """Assignments are accepted at once."""
        for command in commands:
            if isinstance(command, Assign):
                self._requests.append(command.request)
                self._seen[command.replica] = max(self._seen[command.replica], command.number)
                self.tell(Accepted(command.request, command.attempt))

    def end(self) -> Ended:
        """Any request has ended."""
        place = self._random.randrange(len(self._requests))
        self._requests[place], self._requests[-1] = self._requests[-1], self._requests[place]
        return Ended(self._requests.pop(), self._random.randrange(20, 200))

    def report(
        self, replica: int, changes: tuple[tuple[int, int], ...], is_full: bool = False
    ) -> ReplicaReport:
        self._seqs[replica] += 1
        return ReplicaReport(
            replica, 1, self._seqs[replica], self._seen[replica], REQUESTS, 0,
            self._random.randrange(200, 600), 400, self._random.randrange(400), 8000, is_full, changes,
            page_price_s=1e-3,
        )  # fmt: skip

    def changes(self) -> tuple[tuple[int, int], ...]:
        """Adapters that came or went, as they are asked for."""
        return tuple(
            (self._adapter(), self._random.choice((NOWHERE, ON_HOST, ON_DEVICE))) for _ in range(CHANGED)
        )

    def report_all(self) -> None:
        for replica in range(self._num_replicas):
            self.carry(self.tell(self.report(replica, ())))


def measure(policy: str, num_replicas: int, num_adapters: int, num_requests: int) -> dict[str, Any]:
    """The times of one router in one cluster, in microseconds."""
    cluster = Cluster(policy, num_replicas, num_adapters, seed=1)
    cluster.build()
    gc.collect()
    gc.freeze()
    gc.disable()
    asked_us: list[float] = []
    asked_cpu_us: list[float] = []
    report_us: list[float] = []
    # As many reports a request as where each replica takes 5 requests a second.
    reports_per_request = 1 / (5 * REPORT_S)
    due = 0.0
    for _ in range(num_requests):
        cluster.now += 1 / (5 * num_replicas)
        cluster.tell(cluster.end())
        asked = cluster.ask()
        began, began_cpu = time.perf_counter_ns(), time.thread_time_ns()
        commands = cluster.tell(asked)
        asked_cpu_us.append((time.thread_time_ns() - began_cpu) / 1e3)
        asked_us.append((time.perf_counter_ns() - began) / 1e3)
        cluster.carry(commands)
        due += reports_per_request
        while due >= 1:
            due -= 1
            replica = len(report_us) % num_replicas
            report = cluster.report(replica, cluster.changes())
            began = time.perf_counter_ns()
            commands = cluster.tell(report)
            report_us.append((time.perf_counter_ns() - began) / 1e3 / CHANGED)
            cluster.carry(commands)
    gc.enable()
    gc.unfreeze()
    return {
        "router": policy,
        "replicas": num_replicas,
        "adapters": num_adapters,
        "requests": num_requests,
        "asked_us": quantiles(asked_us),
        "asked_cpu_us": quantiles(asked_cpu_us),
        "report_us_per_changed_adapter": quantiles(report_us),
    }


def memory_mib(policy: str, num_replicas: int, num_adapters: int) -> float:
    """What the router has allocated when the cluster stands, requests of before included."""
    gc.collect()
    cluster = Cluster(policy, num_replicas, num_adapters, seed=1)
    tracemalloc.start()
    cluster.build()
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / 2**20


def quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {name: ordered[min(int(share * len(ordered)), len(ordered) - 1)] for name, share in QUANTILES}
    return {"mean": round(sum(ordered) / len(ordered), 2), **{name: round(at[name], 2) for name in at}}


QUANTILES = (("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("most", 1.0))


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--routers", nargs="+", default=list(INDEXED), choices=ROUTERS)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--replicas", type=int, nargs="*", help="only clusters of so many", default=None)
    parser.add_argument("--no-memory", action="store_true", help="leave out what takes minutes")
    add_flags(parser)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    recording, rows = Provenance.of(args, 1), []
    for num_replicas, num_adapters in CLUSTERS:
        if args.replicas and num_replicas not in args.replicas:
            continue
        for policy in args.routers:
            row = measure(policy, num_replicas, num_adapters, args.requests)
            if not args.no_memory:
                row["memory_mib"] = round(memory_mib(policy, num_replicas, num_adapters), 1)
            rows.append(row)
            print(json.dumps(row), flush=True)
    machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
    report = {"benchmark": "router_speed", "commit": recording.commit, "machine": machine, "rows": rows}
    report["provenance"] = recording.provenance()
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
