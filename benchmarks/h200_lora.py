"""LoRA kernels on one GPU: checks and times every variant, alone and in a layer. For development.

    python -m benchmarks.h200_lora --out lora.json [--seconds 100]

Sections in order, each within what is left of the time: checks, a sweep of sizes for decoding, schemes at batch
64 on the best of them, the same for prompts, and the other model at batch 32 and 128. Prints a line of JSON a
section, and at the end the row that ``kernels/tuned/lora.json`` wants for this device. ``served`` is what models
call.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.lora_checks import Checker, check_replays
from benchmarks.lora_layer import Layers, Rig
from manylora.bench.interleaved import captured
from manylora.bench.kernels import CUDA_DECODERS, Decoder, read_bandwidth, segment_lengths
from manylora.kernels.shapes import ProjectionGroup
from manylora.kernels.triton.lora import AdaptedLinears, as_row, lora_kernels_on
from manylora.kernels.triton.lora_launch import DEFAULT, LoraConfig, LoraKernels
from manylora.kernels.triton.operations import TritonOps
from manylora.kernels.triton.products import Products, products_on

AIMS_US = {"distinct": 65.0, "uniform": 20.0, "identical": 15.0}
POPULARITIES = ("distinct", "uniform", "skewed", "identical")
LAYERS = 8

SHRINKS = {
    f"s{chunk}c{columns}m{step}w{warps}p{programs}r{registers}": {
        "chunk": chunk, "shrink_columns": columns, "shrink_step": step, "shrink_warps": warps,
        "shrink_programs": programs, "shrink_registers": registers,
    }
    for chunk, columns, step, warps, programs, registers in (
        (512, 256, 256, 4, 16, 0), (512, 512, 512, 4, 16, 0), (1024, 1024, 256, 4, 16, 0),
        (256, 256, 256, 4, 16, 0), (1024, 512, 512, 4, 16, 168),
    )
}  # fmt: skip
EXPANDS = {
    f"n{columns}m{step}w{warps}p{programs}r{registers}": {
        "expand_columns": columns, "expand_step": step, "expand_warps": warps, "expand_programs": programs,
        "expand_registers": registers,
    }
    for columns, step, warps, programs, registers in (
        (512, 128, 2, 16, 168), (512, 128, 2, 0, 168), (512, 256, 2, 16, 0), (512, 256, 4, 16, 0),
        (1024, 256, 4, 16, 0), (256, 256, 4, 16, 0), (512, 64, 2, 16, 128),
    )
}  # fmt: skip
LONG_SHRINKS = {
    f"t{tokens}k{step}w{warps}s{stages}": {
        "tile_tokens": tokens,
        "shrink_step": step,
        "shrink_warps": warps,
        "stages": stages,
    }
    for tokens, step, warps, stages in ((64, 128, 4, 3), (128, 128, 8, 3))
}
LONG_EXPANDS = {
    f"n{columns}m{step}w{warps}r{registers}": {
        "expand_columns": columns, "expand_step": step, "expand_warps": warps, "expand_registers": registers,
    }
    for columns, step, warps, registers in (
        (512, 64, 4, 128), (1024, 64, 4, 96), (256, 64, 4, 96), (64, 64, 4, 128), (512, 128, 8, 128),
    )
}  # fmt: skip


Step = Callable[[], object]


class Run:
    """What sections share: the rig, the clock, and the rows that were found."""

    def __init__(self, rig: Rig, deadline: float, rounds: int, multiprocessors: int) -> None:
        self.rig, self.deadline, self.rounds, self.sms = rig, deadline, rounds, multiprocessors
        on_cuda = rig.device.type == "cuda"
        self.products: Products | None = products_on(rig.device) if on_cuda else None
        self.stored = lora_kernels_on(rig.device).config
        """What the engine would use now."""
        self.rows: list[dict[str, Any]] = []
        self.failures: dict[str, str] = {}

    @property
    def is_cuda(self) -> bool:
        return self.rig.device.type == "cuda"

    def left(self) -> float:
        return self.deadline - time.perf_counter()

    def kernels(self, config: LoraConfig) -> LoraKernels:
        return LoraKernels(config, self.sms)

    def layers(self, config: LoraConfig, lengths: list[int], ranks: list[int], cover: bool = False) -> Layers:
        kernels, tokens = self.kernels(config), sum(lengths)
        segments = self.rig.segments(lengths, ranks)
        plan = kernels.plan(segments, self.rig.geometry, self.rig.device, tokens, cover)
        return Layers(self.rig, kernels, plan, tokens)

    def attempt(self, name: str, step: Callable[[], Any]) -> Any:
        """The step's result; None, and a line, where it fails."""
        try:
            return step()
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.failures[name] = f"{type(error).__name__}: {' / '.join(lines[-3:])}"[:300]
            print(f"FAILED {name}: {self.failures[name]}", flush=True)
            if os.environ.get("TRACE"):
                traceback.print_exc()
            return None

    def us(self, steps: dict[str, Step]) -> dict[str, float]:
        """Microseconds a layer of each step, captured, medians of rounds that take turns."""
        if not self.is_cuda:
            found = {}
            for name, step in steps.items():
                began = time.perf_counter()
                if self.attempt(name, functools.partial(_done, step)):
                    found[name] = (time.perf_counter() - began) * 1e6 / self.rig.layers
            return found
        graphs = {
            name: self.attempt(name, functools.partial(captured, torch.cuda, step))
            for name, step in steps.items()
        }
        graphs = {name: graph for name, graph in graphs.items() if graph is not None}
        pairs: dict[str, list[Any]] = {name: [] for name in graphs}
        for number in range(self.rounds + 1):
            for name, graph in graphs.items():
                pair = [torch.Event(self.rig.device, enable_timing=True) for _ in range(2)]
                pair[0].record()
                graph.replay()
                pair[1].record()
                if number:
                    pairs[name].append(pair)
        torch.cuda.synchronize()
        return {
            name: statistics.median(a.elapsed_time(b) for a, b in found) * 1e3 / self.rig.layers
            for name, found in pairs.items()
        }

    def add(self, section: str, setting: dict[str, Any], us: dict[str, float], floor: float) -> None:
        row = {
            "section": section,
            **setting,
            "floor_us": round(floor, 2),
            "us": {k: round(v, 1) for k, v in us.items()},
        }
        self.rows.append(row)
        print(json.dumps(row), flush=True)


