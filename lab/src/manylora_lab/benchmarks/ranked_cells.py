"""One engine of one or several ranks, its decoding steps and its requests at once, in a process of its own.

A cell is a shape with dummy weights, a number of ranks, how adapters are cut, and whether steps are captured. Rows
are written as they are there, so that a cell which is ended loses none. Run by ``h200_ranks``, which ends what
stands still.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from manylora.protocol.commands import SequenceStart
from manylora.types import BASE, AdapterId, RankTraffic
from manylora_lab.benchmarks.engine_rig import EngineRig
from manylora_lab.benchmarks.offline_runs import offline_rows, run_offline, warmed
from manylora_lab.benchmarks.run_report import Row
from manylora_lab.benchmarks.step_rig import StepRig

MIXES = ("base", "identical", "distinct")
NUM_ADAPTERS, TOY_ADAPTERS = 64, 4
BATCHES, TOY_BATCHES = (64, 32, 128, 1), (4,)
"""Of decoding steps, the most important first."""
CONTEXT, TOY_CONTEXT = 256, 40
OFFLINE, TOY_OFFLINE = {32: 128, 128: 256}, {4: 16}
"""How many requests there are, by how many run at a time."""
SIZES: Mapping[str, Any] = {"device_pool": "56GiB", "host_pool": 0}
"""The pool is of all ranks together, and the same for one: it holds every mix's adapters and KV."""
STEPS_S, OFFLINE_S = 3.0, 20.0
"""What a row may take; a toy's takes a tenth."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankedCell:
    """``sharding``: empty with one rank. ``graphs``: as ``--cuda-graphs``. ``ranks_of_adapters``: the first is
    measured in all parts, others in steps alone."""

    shape: str
    count: int
    sharding: str
    graphs: str
    ranks_of_adapters: tuple[int, ...] = (16,)

    @property
    def name(self) -> str:
        cut = f" {self.sharding}" if self.sharding else ""
        return f"{self.shape} x{self.count}{cut}{' eager' if self.graphs == 'off' else ''}"

    def eager(self) -> RankedCell:
        """The same without captures."""
        return RankedCell(self.shape, self.count, self.sharding, "off", self.ranks_of_adapters[:1])

    def settings(self) -> Row:
        found: Row = {"tensor_parallel_size": self.count, "cuda_graphs": self.graphs}
        if self.sharding:
            found["lora_sharding"] = self.sharding
        return {**found, "max_adapter_rank": max(self.ranks_of_adapters)}


class CellRun:
    """The parts of a cell, on its engine. ``ends_s``: on ``time.monotonic``, when it must have ended."""

    def __init__(self, rig: EngineRig, rows: Path, ends_s: float, num_steps: int) -> None:
        self.rig, self._rows, self._ends_s, self._num_steps = rig, rows, ends_s, num_steps
        self.num_adapters = TOY_ADAPTERS if rig.is_toy else NUM_ADAPTERS

    def note(self, part: str, row: Row) -> None:
        """To the file, at once."""
        rounded = {
            name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()
        }
        with self._rows.open("a") as file:
            file.write(json.dumps([part, rounded]) + "\n")

    def has(self, seconds: float, what: str) -> bool:
        """Whether so much time is left; else it is noted."""
        is_left = time.monotonic() + (seconds / 10 if self.rig.is_toy else seconds) < self._ends_s
        if not is_left:
            self.note("left_out", {"what": what})
        return is_left

    def start(self) -> None:
        """What it took to be ready, and what each rank holds."""
        held = [
            {"weight_bytes": one.weight_bytes, "page_bytes": one.page_bytes} for one in self.rig.info.ranks
        ]
        row: Row = {"start_s": self.rig.build_s, "num_pages": self.rig.policy.num_pages, "ranks_hold": held}
        if not held and self.rig.worker._graphs is not None:
            row["captured"] = len(self.rig.worker._graphs.captured)
        self.note("starts", row)

    # ------------------------------------------------------------ steps

    def steps(self, rank: int, mixes: tuple[str, ...]) -> None:
        """Decoding steps of each batch and mix, two in flight, and what they exchange."""
        adapters = self.rig.adapters(f"rank-{rank}", (rank,), self.num_adapters)
        rig = StepRig(self.rig.executor, self.rig.policy.num_pages)
        pages = len(rig._free)
        load_s = rig.load(adapters.values())
        each = (pages - len(rig._free)) / len(adapters)
        self.note("adapters", {"rank": rank, "adapters": len(adapters), "load_s": load_s, "pages_each": each})
        is_toy = self.rig.is_toy
        for batch in TOY_BATCHES if is_toy else BATCHES:
            for mix in mixes:
                if not self.has(STEPS_S, f"steps of {batch} {mix} rank {rank}"):
                    continue
                context = TOY_CONTEXT if is_toy else CONTEXT
                starts = list(self._starts(rig, context, batch, mix))
                before = rig.direct.state().traffic
                found = rig.decode_ms(starts, self._num_steps, 2)
                passed = exchanged(before, rig.direct.state().traffic, self._num_steps)
                row: Row = {"batch": batch, "mix": mix, "adapter_rank": 0 if mix == "base" else rank}
                row |= {"num_adapters": len({start.adapter for start in starts} - {BASE})}
                self.note("steps", {**row, "context": context + self._num_steps / 2, **found, **passed})
        rig.forget(len(adapters))

    def _starts(self, rig: StepRig, context: int, batch: int, mix: str) -> Iterator[SequenceStart]:
        for number, start in enumerate(rig.sequences([(context, 1)] * batch, False, room=self._num_steps)):
            yield dataclasses.replace(start, adapter=self._adapter(mix, number))

    def _adapter(self, mix: str, number: int) -> AdapterId:
        return {"base": BASE, "identical": 1}.get(mix, 1 + number % self.num_adapters)

    # ------------------------------------------------------------ requests

    async def offline(self, rank: int) -> None:
        """Many requests given at once, of each mix."""
        adapters = self.rig.adapters(f"rank-{rank}", (rank,), self.num_adapters)
        for num_seqs, num_requests in (TOY_OFFLINE if self.rig.is_toy else OFFLINE).items():
            for mix in MIXES:
                if not self.has(OFFLINE_S, f"offline of {num_seqs} {mix}"):
                    continue
                rows = offline_rows(self.rig)[:num_requests]
                named = [self._adapter(mix, number) for number in range(len(rows))]
                chosen = [None if adapter == BASE else adapter - 1 for adapter in named]
                target = self.rig.open(adapters, max_num_seqs=num_seqs)
                errors = await warmed(self.rig, target, [*dict.fromkeys(chosen), None])
                before = (await asyncio.wrap_future(target.driver.stats())).traffic
                found = await run_offline(self.rig, target, rows, chosen)
                after = (await asyncio.wrap_future(target.driver.stats())).traffic
                await target.close()
                row: Row = {"max_num_seqs": num_seqs, "requests": len(rows), "mix": mix}
                row |= {**found, **exchanged(before, after, found["steps"] or 1)}
                self.note("offline", {**row, "errors": errors + found["errors"]})


def exchanged(before: tuple[RankTraffic, ...], after: tuple[RankTraffic, ...], num_steps: float) -> Row:
    """By kind, exchanges a step and bytes that a rank puts into them; the ranks' are equal."""
    if not after:
        return {}
    passed = [now - then for now, then in zip(after[0], before[0], strict=True)]
    every = [tuple(now - then for now, then in zip(*pair)) for pair in zip(after, before)]
    per_step = {name: value / num_steps for name, value in zip(RankTraffic._fields, passed) if value}
    return {"exchanged": per_step, "ranks_alike": len(set(every)) == 1}


def run_cell(
    cell: RankedCell, is_toy: bool, parts: list[str], rows: Path, ends_s: float, num_steps: int
) -> None:
    """All of it, the more important part first."""
    first, *others = cell.ranks_of_adapters
    with EngineRig.of(cell.shape, is_toy, SIZES, **cell.settings()) as rig:
        run = CellRun(rig, rows, ends_s, num_steps)
        run.start()
        if "steps" in parts:
            run.steps(first, MIXES)
        if "offline" in parts:
            asyncio.run(run.offline(first))
        for rank in others if "steps" in parts else []:
            run.steps(rank, ("distinct",))


def main() -> None:
    """The process of a cell: what it is to do is its one argument."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    given = json.loads(sys.argv[1])
    cell = RankedCell(**{**given["cell"], "ranks_of_adapters": tuple(given["cell"]["ranks_of_adapters"])})
    rows, num_steps = Path(given["rows"]), given["num_steps"]
    run_cell(cell, given["is_toy"], given["parts"], rows, given["ends_s"], num_steps)


if __name__ == "__main__":
    main()
