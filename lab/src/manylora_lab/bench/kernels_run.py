"""``manylora bench kernels``: every case checked, timed, held against its floor, printed, written and drawn."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from manylora.config import ConfigError
from manylora_lab.bench import kernels_cases, kernels_lora, kernels_picture, kernels_sampling
from manylora_lab.bench.interleaved import Step, medians, one_thread
from manylora_lab.bench.kernels import ceilings, device_name
from manylora_lab.bench.kernels_rig import Errors, KernelCase, KernelRig
from manylora_lab.bench.kernels_settings import (
    FULL,
    INTERPRETED,
    KERNELS,
    QUICK,
    KernelSettings,
    KernelSizes,
    check_name,
)
from manylora_lab.bench.provenance import Provenance

Row = dict[str, Any]
SEED = 0
"""The seed of inputs, weights and pages."""

_CASES: dict[str, Callable[[KernelRig, KernelSizes], Iterator[list[KernelCase]]]] = {
    "add_rms_norm": kernels_cases.norm_cases,
    "silu_mul": kernels_cases.silu_cases,
    "rotate_and_store": kernels_cases.placing_cases,
    "decode": kernels_cases.decode_cases,
    "prefill": kernels_cases.prefill_cases,
    "linear": kernels_cases.linear_cases,
    "lora": kernels_lora.lora_cases,
    "sampling": kernels_sampling.sampling_cases,
}
_CUDA_NOTES = (
    "Time: the median of captured launches that start with cold caches, divided by the calls in one capture; of "
    "samplers that draw, of a call and the wait for it.",
)
_CPU_NOTES = (
    "Time: the median wall time of one thread of this CPU, with warm caches and Python's own share, beside "
    "whatever else the machine does: how these operations do here, which says nothing of a GPU's. Inputs that "
    "stay in a cache can pass the floor, which is memory's; a difference below the noise can be negative.",
)
_NOTES = (
    "Floor: the larger of the least bytes over a copy's bandwidth and the operations over a large matrix "
    "product's rate, both measured in this run.",
    "lora: all projections of one layer, and the SiLU between; the time of the same without adapters is taken "
    "away. Its bytes are the adapters', each read once.",
    "error: ||out - exact|| / ||exact||; of_bound: the largest error of an element over what rounding may make of "
    "it. For samplers: of probability, by which a draw misses its token.",
)
_UNTIMED_NOTES = ("Triton's interpreter ran: results are checked, times would mean nothing.",)


def run(settings: KernelSettings) -> int:
    """0; 1 where a result was wrong or a kernel failed, which stderr says. Raises ConfigError."""
    for name in settings.only:
        check_name("kernel", name, KERNELS)
    kernels_picture.check_folder(settings.out)
    began = time.monotonic()
    _show("preparing")
    bench = _Bench(KernelRig(settings), settings, began)
    bench.run([name for name in KERNELS if not settings.only or name in settings.only])
    bench.write()
    for line in bench.mistakes:
        print(f"manylora: error: {line}", file=sys.stderr)
    return 1 if bench.mistakes else 0


class _Bench:
    def __init__(self, rig: KernelRig, settings: KernelSettings, began: float) -> None:
        self._rig = rig
        self._settings = settings
        self._sizes = INTERPRETED if rig.is_interpreted else QUICK if settings.is_quick else FULL
        self._rows: list[Row] = []
        self._left_out: list[str] = []
        self._began = began
        self._recording = Provenance(SEED)
        self._is_timed = not rig.is_interpreted
        self._bytes_per_s = self._flops = math.inf
        self.mistakes: list[str] = []

    # ---- measuring -------------------------------------------------------------------------------------

    def run(self, names: Sequence[str]) -> None:
        torch.manual_seed(SEED)
        if self._is_timed:
            _show("ceilings")
            small = self._settings.is_quick and not self._rig.is_cuda
            self._bytes_per_s, self._flops = ceilings(
                self._rig.device, self._rig.dtype, self._sizes.repeats, small
            )
        self._rig.reserve(self._sizes)
        print(self._heading())
        for name in names:
            with torch.inference_mode(), one_thread():
                self._run_kernel(name)

    def _run_kernel(self, name: str) -> None:
        if time.monotonic() - self._began > self._settings.budget_s:
            self._left_out.append(name)
            return
        try:
            for group in _CASES[name](self._rig, self._sizes):
                if time.monotonic() - self._began > self._settings.budget_s:
                    self._left_out.append(f"{group[0].title} and what follows")
                    return
                _show(group[0].title)
                self._measure(group)
        except ConfigError:
            raise
        except Exception as error:
            # The others can still be measured, and what was is kept.
            self.mistakes.append(f"{name} failed: {type(error).__name__}: {error}".split("\n")[0])

    def _measure(self, group: list[KernelCase]) -> None:
        found = [case.check() for case in group]
        seconds = self._seconds(group) if self._is_timed else [None] * len(group)
        for case, error, one in zip(group, found, seconds, strict=True):
            bytes_s, flop_s = case.num_bytes / self._bytes_per_s, case.flop / self._flops
            row: Row = {
                "kernel": case.kernel, **case.setting,
                "error": _finite(error.relative), "of_bound": _finite(error.of_bound),
                "is_right": error.is_right,
                "bytes": case.num_bytes, "flop": case.flop,
                "us": None, "floor_us": None, "bound": None, "ratio": None,
            }  # fmt: skip
            if one is not None:
                floor = max(bytes_s, flop_s)
                row["us"], row["floor_us"] = one * 1e6, floor * 1e6
                row["bound"] = "bytes" if bytes_s >= flop_s else "operations"
                row["ratio"] = one / floor if one > 0 else None
            self._rows.append(row)
            print(_line(case, error, row), flush=True)
            if not error.is_right:
                self.mistakes.append(
                    f"{case.title}: not what the torch reference gives: an element is off by {error.of_bound:.2g} "
                    f"times what rounding allows, the whole by {error.relative:.1e}"
                )

    def _seconds(self, group: list[KernelCase]) -> list[float | None]:
        """The seconds of one call of each. All that can be captured take turns, each base once."""
        captured = [case for case in group if case.is_captured]
        bases: list[Step] = list(dict.fromkeys(case.base for case in captured if case.base is not None))
        steps = [*(case.step for case in captured), *bases]
        times = dict(zip(map(id, steps), medians(self._rig.device, steps, self._sizes.repeats), strict=True))
        seconds: list[float | None] = []
        for case in group:
            whole = times[id(case.step)] if case.is_captured else self._waited(case)
            without = 0.0 if case.base is None else times[id(case.base)]
            seconds.append((whole - without) / case.calls)
        return seconds

    def _waited(self, case: KernelCase) -> float:
        """The seconds of a step that the host takes part in."""
        module = torch.get_device_module(self._rig.device)
        samples = []
        for _ in range(self._sizes.repeats + 1):
            began = time.perf_counter()
            case.step()
            module.synchronize()
            samples.append(time.perf_counter() - began)
        return statistics.median(samples[1:])

    # ---- telling ---------------------------------------------------------------------------------------

    def _heading(self) -> str:
        rig = self._rig
        dtype = str(rig.dtype).removeprefix("torch.")
        said = f"{device_name(rig.device)}, {rig.ops.name} kernels, {dtype}, {rig.shape.name}"
        if self._is_timed:
            said += f"; {self._bytes_per_s / 1e9:.4g} GB/s, {self._flops / 1e9:.4g} GFLOP/s"
        notes = "\n".join(self._notes()[:1])
        return f"{said}\n{notes}\n{'':<66}{'error':>9}{'of bound':>9}{'us':>11}{'floor':>10}{'ratio':>8}"

    def _notes(self) -> tuple[str, ...]:
        if not self._is_timed:
            return (*_UNTIMED_NOTES, *_NOTES)
        return (*(_CUDA_NOTES if self._rig.is_cuda else _CPU_NOTES), *_NOTES)

    def write(self) -> None:
        """``kernels.json``, ``kernels.png``; raises ConfigError where they cannot be written."""
        rig, settings, timed = self._rig, self._settings, self._is_timed
        document = {
            "machine": device_name(rig.device), "device": rig.device.type, "torch": torch.__version__,
            "kernels": rig.ops.name, "dtype": str(rig.dtype).removeprefix("torch."), "shape": rig.shape.name,
            "is_quick": settings.is_quick, "is_interpreted": rig.is_interpreted, "layers_a_call": rig.layers,
            "bytes_per_s": self._bytes_per_s if timed else None, "flops": self._flops if timed else None,
            "seconds": round(time.monotonic() - self._began, 1), "mistakes": self.mistakes,
            "left_out": self._left_out, "notes": self._notes(), "rows": self._rows,
            "provenance": self._recording.provenance(),
        }  # fmt: skip
        path = settings.out / "kernels.json"
        try:
            path.write_text(json.dumps(document, indent=1) + "\n")
            if timed:
                kernels_picture.draw(document, path.with_suffix(".png"))
        except OSError as error:
            raise ConfigError(f"{settings.out} cannot be written: {error.strerror or error}") from None
        wrong = sum(not row["is_right"] for row in self._rows)
        print(f"{len(self._rows)} cases, {wrong} wrong, {document['seconds']} s: {path}")
        for name in self._left_out:
            print(f"left out, for the budget was spent: {name}")


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


def _show(line: str) -> None:
    """What runs now, on stderr where that is a terminal; elsewhere the table is progress enough."""
    if sys.stderr.isatty():
        print(f"{line:<100}", end="\r", file=sys.stderr, flush=True)