def _done(step: Step) -> bool:
    step()
    return True


# ---- sections ------------------------------------------------------------------------------------------


def short(config: LoraConfig, **sizes: Any) -> LoraConfig:
    return dataclasses.replace(config, short=dataclasses.replace(config.short, **sizes))


def long(config: LoraConfig, **sizes: Any) -> LoraConfig:
    return dataclasses.replace(config, long=dataclasses.replace(config.long, **sizes))


def compile_all(
    run: Run, configs: list[LoraConfig], lengths: list[int], schemes: tuple[str, ...] = ("alone",)
) -> None:
    """Compile beforehand, side by side: what fails here fails again, and is reported, where it is used."""
    if not run.is_cuda:
        return
    began = time.perf_counter()
    one = dataclasses.replace(run.rig, layers=1)
    one.buffers(sum(lengths))  # once, before all threads ask for them

    def compiled(config: LoraConfig, scheme: str) -> None:
        with torch.inference_mode():
            layers = run.layers(config, lengths, [16] * len(lengths), cover=True)
            layers.rig = one
            layers.run(scheme)

    with ThreadPoolExecutor(8) as pool:
        failed = [
            future.exception() for future in [pool.submit(compiled, c, s) for s in schemes for c in configs]
        ]
    torch.cuda.synchronize()
    bad = sum(e is not None for e in failed)
    print(f"compiled {len(configs)} variants, {bad} failed, {time.perf_counter() - began:.0f} s", flush=True)


