"""Runs the tests that take longer than CI should, and records that they passed: ``make test-long``.

python -m tools.long_tests [--out docs/results/test_long.json] [pytest's arguments]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from manylora_lab.bench.provenance import Provenance, add_flags


def main() -> int:
    """pytest's exit code; the record is written where all passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="the record to write")
    add_flags(parser)
    args, more = parser.parse_known_args()
    recording, began = Provenance.of(args, "each test's own"), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "long", f"--junitxml={report}", *more]
        code = subprocess.run(command).returncode
        if code or args.out is None:
            return code
        suite = ElementTree.parse(report).getroot().find("testsuite")
        assert suite is not None, "pytest wrote what it ran"
        names = [case.get("classname", "") for case in suite.iter("testcase")]
    record = {
        "what": "tests marked long, all passed", "passed": len(names),
        "modules": {name: names.count(name) for name in sorted(set(names))},
        "seconds": round(time.monotonic() - began, 1), "provenance": recording.provenance(),
    }  # fmt: skip
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
