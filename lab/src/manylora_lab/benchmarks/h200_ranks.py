"""What further GPUs give and take: exchanges between ranks, decoding steps, and many requests at once.

Dummy weights in bfloat16, contexts of 256 tokens, 64 adapters of rank 16 on all projections. ``exchanges``: how
the GPUs are linked, and what sums take by size, launched and in a CUDA graph. Then, for each shape, an engine of
one rank and of two, or of ``--ranks``. ``steps``: decoding of the base, of one adapter for all rows, and of 64,
beside a floor (a rank's bytes at the measured bandwidth, and its exchanges at their measured times); ``offline``:
requests at once.

Each engine is a process of its own, which is ended when it is late. What failed is in the record as a text, and
the rest goes on; where captures with ranks fail, without them. What engines said is in ``OUT.log``.

    python -m manylora_lab.benchmarks.h200_ranks --time-budget 530 --out ranks.json

Kinds of engines: ``one`` and ``sharded`` for every shape, in the order of ``--shapes``; then ``replicated`` for
every shape; then those without captures for Llama-3-8B, which alone has steps of adapters of rank 64 too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from manylora_lab.bench.dummies import DEMO
from manylora_lab.benchmarks import exchange_runs, ranked_cells
from manylora_lab.benchmarks.ranked_cells import RankedCell
from manylora_lab.benchmarks.run_report import Row, RunReport, run_parser
from manylora_lab.benchmarks.step_rig import step_bytes
from manylora_lab.pricing.shapes import SHAPES, ModelShape

PARTS = ("exchanges", "steps", "offline")
ORDER = ("llama-3-8b", "llama-2-13b", "codellama-34b", "llama-2-70b")
FIRST = ORDER[0]
KINDS = {
    "one": ("", "on"), "sharded": ("sharded", "on"), "replicated": ("replicated", "on"),
    "one-eager": ("", "off"), "sharded-eager": ("sharded", "off"), "replicated-eager": ("replicated", "off"),
}  # fmt: skip
"""How adapters are cut, nothing where there is one rank, and ``--cuda-graphs``."""
ROUNDS = (("one", "sharded"), ("replicated",), ("sharded-eager", "one-eager", "replicated-eager"))
ONE_GPU_BYTES = 100e9
"""The most weights that one rank is asked to hold."""
EXCHANGES_S, CELL_S, LEAST_S, S_PER_GB = 45.0, 200.0, 70.0, 0.4
"""What the exchanges may take, and a cell; and what it takes at least, with what a rank reads."""
SAID = (" captured ", " compiled ", "WARNING", "ERROR")
"""Lines of an engine's log that are put into the record."""
TAIL = 12


def cells_of(shapes: Sequence[str], kinds: Sequence[str], ranks: int) -> Iterator[RankedCell]:
    """The most important first. ``ranks``: of those with several."""
    for chosen in ROUNDS:
        for shape in shapes:
            for kind in chosen:
                sharding, graphs = KINDS[kind]
                count = ranks if sharding else 1
                fits = SHAPES[shape].weight_bytes / count < ONE_GPU_BYTES
                if kind in kinds and fits and (graphs == "on" or shape == FIRST):
                    of_adapters = (16, 64) if graphs == "on" and shape == FIRST else (16,)
                    yield RankedCell(shape, count, sharding, graphs, of_adapters)


