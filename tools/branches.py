"""Which branches of the policy no test takes, against the file of those that are known and why.

    python -m tools.branches [--write]

Runs the policy's tests and the recorded lives with branch coverage. Exit code 1 where a branch is missed that
``tests/policy/untaken.txt`` does not name, and where one that it names is taken. ``--write`` adds what
is missing, without a reason, for a person to give one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "manylora" / "policy"
KNOWN = ROOT / "tests" / "policy" / "untaken.txt"
TESTS = ("tests/policy", "tests/routing", "tests/proof/test_journals.py")
END = "its end"
"""Of a function: where a branch leads that leaves it."""


def measure() -> dict[str, Any]:
    """coverage's report, in JSON."""
    with tempfile.TemporaryDirectory() as folder:
        data, report = Path(folder) / "data", Path(folder) / "report.json"
        coverage = [sys.executable, "-m", "coverage"]
        env = {**os.environ, "COVERAGE_FILE": str(data)}
        run = [
            *coverage,
            "run",
            "--branch",
            f"--source={SOURCE}",
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:xdist",
            "--timeout=0",  # a traced test takes three times as long, on a busy machine longer than any bound
            "--hypothesis-seed=0",  # so that each run takes the same branches
            *TESTS,
        ]
        subprocess.run(run, cwd=ROOT, env=env, check=True)
        subprocess.run([*coverage, "json", "-q", "-o", str(report)], cwd=ROOT, env=env, check=True)
        found: dict[str, Any] = json.loads(report.read_text())
        return found


def untaken(report: dict[str, Any]) -> set[str]:
    """Branches that no test takes, and lines that none reaches: "file: the line -> where it would have gone".

    By the lines' text, which stays where numbers move.
    """
    found = set()
    for name, file in report["files"].items():
        path = ROOT / name
        lines = [line.strip() for line in path.read_text().splitlines()]
        where = path.relative_to(SOURCE)
        for start, end in file["missing_branches"]:
            target = lines[end - 1] if end > 0 else END
            found.add(f"{where}: {lines[start - 1]} -> {target}")
        found |= {f"{where}: {lines[number - 1]}" for number in file["missing_lines"]}
    return found


def known() -> dict[str, str]:
    """Reasons by branch. A branch is a line of the file; the indented lines below it are its reason."""
    found: dict[str, str] = {}
    branch = ""
    for line in KNOWN.read_text().splitlines() if KNOWN.exists() else ():
        if line.startswith("    "):
            found[branch] = f"{found[branch]} {line.strip()}".strip()
        elif line and not line.startswith("#"):
            branch = line
            found[branch] = ""
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="add what is missed to the file")
    args = parser.parse_args(argv)
    report = measure()
    missed, reasons = untaken(report), known()
    new, gone = sorted(missed - set(reasons)), sorted(set(reasons) - missed)
    if args.write:
        with KNOWN.open("a") as file:
            file.writelines(f"{branch}\n" for branch in new)
    for branch in new:
        print(f"not taken by any test: {branch}")
    for branch in gone:
        print(f"taken, though {KNOWN.name} names it: {branch}")
    for branch in sorted(branch for branch, reason in reasons.items() if not reason):
        print(f"without a reason in {KNOWN.name}: {branch}")
    print(f"{report['totals']['percent_covered']:.2f} % of lines and branches; {len(missed)} not taken")
    return int(bool(new or gone or "" in reasons.values()))


if __name__ == "__main__":
    raise SystemExit(main())
