"""Everything an H200's records are made of, in parts that fit into ten minutes each.

    python -m manylora_lab.benchmarks.h200_all PART... --out DIR [--commit ID]

A part is a few commands, one after the other; each writes its record into DIR, and what it said goes into
``DIR/log.txt``. A command that fails or is late does not stop the others; then the exit code is 1.
docs/performance.md says what each record shows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from manylora_lab.bench.provenance import ROOT, commit_of

_TAIL = 1500
_MINUTES = 9.5
"""The minutes for a part. What would begin later is left out."""
PARTS: dict[str, tuple[str, ...]] = {
    "tests": (
        "pytest -q -m gpu tests/executor tests/kernels tests/gpu -n 8 --dist loadfile"
        " --deselect tests/gpu/test_graphs.py",
        "pytest -q -m gpu tests/gpu/test_graphs.py",
    ),
    "steps": (
        ".h200_steps --out {out}/steps.json --commit {commit}",
        ".h200_steps --parts copies --numbers-by-engine --out {out}/steps_engine.json --commit {commit}",
        ".h200_trace --out {out}/trace.json --commit {commit}",
    ),
    "aims": (
        ".h200_aims --parts prefill,offline,first --out {out}/aims.json --commit {commit}",
        ".h200_aims --parts chat,http --rates 2 --out {out}/aims_http.json --commit {commit}",
    ),
    "chat": (
        ".h200_aims --parts chat --rates 10,20 --out {out}/chat.json --commit {commit}",
        ".h200_aims --parts conformance --out {out}/conformance.json --commit {commit}",
    ),
    "reality": (
        ".simulator_reality --device cuda --rates 10,20 --out {out}/reality.json --commit {commit}"
        " --time-budget 300",
    ),
    "reality-slow": (
        ".simulator_reality --device cuda --rates 2 --out {out}/reality_2.json --commit {commit}"
        " --time-budget 250",
    ),
    "kernels": (
        "manylora.cli bench kernels --device cuda --shape llama-2-7b --budget 90 --out {out}/kernels",
    ),
}


def run_part(commands: tuple[str, ...], out: Path, commit: str) -> bool:
    """Whether all went well."""
    ends = time.monotonic() + 60 * _MINUTES
    is_well = True
    for command in commands:
        left_s = ends - time.monotonic()
        if left_s <= 0:
            print(f"left out: {command}")
            is_well = False
            continue
        began = time.monotonic()
        module, *rest = command.format(out=out, commit=commit).split()
        module = f"{__package__}{module}" if module.startswith(".") else module
        arguments = [sys.executable, "-m", module, *rest]
        with (out / "log.txt").open("a") as log:
            log.write(f"== {command}\n")
            log.flush()
            where = log.tell()
            try:
                code = subprocess.run(
                    arguments, stdout=log, stderr=subprocess.STDOUT, timeout=left_s
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
        said = (out / "log.txt").read_bytes()[where:].decode(errors="replace")
        print(f"== {command}: {code} after {time.monotonic() - began:.0f} s\n{said[-_TAIL:]}", flush=True)
        is_well &= code == 0
    return is_well


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--commit", default=commit_of(ROOT), help="of the code that runs, noted in the reports"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    # All parts, whatever came of the first.
    results = [run_part(PARTS[part], args.out, args.commit) for part in args.parts]
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