class RanksRun:
    """The record, and the engines' processes one after the other."""

    def __init__(self, report: RunReport, parts: Sequence[str], steps: int) -> None:
        self.report, self.parts, self._steps = report, parts, steps
        self._log = report.out.with_name(report.out.name + ".log")
        self._is_toy: bool = report.args.toy

    def exchanges(self) -> None:
        """The link, and exchanges by size."""
        if not self.report.has(EXCHANGES_S, "exchanges"):
            return
        found = exchange_runs.measure(self._is_toy, self.report.args.ranks)
        rows = found.pop("exchanges")
        self.report.values |= found
        for row in rows:
            self.report.note("exchanges", row)

    def cells(self, cells: Sequence[RankedCell]) -> None:
        """All for which there is time; without captures where these fail."""
        waiting = list(cells)
        while waiting:
            cell = waiting.pop(0)
            expected_s = LEAST_S + S_PER_GB * SHAPES[cell.shape].weight_bytes / 1e9 / cell.count
            if not self.report.has(expected_s, cell.name):
                continue
            has_begun = self.cell(cell)
            if not has_begun and cell.count > 1 and cell.graphs == "on":
                waiting = [*dict.fromkeys(one.eager() if one.count > 1 else one for one in (cell, *waiting))]

    def cell(self, cell: RankedCell) -> bool:
        """Its rows into the record; whether there was at least one of its steps or requests."""
        began_s, number = time.monotonic(), 0
        left_s = self.report.left_s()
        limit_s = min(CELL_S, left_s)
        with tempfile.TemporaryDirectory() as scratch, self._log.open("a") as log:
            log.write(f"== {cell.name}\n")
            log.flush()
            said_from, rows = log.tell(), Path(scratch) / "rows"
            rows.touch()
            given = {
                "cell": dataclasses.asdict(cell), "is_toy": self._is_toy, "parts": self.parts, "rows": str(rows),
                "ends_s": began_s + limit_s - 5, "num_steps": self._steps,
            }  # fmt: skip
            process = subprocess.Popen(
                [sys.executable, "-m", ranked_cells.__name__, json.dumps(given)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            try:
                while True:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(0.2)
                    is_over = process.poll() is not None or time.monotonic() > began_s + limit_s
                    lines = rows.read_text().split("\n")[:-1]  # what comes after the last break is not whole
                    for line in lines[number:]:
                        self._note(cell, *json.loads(line))
                    number = len(lines)
                    if is_over:
                        break
            finally:
                code = process.poll()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said = self._log.read_bytes()[said_from:].decode(errors="replace").splitlines()
        self.report.note(
            "said", {"cell": cell.name, "lines": [s for s in said if any(w in s for w in SAID)][:20]}
        )
        if code != 0:
            what = f"ended after {limit_s:.0f} s" if code is None else f"exit code {code}"
            self.report.note("failed", {"what": cell.name, "error": what, "said": said[-TAIL:]})
        names = [json.loads(line)[0] for line in lines]
        return "steps" in names or "offline" in names

    def _note(self, cell: RankedCell, part: str, row: Row) -> None:
        if part == "left_out":
            self.report.values["left_out"].append(f"{cell.name}: {row['what']}")
            return
        head: Row = {
            "shape": cell.shape,
            "ranks": cell.count,
            "sharding": cell.sharding,
            "graphs": cell.graphs,
        }
        known = self.report.values
        if part == "steps" and "bandwidth_bytes_per_s" in known and (cell.count == 1 or "exchanges" in known):
            row |= self._floor(cell, row)
        self.report.note(part, head | row)

    def _floor(self, cell: RankedCell, row: Row) -> Row:
        """Milliseconds: the bytes that a rank must read, each once, and the exchanges counted, by the group's own
        sum of as many bytes."""
        shape = DEMO if self._is_toy else SHAPES[cell.shape]
        num_bytes = step_bytes(shape, row["batch"], row["context"], ()) / cell.count
        num_bytes += row["num_adapters"] * adapter_share(shape, row["adapter_rank"], cell)
        read_ms = 1e3 * num_bytes / self.report.values["bandwidth_bytes_per_s"]
        by_kind = row.get("exchanged", {})
        exchange_ms = 0.0
        for kind in ("base", "lora"):
            if by_kind.get(kind):
                exchange_ms += by_kind[kind] * self._sum_ms(by_kind[f"{kind}_bytes"] / by_kind[kind])
        floor_ms = read_ms + exchange_ms
        return {
            "floor_read_ms": round(read_ms, 4), "floor_exchange_ms": round(exchange_ms, 4),
            "floor_ms": round(floor_ms, 4), "over_floor": round(row["pair_ms"] / floor_ms, 4),
        }  # fmt: skip

    def _sum_ms(self, num_bytes: float) -> float:
        """Of so many bytes: between the sizes measured, and the least one's below them."""
        rows = [row for row in self.report.values["exchanges"] if row["operation"] == "all_reduce"]
        times = [row.get("graph_us", row["eager_us"]) for row in rows]
        return float(np.interp(num_bytes, [row["bytes"] for row in rows], times)) / 1e3


def adapter_share(shape: ModelShape, rank: int, cell: RankedCell) -> float:
    """Bytes of an adapter on all projections that a rank holds."""
    whole = shape.itemsize * shape.layers * rank
    total = 0.0
    for name, (inputs, outputs) in shape.modules.items():
        if cell.sharding != "replicated":
            total += (inputs + outputs) / cell.count
        elif name in ("o_proj", "down_proj"):
            total += inputs / cell.count + outputs
        else:
            total += inputs + outputs / cell.count
    return whole * total


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = run_parser(__doc__, 530.0)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--shapes", nargs="*", default=list(ORDER), choices=ORDER)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="of engines with several")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args(argv)
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {min(unknown)} is none of {', '.join(PARTS)}")
    if args.ranks < 2:
        parser.error("--ranks: 2 or more; engines of one rank are measured beside them")
    report = RunReport(args, "of dummy weights, random adapters and prompts, fixed")
    report.save()
    run = RanksRun(report, parts, args.steps)
    if "exchanges" in parts:
        run.exchanges()
    if {"steps", "offline"} & set(parts):
        run.cells(list(cells_of(args.shapes, args.kinds, args.ranks)))
    report.save()
    print(json.dumps({name: len(value) for name, value in report.values.items() if isinstance(value, list)}))


if __name__ == "__main__":
    main()
