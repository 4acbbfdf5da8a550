"""Finished cells in a file, a line each, so that a run that was stopped goes on where it was.

Owns the file's form and what counts as the same code: a cell is found again only where the policy of today decides
as the one that ran it, and workload, costs and pools are the same. Does not know which cells a table needs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

from manylora.config.declaring import ConfigError
from manylora_lab.reproduce.cells import (
    REFERENCE,
    Cell,
    CellResult,
    cell_adapter_pages,
    cell_config,
    cell_costs,
    cell_replay,
    cell_stream,
)
from manylora_lab.sim.limits import reference
from manylora_lab.sim.summary import summarize

FORMAT = "manylora-cells-1"
_SMALL_RATE, _SMALL_S = 3.0, 30.0
_SMALL_ADAPTERS = 12
_SMALL_ADAPTER_SHARE = 0.4
_COUNTS = ("preemptions", "adapter_reads", "prefetches", "pages_in", "pages_out", "history_drops")


class CellStore:
    """Cells by their settings. Any number of processes may add to one file; ``refresh`` reads what others added.

    A line is an object: ``format``, ``code`` (see ``code_of``), ``cell`` (its settings), ``seconds`` of a core,
    and ``result``; or ``gave_up_ms``, where the run was given up since its mean TTFT had to exceed that.
    """

    def __init__(self, path: Path) -> None:
        """Reads the file, which need not exist yet. Raises ConfigError for lines that are none of ours."""
        self.path = path
        self.num_of_other_code = 0
        """The number of lines from other code or other settings than today's, which no cell finds."""
        self._results: dict[Cell, CellResult] = {}
        self._given_up: dict[Cell, float] = {}
        self._seconds: dict[Cell, float] = {}
        self._read_to = 0
        self._num_lines = 0
        self.refresh()

    def refresh(self) -> None:
        """Read what was added since. A last line without an end is left for later: a process still writes it."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read_to)
                added = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"the store {self.path} cannot be read: {error.strerror}") from None
        whole = added[: added.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in whole.splitlines():
            self._num_lines += 1
            if line.strip():
                self._take(line)

    def find(self, cell: Cell) -> CellResult | None:
        """What came of the cell, if it was run to its end."""
        return self._results.get(cell)

    def seconds(self, cell: Cell) -> float:
        """The seconds of one core that a cell took, 0.0 where its result is not there."""
        return self._seconds.get(cell, 0.0)

    def borne(self, cell: Cell, limit_ms: float) -> dict[float, bool]:
        """Of the rates at which the cell was run, otherwise the same: whether its mean TTFT stayed below."""
        found = {
            other.rate: result["ttft_mean_ms"] < limit_ms
            for other, result in self._results.items()
            if dataclasses.replace(other, rate=cell.rate) == cell
        }
        for other, beyond_ms in self._given_up.items():
            if dataclasses.replace(other, rate=cell.rate) == cell and beyond_ms >= limit_ms:
                found.setdefault(other.rate, False)
        return found

    def add(self, cell: Cell, result: CellResult, seconds: float, most_ttft_ms: float | None = None) -> None:
        """Remember the cell, here and in the file; one given up had to exceed ``most_ttft_ms``."""
        line: dict[str, Any] = {
            "format": FORMAT, "code": code_of(cell), "cell": dataclasses.asdict(cell),
            "seconds": round(seconds, 2),
        }  # fmt: skip
        if math.isinf(result["ttft_mean_ms"]):
            line["gave_up_ms"] = most_ttft_ms
        else:
            line["result"] = result
        self._append((json.dumps(line) + "\n").encode())
        self.refresh()

    def _append(self, line: bytes) -> None:
        """Append the line in one write, so that lines of several processes do not mix."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(handle).st_size
                if size and os.pread(handle, 1, size - 1) != b"\n":
                    line = b"\n" + line  # a process was killed while it wrote
                os.write(handle, line)
            finally:
                os.close(handle)
        except OSError as error:
            raise ConfigError(f"the store {self.path} cannot be written: {error.strerror}") from None

    def _take(self, line: bytes) -> None:
        try:
            values = json.loads(line)
        except ValueError:
            return  # half a line of a process that was killed
        where = f"line {self._num_lines} of the store {self.path}"
        try:
            if values["format"] != FORMAT:
                raise ConfigError(f"{where} has the format {values['format']!r}, not {FORMAT!r}")
            cell = Cell(**values["cell"])
            is_same = values["code"] == code_of(cell)
            seconds = float(values["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{where} is not a cell: {error}") from None
        if not is_same:
            self.num_of_other_code += 1
        elif "result" in values:
            self._results[cell] = values["result"]
            self._seconds[cell] = seconds
        else:
            self._given_up[cell] = max(values["gave_up_ms"], self._given_up.get(cell, 0.0))


# ---------------------------------------------------------------- what counts as the same code


def code_of(cell: Cell) -> str:
    """The same for cells whose results can be compared, and as long as they can: a digest of the engine's
    settings, of the workload's beginning, and of what a small replay under the cell's policy and costs decides.
    Code that only became faster keeps it."""
    config = cell_config(cell)
    settings = (
        config.num_pages, config.num_host_pages, config.page_tokens, config.page_bytes, config.max_model_len,
        config.max_num_seqs, config.max_batch_tokens,
    )  # fmt: skip
    begun = dataclasses.replace(
        cell, policy="", rate=_SMALL_RATE, duration_s=_SMALL_S, model="", cards=1, hardware="", pool_like=None
    )
    alike = dataclasses.replace(
        cell, scenario="chatbot", rate=_SMALL_RATE, num_adapters=_SMALL_ADAPTERS, duration_s=_SMALL_S, seed=0,
        popularity=None, arrivals=None, sample_s=0.0,
    )  # fmt: skip
    return _digest((FORMAT, settings, _workload_code(begun), _decisions_code(alike)))


@functools.cache
def _workload_code(cell: Cell) -> str:
    stream = cell_stream(cell)
    said = [
        (round(1e6 * r.arrival_s), r.adapter, r.conversation, r.turn, r.new_tokens, r.output_tokens)
        for r in stream.requests
    ]
    return _digest((stream.ranks, said))


@functools.cache
def _decisions_code(cell: Cell) -> str:
    return _digest(decisions(cell))


def decisions(cell: Cell) -> tuple[list[tuple[int, ...]], dict[str, float]]:
    """Of the cell with little memory on device and host: its requests' cached tokens and moments in microseconds,
    and what went in and out."""
    stream, config = cell_stream(cell), cell_config(cell)
    pages = cell_adapter_pages(cell, stream)
    if cell.policy == REFERENCE:
        replay = reference(stream, config, cell_costs(cell), pages)
    else:
        scarce = dataclasses.replace(
            config,
            num_pages=3 * config.max_model_len // cell.page_tokens + sum(pages),
            num_host_pages=config.max_model_len // cell.page_tokens + sum(pages),
            cache=dataclasses.replace(config.cache, adapter_share=_SMALL_ADAPTER_SHARE),
        )
        replay = cell_replay(cell, config=scarce)
        replay.run()
    moments = [
        (
            o.num_cached,
            *(round(1e6 * s) for s in (o.handed_s, o.queue_s, o.adapter_s, o.kv_s, o.first_s, o.end_s)),
        )
        for o in replay.outcomes
    ]
    summary = summarize(replay)
    return moments, {name: summary[name] for name in _COUNTS}


def _digest(values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:12]
