"""LoRA kernels on one GPU: checks and times every variant, alone and in a layer. For development.

    python -m benchmarks.h200_lora --out lora.json [--seconds 330]

Sections in order, each within what is left of the time: checks, a sweep of sizes for decoding, schemes and
batches on the best of them, the same for prompts, the other model and ranks. Prints a line of JSON a section.
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
from manylora.kernels.triton.lora_launch import DEFAULT, LoraConfig, LoraKernels

AIMS_US = {"distinct": 65.0, "uniform": 20.0, "identical": 15.0}
POPULARITIES = tuple(AIMS_US)
LAYERS = 8

SHRINKS = {
    f"s{chunk}c{columns}m{step}w{warps}p{programs}r{registers}": {
        "chunk": chunk, "shrink_columns": columns, "shrink_step": step, "shrink_warps": warps,
        "shrink_programs": programs, "shrink_registers": registers,
    }
    for chunk, columns, step, warps, programs, registers in (
        (512, 512, 256, 4, 0, 128), (1024, 1024, 256, 4, 0, 0), (1024, 256, 256, 4, 0, 0),
        (512, 512, 512, 4, 0, 0), (512, 256, 256, 4, 0, 0), (256, 256, 256, 2, 0, 0), (256, 256, 256, 4, 0, 0),
        (512, 512, 256, 4, 4, 128), (1024, 1024, 512, 8, 0, 0), (1024, 1024, 256, 4, 0, 128),
        (512, 512, 256, 4, 0, 96), (512, 256, 256, 4, 8, 0), (2048, 1024, 256, 4, 0, 128),
    )
}  # fmt: skip
EXPANDS = {
    f"n{columns}m{step}w{warps}p{programs}r{registers}": {
        "expand_columns": columns, "expand_step": step, "expand_warps": warps, "expand_programs": programs,
        "expand_registers": registers,
    }
    for columns, step, warps, programs, registers in (
        (512, 256, 4, 0, 128), (1024, 256, 4, 0, 128), (512, 512, 4, 0, 0), (512, 256, 2, 0, 168),
        (256, 256, 4, 0, 96), (256, 128, 2, 0, 128), (512, 256, 4, 4, 128), (512, 128, 4, 0, 96),
        (1024, 512, 8, 0, 0), (1024, 256, 4, 4, 128),
    )
}  # fmt: skip
LONG_SHRINKS = {
    f"t{tokens}k{step}w{warps}s{stages}": {
        "tile_tokens": tokens, "shrink_step": step, "shrink_warps": warps, "stages": stages,
    }
    for tokens, step, warps, stages in (
        (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 4), (64, 128, 4, 3), (64, 256, 4, 2),
    )
}  # fmt: skip
LONG_EXPANDS = {
    f"n{columns}w{warps}": {"expand_columns": columns, "expand_step": columns, "expand_warps": warps}
    for columns, warps in ((128, 8), (128, 4), (256, 8), (64, 4))
}


Step = Callable[[], object]


class Run:
    """What sections share: the rig, the clock, and the rows that were found."""

    def __init__(self, rig: Rig, deadline: float, rounds: int, multiprocessors: int) -> None:
        self.rig, self.deadline, self.rounds, self.sms = rig, deadline, rounds, multiprocessors
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
    today = today_step(run, lengths, ranks)
    if today is not None:
        steps["today"] = today
    for pdl, names in ((False, ("base", "alone", *schemes)), (True, pdl_schemes)):
        chosen = dataclasses.replace(config, pdl=pdl)
        for name in names:
            layers = run.layers(
                chosen, lengths, ranks, cover="first" in name or "delta" in name or "silu" in name
            )
            steps[name + ("+pdl" if pdl else "")] = functools.partial(layers.run, name)
    us = run.us(steps)
    base = us.get("base", 0.0)
    kept = {"base": base} | {
        name: value - (0.0 if "alone" in name else base) for name, value in us.items() if name != "base"
    }
    floor = run.rig.adapter_bytes(ranks) / bandwidth * 1e6
    run.add(section, {"model": run.rig.decoder.name, **setting, "case": case}, kept, floor)


def today_step(run: Run, lengths: list[int], ranks: list[int]) -> Step | None:
    """The kernels in use now, after the linear."""
    from manylora.kernels.triton.operations import TritonOps

    rig, ops = run.rig, TritonOps()
    if not hasattr(ops, "plan_lora"):
        return None
    segments = rig.segments(lengths, ranks)
    plan = ops.plan_lora(segments, rig.geometry, rig.device)
    if plan is None:
        return None
    layers = Layers(rig, None, None, sum(lengths))

    def today(layer: int, group: ProjectionGroup) -> None:
        layers._linear(layer, group)
        ops.lora(layers.y[group.name], layers.x[group.name], rig.pool, layer, group, plan)
        layers._consume(group, False)

    def step() -> None:
        for layer in range(rig.layers):
            for group in rig.geometry.groups:
                today(layer, group)

    return step


def bucket_section(run: Run, config: LoraConfig, batch: int) -> None:
    """The price of launches sized for the bucket: reserved plans filled with few and with many segments."""
    for case, (lengths, ranks) in decode_cases(batch, 16).items():
        segments = run.rig.segments(lengths, ranks)
        steps: dict[str, Step] = {}
        for name, programs in (("exact", None), ("each", 0), ("4", 4), ("8", 8), ("16", 16)):
            chosen = short(config, shrink_programs=programs or 0, expand_programs=programs or 0)
            kernels = run.kernels(config if programs is None else chosen)
            if programs is None:
                plan = kernels.plan(segments, run.rig.geometry, run.rig.device, batch)
            else:
                plan = kernels.reserve(run.rig.geometry, segments.cells, batch, 64)
                kernels.refill(plan, segments, batch)
            layers = Layers(run.rig, kernels, plan, batch)
            steps[name] = functools.partial(layers.run, "alone")
        run.add("bucket", {"batch": batch, "case": case}, run.us(steps), 0.0)


def decode(run: Run, bandwidth: float) -> LoraConfig:
    checker = Checker(run.rig)
    some = slice(None if run.is_cuda else 2)
    shrinks = {name: short(DEFAULT, **sizes) for name, sizes in list(SHRINKS.items())[some]}
    good = checked(run, checker, shrinks)
    cases = decode_cases(64 if run.is_cuda else 6, 16)
    floors = {name: run.rig.adapter_bytes(ranks) / bandwidth * 1e6 for name, (_, ranks) in cases.items()}
    best = sweep(run, "shrinks", good, cases, floors, AIMS_US)
    expands = {name: short(shrinks[best], **sizes) for name, sizes in list(EXPANDS.items())[some]}
    good = checked(run, checker, expands)
    best_expand = sweep(run, "expands", good, cases, floors, AIMS_US)
    chosen = expands[best_expand]
    both = {f"chosen pdl={pdl}": dataclasses.replace(chosen, pdl=pdl) for pdl in (False, True)}
    for name, config in checked(run, checker, both, thorough=True).items():
        worst = run.attempt(f"replays {name}", functools.partial(check_replays, run.rig, run.kernels(config)))
        print(f"replays, {name}: error {worst}", flush=True)
    return chosen


SCHEMES = ("after", "side", "first", "delta", "silu", "side_silu")
PDL_SCHEMES = ("alone", "after", "side", "first", "delta", "silu", "side_silu")


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
    both = {f"long pdl={pdl}": dataclasses.replace(expands[best], pdl=pdl) for pdl in (False, True)}
    compile_all(run, list(both.values()), lengths, ("alone", "first", "silu"))
    checked(run, checker, both, thorough=True)
    schemes_section(
        run, "prefill", expands[best], "8x2000", lengths, ranks, {"rank": 16}, bandwidth,
        ("after", "side", "first", "delta", "silu", "first_silu"), ("after", "first_silu"),
    )  # fmt: skip
    run.rig = dataclasses.replace(rig, layers=layers)
    return expands[best]


def settings(is_cuda: bool) -> list[tuple[int, int, tuple[str, ...]]]:
    """(batch, rank, popularities), the most wanted first."""
    if not is_cuda:
        return [(5, 16, ("uniform",))]
    few = [
        (1, 16, ("distinct",)),
        (32, 16, ("distinct",)),
        (64, 64, ("distinct", "uniform")),
        (64, 8, ("distinct",)),
    ]
    return [*((batch, 16, POPULARITIES) for batch in (64, 128, 16)), *few]


def batches(run: Run, chosen: LoraConfig, bandwidth: float, reserve_s: float) -> None:
    for batch, rank, popularities in settings(run.is_cuda):
        for popularity in popularities:
            if run.left() < reserve_s:
                return
            lengths, ranks = decode_cases(batch, rank)[popularity]
            schemes_section(
                run, "decode", chosen, popularity, lengths, ranks, {"batch": batch, "rank": rank}, bandwidth,
                SCHEMES, PDL_SCHEMES,
            )  # fmt: skip


TINY = Decoder("tiny", 2, 64, 4, 2, 16, 96)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=330.0)
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
                    batches(run, config, bandwidth, 110.0)
                    bucket_section(run, config, 64 if run.is_cuda else 8)
                    config = prefill(run, config, bandwidth)
                else:
                    batches(run, config, bandwidth, 40.0)
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
    document = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__, "bytes_per_s": bandwidth, "config": dataclasses.asdict(config),
        "failures": failures, "rows": rows,
    }  # fmt: skip
    print("CONFIG " + json.dumps(document["config"]), flush=True)
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
