"""``manylora bench kernels --tune``: launch sizes measured in turn, and the table of the best of them."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from manylora.config.declaring import ConfigError
from manylora.kernels.triton import decode_table, lora_plan, products
from manylora_lab.bench.kernels import picture, tune_attention, tune_linear, tune_lora
from manylora_lab.bench.kernels.measuring import Bench, show
from manylora_lab.bench.kernels.rig import KernelRig
from manylora_lab.bench.kernels.settings import KernelSettings
from manylora_lab.bench.kernels.timing import device_name, one_thread

REPEATS, QUICK_REPEATS = 11, 3
NOTES = (
    "Every way is checked like a kernel of bench kernels; those that are right take turns. Time and floor are as "
    "there. Those that do not run on this device are left out.",
    "sizes: a library, or all fields of LinearConfig, DecodeConfig, AttentionTileConfig or LoraTileConfig.",
    "linear: behind a norm. layer: a whole layer without adapters, in decoding steps.",
)
REHEARSAL = "Triton's interpreter ran: a rehearsal, whose times mean nothing. "

_PARTS: dict[str, tuple[Path, Callable[[Bench, Any], Any]]] = {
    "linear": (products.TABLE, tune_linear.tune),
    "attention": (decode_table.TABLE, tune_attention.tune),
    "lora": (lora_plan.TABLE, tune_lora.tune),
}
"""The stored table, and what gives this device's entry anew."""


def run(settings: KernelSettings) -> int:
    """Writes ``tune_PART.json``, what was measured, and ``PART.json``, the table for ``kernels/tuned``. 1 where a
    result was wrong. Raises ConfigError."""
    assert settings.tune is not None
    picture.check_folder(settings.out)
    shipped, tune = _PARTS[settings.tune]
    table_path = settings.out / shipped.name
    began = time.monotonic()
    show("preparing")
    rig = KernelRig(dataclasses.replace(settings, only=(settings.tune,)))
    if rig.ops.name != "triton":
        raise ConfigError(
            "--tune is for the Triton kernels: add --device cuda, or rehearse with --ops triton"
        )
    repeats = 1 if rig.is_interpreted else QUICK_REPEATS if settings.is_quick else REPEATS
    bench = Bench(rig, settings, repeats, began)
    notes = (REHEARSAL * rig.is_interpreted + NOTES[0], *NOTES[1:])
    print(bench.heading(notes[0]))
    # Tables of several shapes are made by one run after the other.
    table = json.loads((table_path if table_path.is_file() else shipped).read_text())
    name = device_name(rig.device)
    with torch.inference_mode(), one_thread():
        table[name] = tune(bench, table.get(name))
    try:
        report = {**bench.document(notes), "tuned": table[name]}
        (settings.out / f"tune_{settings.tune}.json").write_text(json.dumps(report, indent=1) + "\n")
        table_path.write_text(table_text(table))
    except OSError as error:
        raise ConfigError(f"{settings.out} cannot be written: {error.strerror or error}") from None
    for line in bench.left_out:
        print(f"left out: {line}")
    for line in bench.mistakes:
        print(f"manylora: error: {line}", file=sys.stderr)
    print(f"{len(bench.rows)} cases, {report['seconds']} s: {table_path}")
    return 1 if bench.mistakes else 0


def table_text(table: dict[str, Any]) -> str:
    """JSON with a line for each row or key of a device's entry."""
    devices = []
    for name, entry in sorted(table.items()):
        is_list = isinstance(entry, list)
        lines = (
            [json.dumps(row) for row in entry]
            if is_list
            else [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items()]
        )
        inside = "".join(f"\n    {line}," for line in lines).rstrip(",")
        devices.append(
            f"  {json.dumps(name)}: {'[' if is_list else '{'}{inside}\n  {']' if is_list else '}'}"
        )
    return "{\n" + ",\n".join(devices) + "\n}\n"
