"""Cases checked, timed and held against their floors, as rows of a report and as lines that are printed."""

from __future__ import annotations

import concurrent.futures
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from manylora_lab.bench.kernels.rig import Errors, KernelCase, KernelRig
from manylora_lab.bench.kernels.settings import KernelSettings
from manylora_lab.bench.kernels.timing import Step, ceilings, device_name, medians
from manylora_lab.bench.provenance import Provenance

Row = dict[str, Any]
C = TypeVar("C")
SEED = 0
"""The seed of inputs, weights and pages."""
MOST_COMPILERS = 14


class Bench:
    """What was measured so far: ``rows``, what was wrong, and what was left out.

    ``repeats``: of which a time is the median; 0: cases are checked alone. The budget counts from ``began``."""

    def __init__(self, rig: KernelRig, settings: KernelSettings, repeats: int, began: float) -> None:
        self.rig = rig
        self.repeats = repeats
        self.rows: list[Row] = []
        self.mistakes: list[str] = []
        self.left_out: list[str] = []
        self._settings = settings
        self._began = began
        self._recording = Provenance(SEED)
        self._bytes_per_s = self._flops = math.inf
        torch.manual_seed(SEED)
        if self.is_timed:
            show("ceilings")
            is_small = settings.is_quick and not rig.is_cuda
            self._bytes_per_s, self._flops = ceilings(rig.device, rig.dtype, repeats, is_small)

    @property
    def is_timed(self) -> bool:
        return self.repeats > 0

    @property
    def is_small(self) -> bool:
        """Whether cases are to be few and small."""
        return self._settings.is_quick or self.rig.is_interpreted

    @property
    def is_spent(self) -> bool:
        return time.monotonic() - self._began > self._settings.budget_s

    # ---- measuring -------------------------------------------------------------------------------------

    def measure(self, group: Sequence[KernelCase]) -> None:
        """Cases that take turns. Raises what they raise."""
        show(group[0].title)
        found = [case.check() for case in group]
        seconds = self._seconds(group) if self.is_timed else [None] * len(group)
        for case, error, one in zip(group, found, seconds, strict=True):
            self._note(case, error, one)
            if not error.is_right:
                self._note_mistake(case, error)

    def candidates(self, cases: Mapping[C, KernelCase]) -> dict[C, float]:
        """The seconds of several ways to compute the same, in turn, but for those that cannot run or are wrong."""
        if self.is_spent or not cases:
            self.left_out += [case.title for case in cases.values()]
            return {}
        show(next(iter(cases.values())).title)
        self._compile([case for way, case in cases.items() if not isinstance(way, str)])
        right: dict[C, tuple[KernelCase, Errors]] = {}
        for way, case in cases.items():
            try:
                error = case.check()
            except Exception as failure:
                # Such as sizes that do not fit a multiprocessor.
                self.left_out.append(f"{case.title}: {first_line(failure)}")
                continue
            if error.is_right:
                right[way] = case, error
            else:
                self._note_mistake(case, error)
        times = self._seconds([case for case, _ in right.values()])
        for (case, error), seconds in zip(right.values(), times, strict=True):
            self._note(case, error, seconds)
        return dict(zip(right, times, strict=True))

    def _compile(self, cases: Sequence[KernelCase]) -> None:
        """Run each once, side by side, so that compilers do not wait for each other."""
        if not self.rig.is_cuda:
            return  # the interpreter compiles nothing

        def run(case: KernelCase) -> None:
            try:
                with torch.inference_mode():
                    case.step()
            except Exception:
                return  # it fails again where it is checked

        workers = max(1, min(MOST_COMPILERS, (os.cpu_count() or 2) - 2))
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            list(pool.map(run, cases))

    def _seconds(self, group: Sequence[KernelCase]) -> list[float]:
        """The seconds of one call of each. All that can be captured take turns, each base once."""
        captured = [case for case in group if case.is_captured]
        bases: list[Step] = list(dict.fromkeys(case.base for case in captured if case.base is not None))
        steps = [*(case.step for case in captured), *bases]
        times = dict(zip(map(id, steps), medians(self.rig.device, steps, self.repeats), strict=True))
        seconds = []
        for case in group:
            whole = times[id(case.step)] if case.is_captured else self._waited(case)
            without = 0.0 if case.base is None else times[id(case.base)]
            seconds.append((whole - without) / case.calls)
        return seconds

    def _waited(self, case: KernelCase) -> float:
        """The seconds of a step that the host takes part in."""
        module = torch.get_device_module(self.rig.device)
        samples = []
        for _ in range(self.repeats + 1):
            began = time.perf_counter()
            case.step()
            module.synchronize()
            samples.append(time.perf_counter() - began)
        return statistics.median(samples[1:])

    def _note(self, case: KernelCase, error: Errors, seconds: float | None) -> None:
        bytes_s, flop_s = case.num_bytes / self._bytes_per_s, case.flop / self._flops
        row: Row = {
            "kernel": case.kernel, **case.setting,
            "error": _finite(error.relative), "of_bound": _finite(error.of_bound),
            "is_right": error.is_right,
            "bytes": case.num_bytes, "flop": case.flop,
            "us": None, "floor_us": None, "bound": None, "ratio": None,
        }  # fmt: skip
        if seconds is not None:
            floor = max(bytes_s, flop_s)
            row["us"], row["floor_us"] = seconds * 1e6, floor * 1e6
            row["bound"] = "bytes" if bytes_s >= flop_s else "operations"
            row["ratio"] = seconds / floor if seconds > 0 else None
        self.rows.append(row)
        print(_line(case, error, row), flush=True)

    def _note_mistake(self, case: KernelCase, error: Errors) -> None:
        self.mistakes.append(
            f"{case.title}: not what the torch reference gives: an element is off by {error.of_bound:.2g} "
            f"times what rounding allows, the whole by {error.relative:.1e}"
        )

    # ---- telling ---------------------------------------------------------------------------------------

    def heading(self, note: str) -> str:
        """What stands above the lines."""
        rig = self.rig
        said = f"{device_name(rig.device)}, {rig.ops.name} kernels, {self._dtype}, {rig.shape.name}"
        if self.is_timed:
            said += f"; {self._bytes_per_s / 1e9:.4g} GB/s, {self._flops / 1e9:.4g} GFLOP/s"
        return f"{said}\n{note}\n{'':<66}{'error':>9}{'of bound':>9}{'us':>11}{'floor':>10}{'ratio':>8}"

    def document(self, notes: Sequence[str]) -> dict[str, Any]:
        """The report."""
        rig, timed = self.rig, self.is_timed
        return {
            "machine": device_name(rig.device), "device": rig.device.type, "torch": torch.__version__,
            "kernels": rig.ops.name, "dtype": self._dtype, "shape": rig.shape.name,
            "is_quick": self._settings.is_quick, "is_interpreted": rig.is_interpreted, "layers_a_call": rig.layers,
            "bytes_per_s": self._bytes_per_s if timed else None, "flops": self._flops if timed else None,
            "seconds": round(time.monotonic() - self._began, 1), "mistakes": self.mistakes,
            "left_out": self.left_out, "notes": notes, "rows": self.rows,
            "provenance": self._recording.provenance(),
        }  # fmt: skip

    @property
    def _dtype(self) -> str:
        return str(self.rig.dtype).removeprefix("torch.")


def _line(case: KernelCase, error: Errors, row: Row) -> str:
    mark = "" if row["is_right"] else "  WRONG"
    line = f"{case.title:<66}{error.relative:>9.1e}{error.of_bound:>9.2f}"
    if row["us"] is None:
        return line + mark
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.1f}"
    return f"{line}{row['us']:>11.2f}{row['floor_us']:>10.2f}{ratio:>8}{mark}"


def _finite(error: float) -> float | None:
    """JSON has no infinity."""
    return error if math.isfinite(error) else None


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


def show(line: str) -> None:
    """What runs now, on stderr where that is a terminal; elsewhere the table is progress enough."""
    if sys.stderr.isatty():
        print(f"{line:<100}", end="\r", file=sys.stderr, flush=True)
