"""Runs the tests that take longer than CI should, and records that they passed: ``make test-long``.

python -m tools.long_tests [--out docs/results/test_long.json [--more]] [pytest's arguments]

``--more`` adds a run to those of the record: together they may be all tests, each in one of them. The record names
what no run of it has.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from manylora_lab.bench.provenance import Provenance, add_flags

LONG = [sys.executable, "-m", "pytest", "-m", "long"]
Counts = collections.Counter[str]
"""Tests by file."""


def main() -> int:
    """pytest's exit code; the record is written where all passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="the record to write")
    parser.add_argument("--more", action="store_true", help="as one more run of the record that is there")
    add_flags(parser)
    args, more = parser.parse_known_args()
    recording, began_s = Provenance.of(args, "each test's own"), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        code = subprocess.run([*LONG, f"--junitxml={report}", *more]).returncode
        if code or args.out is None:
            return code
        passed, skipped = counts_of(ElementTree.parse(report))
    run = {
        "passed": passed.total(), "skipped": skipped.total(), "seconds": round(time.monotonic() - began_s, 1),
        "files": dict(sorted(passed.items())),
    }  # fmt: skip
    there = json.loads(args.out.read_text()) if args.more else {"runs": [], "provenance": []}
    runs = [*there["runs"], run]
    entries = [*there["provenance"], *recording.provenance(f"runs/{len(runs) - 1}")]
    record = {
        "what": "tests marked long, all passed; skipped: those that ask for a GPU", "runs": runs,
        "not_run": not_run(listed(), runs), "provenance": entries,
    }  # fmt: skip
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def counts_of(report: ElementTree.ElementTree[Any]) -> tuple[Counts, Counts]:
    """Tests that passed and that were skipped, of pytest's report."""
    passed, skipped = Counts(), Counts()
    for case in report.iter("testcase"):
        module = case.get("classname", "").replace(".", "/")
        (skipped if case.find("skipped") is not None else passed)[module] += 1
    return passed, skipped


def listed() -> str:
    """How many tests each file has, as pytest prints it."""
    return subprocess.run([*LONG, "--collect-only", "-q"], capture_output=True, text=True, check=True).stdout


def not_run(all_tests: str, runs: list[dict[str, Any]]) -> dict[str, int]:
    """Of ``listed`` what no run has, by file; without a GPU also what asks for one."""
    left = Counts()
    for line in all_tests.splitlines():
        name, colon, number = line.rpartition(": ")
        if colon and number.isdigit():
            left[name.removesuffix(".py")] += int(number)
    for run in runs:
        left.subtract(run["files"])
    return {name: number for name, number in sorted(left.items()) if number > 0}


if __name__ == "__main__":
    sys.exit(main())
