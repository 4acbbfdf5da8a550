"""Compares what every experiment reports with the reports stored before the house was cut to half its size.

    python -m tools.golden [--scale quick] [NAME ...]

Exit code 1 where a report differs. Of simulated rows every value counts; of measured ones, and of their headlines,
the names alone. Reports are in tests/golden; what was removed on purpose is in ``GONE``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from manylora_lab.reproduce.registry import EXPERIMENTS

FOLDER = Path(__file__).parents[1] / "tests" / "golden"
SCALES = ("smoke", "quick")
MEASURED = {"fastlibra-overhead", "dlora-fig5", "dlora-fig15"} | {
    name for name, experiment in EXPERIMENTS.items() if experiment.devices[0] != "sim"
}
"""Experiments that time real work."""
TIMES = ("decision_", "wall", "cpu_s", "solve", "seconds", "router_s")
"""Beginnings of fields that hold real time in simulated rows."""
GONE = {"cold-start-map"}
GONE_SYSTEMS = {"auto"}
"""Rows of CaraServe's experiments in which the CPU could be chosen."""
GONE_FIELDS = {("cpu", "expected_still_s")}
"""By system: what was forecast of the CPU."""
GONE_COLUMNS = {"steps_mixed"}
"""Of rows. (merge-h200 was stored anew when mixed steps went: simulated policies had reckoned with their seconds,
which an engine measured only where it ran them.)"""


def staying(report: dict[str, Any]) -> dict[str, Any]:
    """A reduced report without what was removed on purpose."""
    if not isinstance(report["rows"], list):
        return {**report, "columns": [name for name in report["columns"] if name not in GONE_COLUMNS]}
    rows = [row for row in report["rows"] if row.get("system") not in GONE_SYSTEMS]
    rows = [{k: v for k, v in row.items() if (row.get("system"), k) not in GONE_FIELDS} for row in rows]
    rows = [{k: v for k, v in row.items() if k not in GONE_COLUMNS} for row in rows]
    return {**report, "rows": rows}


def reduced(name: str, report: dict[str, Any]) -> dict[str, Any]:
    """Of a report what must stay."""
    rows, headline = report["rows"], report["headline"]
    if name in MEASURED:
        return {"columns": sorted({key for row in rows for key in row}), "rows": len(rows),
                "headline": [one["metric"] for one in headline]}  # fmt: skip
    kept = [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]
    figures = [[one["metric"], None if "us a decision" in one["metric"] else one["ours"]] for one in headline]
    return {"rows": kept, "headline": figures}


def run(name: str, scale: str) -> dict[str, Any]:
    """The reduced report of a fresh run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "manylora", "reproduce", name, f"--{scale}", "--out", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        (path,) = Path(folder).glob(f"{name}*.json")
        return reduced(name, json.loads(path.read_text()))


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scale", choices=SCALES, default="smoke")
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    stored = json.loads(gzip.decompress((FOLDER / f"{args.scale}.json.gz").read_bytes()))
    differing = 0
    for name in args.names or [name for name in stored if name not in GONE]:
        found, wanted = staying(run(name, args.scale)), staying(stored[name])
        if found == wanted:
            print(f"{name}: equal", flush=True)
            continue
        differing += 1
        wrong = [key for key in found if found[key] != wanted.get(key)]
        print(f"{name}: differs in {', '.join(wrong)}", flush=True)
        for key in wrong:
            pairs = zip(found[key], wanted.get(key, ()))
            if isinstance(found[key], list) and (pair := next((p for p in pairs if p[0] != p[1]), None)):
                print(f"  {pair[0]}\n  was {pair[1]}")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
