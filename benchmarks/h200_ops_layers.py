"""Whole decoding layers in CUDA graphs: what asking for weights ahead, attention's sizes and the choice of
products give there, where a kernel's end hides the next one's beginning or does not.

Layers are the models' own, each with weights and keys of its own, so that nothing comes from the cache; contexts
differ by up to half of the mean. Variants of one case take turns. Phase one asks for one product's weights at a
time and chooses (``--table``: ``kernels/tuned/ahead.json``); phase two measures the choices together, with and
without dependent launches, and beside them attention's sizes and other products. Everything goes to ``--out``, and
one compact line is printed:

    python -m benchmarks.h200_ops_layers --out layers.json --table ahead.json [--seconds 70] [--only 7b.32]
"""

# mypy: disallow-untyped-calls=False
# torch's streams and events have no annotations.

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import h200_ops_attention as attending
from benchmarks.h200_ops_linears import SHAPES, compile_linear
from benchmarks.h200_ops_stack import CASES, LAYERS, PRODUCTS, Case, Stack, Variant, shapes_of
from manylora.kernels.triton.ahead import Early, Key, Place
from manylora.kernels.triton.decode_table import DecodeConfig
from manylora.kernels.triton.products import Choice, LinearConfig, bucket_of, stored_choices

MIB = 2**20
SIZES = (4, 8, 16, 32)
PLACES: dict[str, tuple[Place, ...]] = {
    "qkv": ("small", "beside"),
    "o": ("small", "attention", "beside"),
    "gate_up": ("small", "beside"),
    "down": ("small", "beside"),
}
DECODES = [
    DecodeConfig(64, 4, 2),
    DecodeConfig(64, 4, 3),
    DecodeConfig(64, 4, 4),
    DecodeConfig(64, 2, 2),
    DecodeConfig(64, 2, 3),
    DecodeConfig(32, 4, 3),
    DecodeConfig(32, 2, 3),
    DecodeConfig(32, 2, 5),
    DecodeConfig(16, 1, 6),
]
PROGRAMS = (264, 528, 1056)
LEAST_GAIN_US, MOST_LOSS_US, ROUNDS = 0.25, 0.25, 9


def compile_one(setting: tuple[int | str, Any]) -> str | None:
    """In a process of its own: fills Triton's cache. The error, if any, in one line."""
    size, config = setting
    try:
        if isinstance(config, DecodeConfig):
            attending.compile_decode(str(size), config)
        else:
            compile_linear(int(size), config)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{setting}: {str(error)[:160] or type(error).__name__}"
    return None


def compile_all() -> list[str]:
    settings: list[tuple[int | str, Any]] = [
        (heads, config) for heads in attending.HEADS for config in DECODES
    ]
    settings += [(tokens, config) for tokens in (32, 64) for config in ours(tokens)]
    workers = max(1, min(13, (os.cpu_count() or 2) - 2))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        return [error for error in pool.map(compile_one, settings, timeout=120) if error]


def ours(tokens: int) -> list[LinearConfig]:
    return [LinearConfig(*shape) for shape in SHAPES[tokens]]


