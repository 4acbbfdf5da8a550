"""``manylora bench kernels``: every case checked, timed, held against its floor, printed, written and drawn."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from manylora.config.declaring import ConfigError
from manylora_lab.bench.kernels import cases, lora, picture, sampling
from manylora_lab.bench.kernels.measuring import Bench, first_line, show
from manylora_lab.bench.kernels.rig import KernelCase, KernelRig
from manylora_lab.bench.kernels.settings import (
    FULL,
    INTERPRETED,
    KERNELS,
    QUICK,
    KernelSettings,
    KernelSizes,
    check_name,
)
from manylora_lab.bench.kernels.timing import one_thread

_CASES: dict[str, Callable[[KernelRig, KernelSizes], Iterator[list[KernelCase]]]] = {
    "add_rms_norm": cases.norm_cases,
    "silu_mul": cases.silu_cases,
    "rotate_and_store": cases.placing_cases,
    "decode": cases.decode_cases,
    "prefill": cases.prefill_cases,
    "linear": cases.linear_cases,
    "lora": lora.lora_cases,
    "sampling": sampling.sampling_cases,
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
    picture.check_folder(settings.out)
    began = time.monotonic()
    show("preparing")
    rig = KernelRig(settings)
    sizes = INTERPRETED if rig.is_interpreted else QUICK if settings.is_quick else FULL
    bench = Bench(rig, settings, sizes.repeats, began)
    rig.reserve(sizes.rows, sizes.ranks, max(sizes.tokens))
    notes = _notes(bench)
    print(bench.heading(notes[0]))
    for name in KERNELS:
        if not settings.only or name in settings.only:
            with torch.inference_mode(), one_thread():
                _run_kernel(bench, name, sizes)
    _write(bench, settings, bench.document(notes))
    for line in bench.mistakes:
        print(f"manylora: error: {line}", file=sys.stderr)
    return 1 if bench.mistakes else 0


def _notes(bench: Bench) -> tuple[str, ...]:
    if not bench.is_timed:
        return (*_UNTIMED_NOTES, *_NOTES)
    return (*(_CUDA_NOTES if bench.rig.is_cuda else _CPU_NOTES), *_NOTES)


def _run_kernel(bench: Bench, name: str, sizes: KernelSizes) -> None:
    if bench.is_spent:
        bench.left_out.append(name)
        return
    try:
        for group in _CASES[name](bench.rig, sizes):
            if bench.is_spent:
                bench.left_out.append(f"{group[0].title} and what follows")
                return
            bench.measure(group)
    except ConfigError:
        raise
    except Exception as error:
        # The others can still be measured, and what was is kept.
        bench.mistakes.append(f"{name} failed: {first_line(error)}")


def _write(bench: Bench, settings: KernelSettings, document: dict[str, Any]) -> None:
    """``kernels.json``, ``kernels.png``; raises ConfigError where they cannot be written."""
    path = settings.out / "kernels.json"
    try:
        path.write_text(json.dumps(document, indent=1) + "\n")
        if bench.is_timed:
            picture.draw(document, path.with_suffix(".png"))
    except OSError as error:
        raise ConfigError(f"{settings.out} cannot be written: {error.strerror or error}") from None
    wrong = sum(not row["is_right"] for row in bench.rows)
    print(f"{len(bench.rows)} cases, {wrong} wrong, {document['seconds']} s: {path}")
    for name in bench.left_out:
        print(f"left out, for the budget was spent: {name}")
