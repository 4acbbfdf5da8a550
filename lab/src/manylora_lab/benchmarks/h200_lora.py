"""What LoRA adds to a layer in every kind of step, for several sizes of its kernels. For development.

    python -m manylora_lab.benchmarks.h200_lora --out lora.json [--seconds 80]

Every kind of step runs as the engine runs it, with the configuration that is stored for this device and with
candidates, in graphs that take turns; each candidate's results are compared with float32 first. Shrink's sizes are
chosen with expand's as they are, then expand's, then which of product and LoRA goes first or beside. The last line
is one JSON object: microseconds a layer by kind, and ``tuned``, the row for ``kernels/tuned/lora.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from manylora.kernels.shapes import ProjectionGroup
from manylora.kernels.triton.lora import as_row, lora_kernels_on
from manylora.kernels.triton.lora_launch import DEFAULT, Beside, LoraConfig, LoraKernels, LoraTileConfig
from manylora.kernels.triton.operations import TritonOps
from manylora.kernels.triton.products import products_on
from manylora_lab.bench.kernels import CUDA_DECODERS, DecoderSizes, read_bandwidth
from manylora_lab.bench.provenance import Provenance, add_flags
from manylora_lab.benchmarks.lora_layer import LoraLayerRig, StepCase

LAYERS = 8
MIXED_TOKENS = {"prompt 64": 128, "31+220": 384, "31+600": 1024, "31+1500": 2048}
"""Kinds of steps with prompts, and up to how many tokens what is best for one is to be used."""


def kinds(scale: int = 1) -> dict[str, tuple[list[int], int, int | None]]:
    """(runs, tokens of the bucket, its rows; no rows: eager) by kind."""
    rows = 128 // scale
    return {
        "decode 1": ([1], 1, 1),
        "decode 32": ([1] * (32 // scale), 32 // scale, 32 // scale),
        "decode 128": ([1] * rows, rows, rows),
        "prompt 64": ([64 // scale], 64 // scale, 64 // scale - 1),
        "31+220": ([1] * (31 // scale) + [220 // scale], 256 // scale, rows),
        "31+600": ([1] * (31 // scale) + [600 // scale], 640 // scale, rows),
        "31+1500": ([1] * (31 // scale) + [1500 // scale], 1536 // scale, rows),
        "8x2000": ([2000 // scale] * 8, 8 * (2000 // scale), None),
    }


Sizes = dict[str, Any]


def shrink(step: int, programs: int, registers: int = 0, **more: Any) -> Sizes:
    return {
        "chunk": 512, "shrink_columns": 512, "shrink_step": step, "shrink_warps": 4, "stages": 1,
        "shrink_programs": programs, "shrink_registers": registers, **more,
    }  # fmt: skip


def expand(tile_columns: int, warps: int, programs: int, registers: int = 168, **more: Any) -> Sizes:
    return {
        "expand_columns": 512, "tile_columns": tile_columns, "expand_step": 128, "expand_warps": warps,
        "expand_programs": programs, "expand_registers": registers, **more,
    }  # fmt: skip


SHRINKS: dict[int, list[Sizes]] = {
    16: [shrink(512, 16), shrink(512, 6)],
    32: [shrink(256, 16, 168), shrink(256, 4, 168)],
    64: [shrink(128, 16, 168, stages=3), shrink(128, 4, 168, stages=3)],
}
"""By tokens of a tile. Programs alone make no other kernel, hence nothing to compile."""
EXPANDS: dict[int, list[Sizes]] = {
    16: [
        expand(0, 2, 16), expand(128, 2, 6), expand(128, 2, 16), expand(256, 4, 4, 128, expand_step=256),
    ],
    32: [expand(128, 4, 4), expand(128, 4, 16), expand(64, 2, 8, expand_step=64)],
    64: [expand(128, 4, 3), expand(128, 4, 8), expand(128, 4, 2, 0, expand_tokens=128)],
}  # fmt: skip
LONG_SHRINKS = [
    {"tile_tokens": 64, "shrink_step": 128, "shrink_warps": 4, "stages": 3},
    {"tile_tokens": 64, "shrink_step": 64, "shrink_warps": 4, "stages": 5},
    {"tile_tokens": 64, "shrink_step": 128, "shrink_warps": 8, "stages": 3},
]
LONG_EXPANDS = [
    {"expand_tokens": tokens, "expand_columns": columns, "expand_step": step, "expand_warps": warps,
     "expand_registers": registers}
    for tokens, columns, step, warps, registers in (
        (64, 512, 128, 4, 0), (64, 128, 128, 4, 128), (256, 128, 128, 4, 128), (512, 512, 128, 4, 0),
        (512, 128, 64, 4, 96), (256, 64, 64, 4, 96),
    )
]  # fmt: skip


def name_of(sizes: Sizes) -> str:
    short = {"shrink": "s", "expand": "e"}
    return " ".join(
        "".join(short.get(word, word[0]) for word in key.split("_")) + str(int(value))
        for key, value in sizes.items()
        if key not in ("chunk", "shrink_columns", "expand_columns") or value != 512
    )


def everywhere(config: LoraConfig, sizes: LoraTileConfig) -> LoraConfig:
    """The sizes for all steps but large ones."""
    return dataclasses.replace(config, short=sizes, mixed=((2048, sizes),))


class LoraBench:
    """``rounds`` of replays; reports go to ``report``."""

    def __init__(
        self, rig: LoraLayerRig, ops: TritonOps, cases: dict[str, StepCase], deadline: float, rounds: int
    ) -> None:
        self.rig, self.ops, self.cases, self.deadline, self.rounds = rig, ops, cases, deadline, rounds
        self.stored = lora_kernels_on(rig.device).config
        self.report: dict[str, dict[str, Any]] = {kind: {} for kind in cases}
        self.failures: dict[str, str] = {}

    @property
    def is_late(self) -> bool:
        return time.perf_counter() > self.deadline

    def added(self, kind: str, configs: dict[str, LoraConfig]) -> dict[str, float]:
        """The added times of the configs that are right; the rest are reported."""
        right = {}
        for name, config in configs.items():
            error = self._attempt(f"{kind}: {name}", functools.partial(self.cases[kind].error, config))
            if error is not None:
                right[name] = config
        found = self._attempt(kind, functools.partial(self.cases[kind].added_us, right, self.rounds))
        if found is None:
            return {}
        base, added = found
        self.report[kind]["base"] = round(base, 1)
        self.report[kind].setdefault("us", {}).update({name: round(us, 1) for name, us in added.items()})
        return dict(added)

    def _attempt(self, name: str, step: Any) -> Any:
        try:
            with torch.inference_mode():
                return step()
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.failures[name] = f"{type(error).__name__}: {' / '.join(lines[-2:])}"[:200]
            return None

    def best(self, kinds: tuple[str, ...], configs: dict[str, LoraConfig]) -> tuple[str, float] | None:
        """(name, microseconds) of the configuration that adds least to all of these kinds together."""
        sums: dict[str, float] = {}
        for number, kind in enumerate(kinds):
            found = self.added(kind, configs)
            sums = {
                name: us + sums.get(name, 0.0) for name, us in found.items() if number == 0 or name in sums
            }
        return min(sums.items(), key=lambda item: item[1], default=None)

    def tune(self, kinds: tuple[str, ...], tiles: tuple[int, ...]) -> LoraTileConfig | None:
        """The best sizes for steps of these kinds, the stored ones among them."""
        trials: dict[str, LoraTileConfig] = {}
        for tokens in tiles:
            base = dataclasses.replace(DEFAULT.short, tile_tokens=tokens, **EXPANDS[tokens][0])
            trials |= {
                f"t{tokens} {name_of(sizes)}": dataclasses.replace(base, **sizes) for sizes in SHRINKS[tokens]
            }
        started = dataclasses.replace(self.stored, beside=(), writes_from=0)
        configs = {name: everywhere(started, sizes) for name, sizes in trials.items()}
        self.best(kinds, {"stored": self.stored})
        found = self.best(kinds, configs)
        if found is None:
            return None
        by_tile: dict[str, LoraTileConfig] = {}
        for tokens in tiles:
            mine = {
                name: us
                for name, us in self._sums(kinds).items()
                if name in trials and trials[name].tile_tokens == tokens
            }
            if not mine:
                continue
            shrinks = trials[min(mine, key=lambda name: mine[name])]
            by_tile |= {
                f"t{tokens} {name_of(sizes)}": dataclasses.replace(shrinks, **sizes)
                for sizes in EXPANDS[tokens]
            }
        found = self.best(kinds, {name: everywhere(started, sizes) for name, sizes in by_tile.items()})
        if found is None:
            return None
        for kind in kinds:
            self.report[kind]["best"] = found[0]
        return by_tile[found[0]]

    def _sums(self, kinds: tuple[str, ...]) -> dict[str, float]:
        tables = [self.report[kind].get("us", {}) for kind in kinds]
        return {name: sum(t[name] for t in tables) for name in tables[0] if all(name in t for t in tables)}

    def tune_long(self) -> LoraTileConfig | None:
        kind = "8x2000"
        started = dataclasses.replace(self.stored, beside=(), writes_from=1)
        base = dataclasses.replace(DEFAULT.long, **LONG_EXPANDS[1])

        def configs(trials: dict[str, LoraTileConfig]) -> dict[str, LoraConfig]:
            return {name: dataclasses.replace(started, long=sizes) for name, sizes in trials.items()}

        self.best((kind,), {"stored": self.stored})
        trials = {name_of(sizes): dataclasses.replace(base, **sizes) for sizes in LONG_SHRINKS}
        found = self.best((kind,), configs(trials))
        if found is None:
            return None
        trials = {name_of(s): dataclasses.replace(trials[found[0]], **s) for s in LONG_EXPANDS}
        found = self.best((kind,), configs(trials))
        if found is None:
            return None
        self.report[kind]["best"] = found[0]
        return trials[found[0]]

    def orders(self, kind: str, sizes: LoraTileConfig) -> None:
        """LoRA beside the product, either preferred, and expand before the product, against expand after it."""
        plain = everywhere(dataclasses.replace(self.stored, beside=(), writes_from=0), sizes)
        groups = tuple(group.name for group in self.rig.geometry.groups)
        configs = {"plain": plain}
        for pdl in (False, True):
            for name, first in {"LoRA": (), "product": groups, "gate": ("gate_up",)}.items():
                how = ((4096, Beside(sizes, first, pdl)),)
                configs[f"beside, {name} first{', pdl' * pdl}"] = dataclasses.replace(plain, beside=how)
        if not kind.startswith("decode"):
            configs["writes"] = dataclasses.replace(plain, writes_from=1)
        us = self.report[kind].pop("us", {})
        self.report[kind]["orders"] = {k: round(v, 1) for k, v in self.added(kind, configs).items()}
        self.report[kind]["us"] = us

    def compile(self, threads: int) -> None:
        """Every candidate's kernels, side by side. What fails here fails again, and is reported, where it is
        used."""
        began, case, long_case = time.perf_counter(), self.cases["31+220"], self.cases["8x2000"]
        first, second = [], []
        for tokens in SHRINKS:
            base = {**SHRINKS[tokens][0], **EXPANDS[tokens][0], "tile_tokens": tokens}
            for choices, work in ((SHRINKS, first), (EXPANDS, second)):
                tiles = {
                    name_of({**sizes, "shrink_programs": 0, "expand_programs": 0}): sizes
                    for sizes in choices[tokens]
                }
                for sizes in tiles.values():
                    tile = dataclasses.replace(DEFAULT.short, **{**base, **sizes})
                    work.append((case, everywhere(self.stored, tile)))
        for choices, work in ((LONG_SHRINKS, first), (LONG_EXPANDS, second)):
            for sizes in choices:
                tile = dataclasses.replace(DEFAULT.long, **{**LONG_SHRINKS[0], **sizes})
                work.append((long_case, dataclasses.replace(self.stored, long=tile, writes_from=1)))
        groups = self.rig.geometry.groups
        jobs = (
            [(*one, group, False) for group in (groups[0], groups[3]) for one in first],
            [(*one, group, True) for group in groups for one in second],
        )
        failed = 0
        with ThreadPoolExecutor(threads) as pool:
            for some in jobs:
                done = pool.map(lambda job: self._attempt("compile", lambda: _compiled(*job)), some)
                failed += list(done).count(None)
        count = sum(map(len, jobs))
        print(f"{count} kernels, {failed} failed, {time.perf_counter() - began:.0f} s", flush=True)


def _compiled(case: StepCase, config: LoraConfig, group: ProjectionGroup, with_expand: bool) -> bool:
    rig = case.rig
    kernels = LoraKernels(config, rig.multiprocessors)
    plan = case.plan_for(kernels)
    partial = kernels.shrink(case.inputs[group.name], rig.pool, 0, group, plan)
    if with_expand:
        y = torch.empty(case.tokens, group.offsets[-1], dtype=rig.dtype, device=rig.device)
        kernels.expand(y, partial, rig.pool, 0, group, plan, add=not plan.is_first)
    return True


TINY = DecoderSizes("tiny", 2, 64, 4, 2, 16, 96)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--rehearse", action="store_true", help="tiny, in the interpreter, without a GPU")
    add_flags(parser)
    arguments = parser.parse_args()
    recording = Provenance.of(arguments, 0)
    began, tiny = time.perf_counter(), arguments.rehearse
    if tiny:
        for choices in (*SHRINKS.values(), *EXPANDS.values(), LONG_SHRINKS, LONG_EXPANDS):
            del choices[2:]
    torch.manual_seed(0)
    device = torch.device("cpu" if tiny else "cuda")
    decoder, dtype = (TINY, torch.float16) if tiny else (CUDA_DECODERS[0], torch.bfloat16)
    with torch.inference_mode():
        bandwidth = 1e12 if tiny else read_bandwidth(device)
        rig = LoraLayerRig.of(decoder, device, dtype, 2 if tiny else LAYERS, 136)
        ops = TritonOps() if tiny else TritonOps(products=products_on(device), dependent=True)
        cases = {name: StepCase(rig, ops, *kind) for name, kind in kinds(16 if tiny else 1).items()}
    bench = LoraBench(rig, ops, cases, began + arguments.seconds, 1 if tiny else 11)
    if tiny:
        bench.stored = dataclasses.replace(DEFAULT, long_run=6)
    print(f"ready to compile after {time.perf_counter() - began:.0f} s", flush=True)
    bench.compile(1 if tiny else 14)
    tuned = bench.stored
    mixed: list[tuple[int, LoraTileConfig]] = []
    for kinds_together, tiles in [(tuple(k for k in cases if k.startswith("decode")), (16,))] + [
        ((kind,), (16, 32, 64)) for kind in MIXED_TOKENS
    ]:
        sizes = None if bench.is_late else bench.tune(kinds_together, tiles)
        if sizes is None:
            continue
        for kind in kinds_together:
            bench.orders(kind, sizes)
        if kinds_together[0] in MIXED_TOKENS:
            mixed.append((MIXED_TOKENS[kinds_together[0]], sizes))
        else:
            tuned = dataclasses.replace(tuned, short=sizes)
    long = None if bench.is_late else bench.tune_long()
    tuned = dataclasses.replace(tuned, long=long or tuned.long, mixed=tuple(mixed) or tuned.mixed)
    for kind, row in bench.report.items():
        row["floor"] = round(cases[kind].floor_bytes / bandwidth * 1e6, 1)
    document = {
        "device": "cpu" if tiny else torch.cuda.get_device_name(), "torch": torch.__version__,
        "seconds": round(time.perf_counter() - began), "failures": bench.failures, "kinds": bench.report,
        "tuned": as_row(tuned), "provenance": recording.provenance(),
    }  # fmt: skip
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, separators=(",", ":")), flush=True)


if __name__ == "__main__":
    main()