@dataclasses.dataclass
class Run:
    """What was measured. ``gains``: by product and way of asking, the microseconds that a layer took less, one
    for each case."""

    out: Path
    deadline: float
    choices: Mapping[Any, Choice]
    report: dict[str, Any] = dataclasses.field(default_factory=lambda: {"different": []})
    gains: dict[Key, dict[Early, list[float]]] = dataclasses.field(default_factory=dict)

    def save(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.report))

    def is_late(self) -> bool:
        return time.perf_counter() > self.deadline

    # ------------------------------------------------------------ one product at a time

    def singles(self, stack: Stack, case: Case) -> None:
        variants = {"none": Variant(self.choices)}
        asks: dict[str, tuple[Key, Early]] = {}
        for name, shape in zip(PRODUCTS, shapes_of(case)):
            for place in PLACES[name]:
                if place == "beside" and not case.rank and name == "o":
                    continue
                for size in SIZES if place != "beside" or case.rank else (8, 32):
                    label = f"{name} {place} {size}"
                    asks[label] = (bool(case.rank), shape), Early(place, size * MIB)
                    variants[label] = Variant(self.choices, dict([asks[label]]))
        found, different = stack.measure(case, variants, ROUNDS)
        self.report.setdefault("singles", {})[case.name] = found
        self.report["different"].extend(f"{case.name}: {name}" for name in different)
        for label, (key, early) in asks.items():
            if label in found:
                gains = self.gains.setdefault(key, collections.defaultdict(list))
                gains[early].append(found["none"] - found[label])

    def chosen(self) -> dict[Key, Early]:
        table: dict[Key, Early] = {}
        for key, ways in self.gains.items():
            means = {early: statistics.mean(g) for early, g in ways.items() if min(g) > -MOST_LOSS_US}
            best = max(means, key=lambda early: means[early], default=None)
            if best is not None and means[best] > LEAST_GAIN_US:
                table[key] = best
        return table

    # ------------------------------------------------------------ all together

    def together(self, stack: Stack, case: Case, table: Mapping[Key, Early]) -> None:
        plain, asked = Variant(self.choices), Variant(self.choices, table)
        variants = {
            "none": plain,
            "table": asked,
            "none, dependent": dataclasses.replace(plain, dependent=True),
            "table, dependent": dataclasses.replace(asked, dependent=True),
        }
        for size in SIZES:
            places: tuple[Place, ...] = ("small", "attention", "small", "small")
            every = {
                (bool(case.rank), shape): Early(place, size * MIB)
                for shape, place in zip(shapes_of(case), places)
            }
            variants[f"all {size}"] = Variant(self.choices, every)
        same = set(variants)
        if case.batch >= 8 and not case.rank:
            for config in DECODES:
                for programs in PROGRAMS if case.wants_pieces else PROGRAMS[1:2]:
                    chosen = dataclasses.replace(config, programs=programs)
                    label = f"decode {config.block_n} {config.warps} {config.stages} {programs}"
                    variants[label] = dataclasses.replace(asked, decoding=chosen)
        bucket = bucket_of(case.batch)
        if bucket in (32, 64) and not case.rank and case.context == 300:
            for name, shape in zip(PRODUCTS, shapes_of(case)):
                ways: dict[str, Mapping[Any, Choice]] = {
                    "cublas": {key: way for key, way in self.choices.items() if key != shape},
                    "cublaslt": {**self.choices, shape: None},
                }
                for number, linear in enumerate(ours(bucket)):
                    ways[f"ours{number}"] = {**self.choices, shape: linear}
                for way, choices in ways.items():
                    variants[f"{name} {way}"] = dataclasses.replace(asked, choices=choices)
        found, different = stack.measure(case, variants, ROUNDS, same)
        self.report.setdefault("together", {})[case.name] = found
        self.report["different"].extend(f"{case.name}: {name}" for name in different)

    def line(self, table: Mapping[Key, Early]) -> str:
        """Per case: microseconds of a layer for the main variants, and the best of each kind."""
        cases: dict[str, Any] = {}
        for name, found in self.report.get("together", {}).items():
            row = {key: found[key] for key in found if key.startswith(("none", "table", "all"))}
            for kind in ("decode", *PRODUCTS):
                best = min(
                    (key for key in found if key.startswith(f"{kind} ")), key=found.__getitem__, default=None
                )
                if best is not None:
                    row[best] = found[best]
            cases[name] = row
        for name, found in self.report.get("singles", {}).items():
            for kind in PRODUCTS:
                best = min((key for key in found if key.startswith(f"{kind} ")), key=found.__getitem__)
                cases.setdefault(name, {}).setdefault("one", {})[best] = round(found["none"] - found[best], 1)
        rows = [
            [*key[1], key[0], early.place, early.num_bytes // MIB] for key, early in sorted(table.items())
        ]
        troubles = {key: self.report[key][:12] for key in ("different", "errors")}
        summary = {"table": rows, "cases": cases, **troubles, "seconds": self.report["seconds"]}
        return json.dumps(summary, separators=(",", ":"))


def save_table(table: Mapping[Key, Early], path: Path) -> None:
    """As ``ahead.stored_asks`` reads it, for this device."""
    rows = [
        json.dumps(
            {"adapted": adapted, "tokens": tokens, "in": inputs, "out": outputs, **dataclasses.asdict(early)}
        )
        for (adapted, (tokens, inputs, outputs)), early in sorted(table.items())
    ]
    body = ",\n".join(f"    {row}" for row in rows)
    path.write_text(f'{{\n  "{torch.cuda.get_device_name()}": [\n{body}\n  ]\n}}\n')


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", type=Path, help="write what to ask for here")
    parser.add_argument("--seconds", type=float, default=70, help="for measuring; what is left then is not")
    parser.add_argument("--only", default="", help="cases whose names begin with this")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    run = Run(options.out, began + options.seconds, stored_choices(torch.cuda.get_device_name()))
    run.report["errors"] = compile_all()
    run.report["seconds"] = {"compile": round(time.perf_counter() - began, 1)}
    cases = [case for case in CASES if case.name.startswith(options.only)]
    stacks = {model: Stack(model, LAYERS) for model in sorted({case.model for case in cases})}
    table: dict[Key, Early] = {}
    for phase in ("singles", "together"):
        # Half of what is left for the first phase.
        end = time.perf_counter() + (run.deadline - time.perf_counter()) / (2 if phase == "singles" else 1)
        for case in cases:
            if time.perf_counter() > end:
                run.report["errors"].append(f"no time for {phase} of {case.name}")
                continue
            try:
                if phase == "singles":
                    run.singles(stacks[case.model], case)
                else:
                    run.together(stacks[case.model], case, table)
            except Exception as error:
                run.report["errors"].append(f"{phase} {case.name}: {str(error)[:300]}")
            run.save()
        table = run.chosen()
        run.report["seconds"][phase] = round(time.perf_counter() - began, 1)
    if options.table is not None:
        save_table(table, options.table)
    run.save()
    print(run.line(table), flush=True)


if __name__ == "__main__":
    main()