def checked(
    run: Run, checker: Checker, configs: dict[str, LoraConfig], thorough: bool = False
) -> dict[str, LoraConfig]:
    """Those that are right. Side by side, for most of the time goes into compiling."""
    began = time.perf_counter()

    def check(name: str) -> object:
        with torch.inference_mode():
            kernels = run.kernels(configs[name])
            return run.attempt(f"check {name}", functools.partial(checker.worst, kernels, thorough))

    with ThreadPoolExecutor(12 if run.is_cuda else 1) as pool:
        found = dict(zip(configs, pool.map(check, configs)))
    good = {name: config for name, config in configs.items() if found[name] is not None}
    print(
        f"{len(good)} of {len(configs)} variants are right, {time.perf_counter() - began:.0f} s", flush=True
    )
    return good


def sweep(
    run: Run,
    what: str,
    configs: dict[str, LoraConfig],
    cases: dict[str, tuple[list[int], list[int]]],
    floors: dict[str, float],
    aims: dict[str, float],
) -> str:
    """Times ``shrinks`` or ``expands`` of every configuration; the name of the best."""
    scores = dict.fromkeys(configs, 0.0)
    for case, (lengths, ranks) in cases.items():
        steps: dict[str, Step] = {}
        for name, config in configs.items():
            layers = run.attempt(name, functools.partial(run.layers, config, lengths, ranks))
            if layers is None:
                continue
            if what == "expands" and not run.attempt(name, layers.prepare_expands):
                continue
            steps[name] = functools.partial(layers.run, what)
        us = run.us(steps)
        run.add(f"sweep {what}", {"case": case}, us, floors[case] / 2)
        for name in configs:
            scores[name] += us.get(name, 1e9) / aims[case]
    best = min(scores, key=lambda name: scores[name])
    print(
        f"best of {what}: {best}  "
        + json.dumps({k: round(v, 2) for k, v in sorted(scores.items(), key=lambda i: i[1])})
    )
    return best


def decode_cases(batch: int, rank: int) -> dict[str, tuple[list[int], list[int]]]:
    cases = {}
    for popularity in POPULARITIES:
        lengths = segment_lengths(popularity, batch)
        cases[popularity] = (lengths, [rank] * len(lengths))
    return cases


