"""What the cache policy's own decisions cost (FastLibra §6.10), in this process, without a device.

    python -m manylora_lab.benchmarks.policy_overhead [--nodes 100000 1000000] [--out FILE.json]

What is timed and how: ``reproduce.decision_times``; ``manylora reproduce fastlibra-overhead`` draws it.
The paper reports 0.5 ms for matching and updating its tree, and 5 ms for a decision.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

from manylora.config import CACHE_POLICIES
from manylora_lab.bench.provenance import Provenance, add_flags
from manylora_lab.reproduce.decision_times import measure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--policies", nargs="+", default=list(CACHE_POLICIES[:2]), choices=CACHE_POLICIES)
    add_flags(parser)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    recording, rows = Provenance.of(args, 7), []
    for num_nodes in args.nodes:
        for policy in args.policies:
            for with_host in (True, False):
                rows.append(measure(policy, num_nodes, with_host))
                print(json.dumps(rows[-1]), flush=True)
    if args.out:
        machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
        args.out.write_text(
            json.dumps(
                {
                    "benchmark": "policy_overhead", "commit": recording.commit, "machine": machine, "rows": rows,
                    "provenance": recording.provenance(),
                },
                indent=1,
            )
        )  # fmt: skip


if __name__ == "__main__":
    main()
