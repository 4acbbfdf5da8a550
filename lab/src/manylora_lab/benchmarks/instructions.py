"""Instructions of the policy and of the simulator, counted by valgrind, beside those of another commit.

    python -m manylora_lab.benchmarks.instructions --against COMMIT --out FILE.json

Counts do not depend on what else the machine does. ``policy``: recorded journals are fed to fresh replicas, under
each of several policies and both depths; ``rows``: 64 sequences decode 128 tokens; ``simulator``: a stored cell of
FastLibra's table, cut short. What loading takes is counted apart and subtracted. The journals and the cell are
those of today's tree, the code that of either commit.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from manylora_lab.bench.provenance import ROOT, Provenance, add_flags, commit_of
from manylora_lab.benchmarks.pairs import tree_of

PROOF = ROOT / "tests" / "proof"
SIMULATED_S = 100.0
JOURNALS = (
    "manylora-1-crowd", "fastlibra-pages-2-crowd", "static-lru-1-crush", "s-lora-2-crush", "manylora-2-bare",
)  # fmt: skip
START = "import gc; gc.disable()"
"""What the collector takes depends on all that is loaded, not on the work; a server freezes what it has loaded."""
ALONE = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""One thread: others of a library of linear algebra spin while they wait, by chance for how long."""
FEED = """
import sys
from pathlib import Path
from manylora.engine.journal import read_answered
from manylora.policy.replica import Replica
journals = [read_answered(Path(path)) for path in sys.argv[2:]]
journals = [(config, [(now, event) for now, event, _ in answered]) for config, answered in journals]
if sys.argv[1] == "work":
    for config, events in journals:
        replica = Replica(config)
        for now, event in events:
            replica.handle(event, now)
"""
DECODE = """
import sys
from manylora.config import CacheConfig, PolicyConfig
from manylora.policy.replica import Replica
from manylora.protocol import AdapterAdded, AdapterRead, Arrive, CopyDone, ReadAdapter, RunStep, StepDone
from manylora.protocol import SwapPages
from manylora.types import Request, SamplingParams
ROWS, TOKENS = 64, 128
replica, now = Replica(PolicyConfig(4000, 16, 512, ROWS, 2048, 1000, cache=CacheConfig())), 0.0
for adapter in range(1, 9):
    replica.handle(AdapterAdded(adapter, 4), now)
params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=0)
asked = [Request(f"r{i}", i % 9, tuple(range(100 * i, 100 * i + 32)), params) for i in range(ROWS)]
pending = []
if sys.argv[1] == "work":
    for request in asked:
        pending += replica.handle(Arrive(request, more=request is not asked[-1]), now)
while pending:
    command, now = pending.pop(0), now + 0.001
    if isinstance(command, ReadAdapter):
        pending += replica.handle(AdapterRead(command.adapter, True, "", 0.001), now)
    elif isinstance(command, SwapPages):
        pending += replica.handle(CopyDone(command.copy, True, 0.001), now)
    elif isinstance(command, RunStep):
        drawn = tuple((row[0], (7,)) for row in command.rows if row[3])
        pending += replica.handle(StepDone(command.step, True, drawn, 0.015), now)
"""
SIMULATE = """
import json, sys
from importlib import import_module
cells = import_module(sys.argv[2] + ".reproduce.cells")
replay = cells.cell_replay(cells.Cell(**json.loads(sys.argv[3])))
if sys.argv[1] == "work":
    replay.run()
"""


def count(tree: Path, program: str, *args: str) -> int:
    """Instructions that a program runs with the package of a tree."""
    valgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    done = subprocess.run(
        [*valgrind, sys.executable, "-c", START + program, *args],
        env={**os.environ, **ALONE, "PYTHONPATH": f"{tree / 'src'}:{tree / 'lab/src'}"},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    line = next(line for line in done.stderr.splitlines() if "Collected" in line)
    return int(line.split(":")[1])


def measure(tree: Path, journals: list[Path], cell: dict[str, Any]) -> dict[str, int]:
    """Instructions of the work alone, by what is measured."""
    package = "manylora_lab" if (tree / "lab").is_dir() else "manylora"  # where the simulator is
    inputs = {
        "policy": (FEED, *map(str, journals)),
        "rows": (DECODE,),
        "simulator": (SIMULATE, package, json.dumps(cell)),
    }
    return {
        name: count(tree, program, "work", *args) - count(tree, program, "load", *args)
        for name, (program, *args) in inputs.items()
    }


def unpacked(folder: Path) -> list[Path]:
    """The journals as files of their own form."""
    paths = []
    for name in JOURNALS:
        paths.append(folder / name)
        paths[-1].write_bytes(lzma.decompress((PROOF / "journals" / f"{name}.jsonl.xz").read_bytes()))
    return paths


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--against", required=True, metavar="COMMIT", help="whose instructions are the measure"
    )
    parser.add_argument("--out", type=Path)
    add_flags(parser)
    args = parser.parse_args()
    recording = Provenance.of(args, "none: the inputs are recorded")
    cells = [json.loads(line) for line in (PROOF / "cells.jsonl").read_text().splitlines()]
    cell = {**min(cells, key=lambda line: float(line["seconds"]))["cell"], "duration_s": SIMULATED_S}
    with tree_of(args.against) as other, tempfile.TemporaryDirectory() as folder:
        journals = unpacked(Path(folder))
        events = sum(path.read_bytes().count(b"\n") - 1 for path in journals)
        before, after = measure(other, journals, cell), measure(ROOT, journals, cell)
        against = commit_of(other)
    report = {
        "benchmark": "instructions", "against": against, "events": events, "journals": list(JOURNALS),
        "cell": cell,
        "before": before, "after": after,
        "ratio": {name: round(after[name] / before[name], 4) for name in after},
        "provenance": recording.provenance(),
    }  # fmt: skip
    print(json.dumps(report["ratio"]))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