def schemes_section(
    run: Run, section: str, config: LoraConfig, case: str, lengths: list[int], ranks: list[int],
    setting: dict[str, Any], bandwidth: float, schemes: tuple[str, ...], pdl_schemes: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """What every scheme adds to the base, with and without dependent launch."""
    steps: dict[str, Step] = {}
    steps.update(run.attempt("served", lambda: served(run, config, lengths, ranks)) or {})
    for pdl, names in ((False, ("base", *schemes)), (True, pdl_schemes)):
        chosen = dataclasses.replace(config, pdl=pdl)
        for name in names:
            layers = run.layers(
                chosen, lengths, ranks, cover="first" in name or "delta" in name or "silu" in name
            )
            steps[name + ("+pdl" if pdl else "")] = functools.partial(layers.run, name)
    us = run.us(steps)
    bases = {name: us.get(name, 0.0) for name in ("base", "served base")}
    kept = dict(bases)
    for name, value in us.items():
        if name not in bases:
            base = "served base" if name.startswith("served") else "base"
            kept[name] = value - (0.0 if "alone" in name else bases[base])
    floor = run.rig.adapter_bytes(ranks) / bandwidth * 1e6
    run.add(section, {"model": run.rig.decoder.name, **setting, "case": case}, kept, floor)


def served_step(run: Run, lengths: list[int], ranks: list[int], plan: Any, ops: TritonOps) -> Step:
    """What models call: linears with adapters, the activation with its own, and the rest as the schemes do it."""
    rig = run.rig
    layers = Layers(rig, None, None, sum(lengths))
    layers.y = dict(layers.y)  # others' results stay where they are

    def one(layer: int, group: ProjectionGroup) -> None:
        linear = ops.lora_gated if group.name == "gate_up" else ops.lora_linear
        weight = rig.weights[layer][group.name]
        layers.y[group.name] = linear(layers.x[group.name], weight, None, rig.pool, layer, group, plan)
        if group.name != "gate_up":
            layers._consume(group, False)

    def step() -> None:
        for layer in range(rig.layers):
            for group in rig.geometry.groups:
                one(layer, group)

    return step


def served(run: Run, config: LoraConfig, lengths: list[int], ranks: list[int]) -> dict[str, Step]:
    """With an exact plan, and for decoding with one for the bucket as captured steps have it."""
    rig, batch = run.rig, sum(lengths)
    segments = rig.segments(lengths, ranks)
    pdl = run.is_cuda
    steps: dict[str, Step] = {}
    for beside in (False, True):
        ops = TritonOps(products=run.products)
        chosen = run.kernels(dataclasses.replace(config, pdl=pdl, beside=beside))
        ops._linears = AdaptedLinears(chosen, ops.linear, rig.device)
        if not beside:
            steps["served base"] = served_step(run, lengths, ranks, None, ops)
            exact = ops.plan_lora(segments, rig.geometry, rig.device)
            steps["served"] = served_step(run, lengths, ranks, exact, ops)
        if batch <= 512:
            rank = 16 if max(ranks) <= 16 else 64
            fixed = ops.fixed_lora(batch, rank, rig.geometry, segments.cells, rig.device)
            fixed.fill(segments, batch)
            name = "served fixed, beside" if beside else "served fixed"
            steps[name] = served_step(run, lengths, ranks, fixed.plan, ops)
    return steps


def decode(run: Run, bandwidth: float) -> LoraConfig:
    checker = Checker(run.rig)
    some = slice(None if run.is_cuda else 2)
    began = dataclasses.replace(run.stored, pdl=run.is_cuda)
    shrinks = {name: short(began, **sizes) for name, sizes in list(SHRINKS.items())[some]}
    good = checked(run, checker, shrinks)
    cases = {name: decode_cases(64 if run.is_cuda else 6, 16)[name] for name in AIMS_US}
    floors = {name: run.rig.adapter_bytes(ranks) / bandwidth * 1e6 for name, (_, ranks) in cases.items()}
    best = sweep(run, "shrinks", good, cases, floors, AIMS_US)
    expands = {name: short(shrinks[best], **sizes) for name, sizes in list(EXPANDS.items())[some]}
    good = checked(run, checker, expands)
    best_expand = sweep(run, "expands", good, cases, floors, AIMS_US)
    chosen = expands[best_expand]
    modes = (False, True) if run.is_cuda else (False,)
    both = {f"chosen pdl={pdl}": dataclasses.replace(chosen, pdl=pdl) for pdl in modes}
    for name, config in checked(run, checker, both, thorough=True).items():
        worst = run.attempt(f"replays {name}", functools.partial(check_replays, run.rig, run.kernels(config)))
        print(f"replays, {name}: error {worst}", flush=True)
    return chosen


SCHEMES = ("after", "delta")
PDL_SCHEMES = ("alone", "after", "side", "first", "delta")


def prefill(run: Run, chosen: LoraConfig, bandwidth: float) -> LoraConfig:
    rig, layers = run.rig, run.rig.layers
    run.rig = dataclasses.replace(rig, layers=2)
    tokens = 2000 if run.is_cuda else 40
    lengths, ranks = [tokens] * 8, [16] * 8
    case = {"8x2000": (lengths, ranks)}
    floor = {"8x2000": run.rig.adapter_bytes(ranks) / bandwidth * 1e6}
    checker = Checker(rig)
    some = slice(None if run.is_cuda else 2)
    shrinks = {name: long(chosen, **sizes) for name, sizes in list(LONG_SHRINKS.items())[some]}
    compile_all(run, list(shrinks.values()), lengths)
    good = checked(run, checker, shrinks)
    best = sweep(run, "shrinks", good, case, floor, {"8x2000": 300.0})
    expands = {name: long(shrinks[best], **sizes) for name, sizes in list(LONG_EXPANDS.items())[some]}
    compile_all(run, list(expands.values()), lengths)
    good = checked(run, checker, expands)
    best = sweep(run, "expands", good, case, floor, {"8x2000": 300.0})
    modes = (False, True) if run.is_cuda else (False,)
    both = {f"long pdl={pdl}": dataclasses.replace(expands[best], pdl=pdl) for pdl in modes}
    compile_all(run, list(both.values()), lengths, ("alone", "first", "silu"))
    checked(run, checker, both, thorough=True)
    schemes_section(
        run, "prefill", expands[best], "8x2000", lengths, ranks, {"rank": 16}, bandwidth,
        ("alone", "after", "first", "silu", "first_silu"), ("after", "first_silu") if run.is_cuda else (),
    )  # fmt: skip
    run.rig = dataclasses.replace(rig, layers=layers)
    return expands[best]


def batches(
    run: Run, chosen: LoraConfig, bandwidth: float, wanted: tuple[int, ...], reserve_s: float
) -> None:
    for batch in wanted:
        for popularity in POPULARITIES:
            if run.left() < reserve_s:
                print(f"no time for {run.rig.decoder.name}, batch {batch}, {popularity}", flush=True)
                continue
            lengths, ranks = decode_cases(batch, 16)[popularity]
            schemes_section(
                run, "decode", chosen, popularity, lengths, ranks, {"batch": batch, "rank": 16}, bandwidth,
                SCHEMES, PDL_SCHEMES if run.is_cuda else (),
            )  # fmt: skip


TINY = Decoder("tiny", 2, 64, 4, 2, 16, 96)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--rehearse", action="store_true", help="tiny, in the interpreter, without a GPU")
    arguments = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(0)
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    dtype = torch.float16 if arguments.rehearse else torch.bfloat16
    bandwidth = 1e12 if arguments.rehearse else read_bandwidth(device)
    print(f"bandwidth {bandwidth / 1e12:.2f} TB/s, torch {torch.__version__}", flush=True)
    decoders = (TINY,) if arguments.rehearse else tuple(reversed(CUDA_DECODERS))
    sms = 4 if arguments.rehearse else torch.cuda.get_device_properties(device).multi_processor_count
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    config = DEFAULT
    with torch.inference_mode():
        for number, decoder in enumerate(decoders):
            rig = Rig.of(
                decoder,
                device,
                dtype,
                2 if arguments.rehearse else LAYERS,
                4096 if device.type == "cuda" else 1200,
            )
            run = Run(rig, began + arguments.seconds, 1 if arguments.rehearse else 11, sms)
            try:
                if number == 0:
                    config = decode(run, bandwidth)
                    batches(run, config, bandwidth, (64,) if run.is_cuda else (5,), 50.0)
                    if run.left() > 35.0:
                        config = prefill(run, config, bandwidth)
                else:
                    batches(run, config, bandwidth, (32, 128), 3.0)
            except Exception:
                traceback.print_exc()
            rows += run.rows
            failures |= run.failures
            save(arguments.out, rows, failures, config, bandwidth)
            del rig, run
    print(f"{time.perf_counter() - began:.0f} s; failures: {json.dumps(failures)}")


def save(
    out: Path | None,
    rows: list[dict[str, Any]],
    failures: dict[str, str],
    config: LoraConfig,
    bandwidth: float,
) -> None:
    print("TUNED " + json.dumps(as_row(config)), flush=True)
    document = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__, "bytes_per_s": bandwidth, "config": dataclasses.asdict(config),
        "tuned": as_row(config),
        "failures": failures, "rows": rows,
    }  # fmt: skip
    print("CONFIG " + json.dumps(document["config"]), flush=True)
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
