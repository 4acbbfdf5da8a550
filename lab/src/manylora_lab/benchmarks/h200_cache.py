"""Cache policies on one GPU: multi-turn chat over 100 adapters, Llama-2-7B shape, dummy weights, bfloat16.

For each trace and policy: an engine in this process with one pool of 12.6 GiB for KV and adapters, all adapters
requested once, then the trace. vLLM's figures for the same traces and machine, and the FastLibra paper's ratios,
are put beside. The report is written after every run; run from the repository's root:

    python -m manylora_lab.benchmarks.h200_cache --out cache.json --commit "$(git rev-parse --short HEAD)"

``--rates 10,20*0.7``: the 10/s trace, and the 20/s one stretched to 14/s. ``--previous FILE`` takes over the runs
of an earlier report. ``--toy`` does all of it in a minute on a CPU, on the shipped demo model.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import dataclasses
import gc
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from manylora.config import CACHE_POLICIES, ConfigError, parse_size
from manylora.flags import build_settings
from manylora_lab.bench.provenance import ROOT, Provenance, add_flags
from manylora_lab.bench.replay import ReplaySettings, replay, show_on_stderr
from manylora_lab.bench.serve import MeasuredReplay, measure
from manylora_lab.bench.summary import as_rows
from manylora_lab.bench.targets import EngineTarget, open_engine
from manylora_lab.benchmarks.h200 import SHAPES, measured_bandwidth, projections, write_model
from manylora_lab.benchmarks.plot_cache import PAPER, POLICIES, VLLM, compare, line_of
from manylora_lab.workloads.chat import TRACES, Turn, conversations, read_turns, shrunk, to_stream
from manylora_lab.workloads.stream import Stream

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
REHEARSAL_SEED = 1_000_003
MOST_PINNING_S = 120.0
Report = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Scale:
    """What differs between the real measurement and the toy."""

    shape: dict[str, Any]
    model: Path | None
    engine: dict[str, Any]
    num_adapters: int
    ranks: tuple[int, int]
    divisor: int = 1
    num_conversations: int | None = None
    speed: float = 1.0


REAL = Scale(
    shape=SHAPES["llama-2-7b"],
    model=None,
    engine={
        "device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "max_model_len": 4096,
        "max_num_seqs": 64, "max_batch_tokens": 8192, "device_pool": "12.6GiB",
    },
    num_adapters=100,
    ranks=(32, 64),
)  # fmt: skip
TOY = Scale(
    shape=json.loads((ROOT / "demo" / "model" / "config.json").read_text()),
    model=ROOT / "demo" / "model",
    engine={
        "device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8,
        "max_batch_tokens": 256, "device_pool": "2MiB",
    },
    num_adapters=8,
    ranks=(4, 8),
    divisor=16,
    num_conversations=8,
    speed=25.0,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CacheCell:
    """One measurement: a policy on a trace (by its rate), replayed ``scale`` times as fast."""

    policy: str
    rate: str
    scale: float

    @property
    def offered_per_s(self) -> float:
        return float(self.rate) * self.scale

    def is_of(self, run: dict[str, Any]) -> bool:
        found = (run["policy"], run["trace"], run["rate_scale"])
        return found == (self.policy, f"chat_{self.rate}rps", self.scale)


# ---------------------------------------------------------------- what is served


def turns_of(rate: str, scale: Scale) -> tuple[Turn, ...]:
    turns = read_turns(TRACES / f"chat_{rate}rps.jsonl.gz")
    if scale.num_conversations is not None:
        kept = list(conversations(turns))[: scale.num_conversations]
        turns = tuple(turn for turn in turns if turn.conversation in kept)
    if scale.divisor > 1:
        turns = shrunk(turns, scale.divisor)
    return tuple(dataclasses.replace(turn, adapter=turn.adapter % scale.num_adapters) for turn in turns)


def ranks_of(scale: Scale) -> list[int]:
    """Each adapter's rank: as the traces name it, and in turn where they do not."""
    ranks = [scale.ranks[adapter % 2] for adapter in range(scale.num_adapters)]
    if scale is REAL:
        for path in TRACES.glob("chat_*.jsonl.gz"):
            for turn in read_turns(path):
                ranks[turn.adapter] = turn.rank
    return ranks


def stream_of(turns: Sequence[Turn], scale: Scale, speed: float) -> Stream:
    """``speed`` times as fast, on the adapters of the scale: a toy's are not of the traces' ranks."""
    ranks = ranks_of(scale)
    served = [dataclasses.replace(turn, rank=ranks[turn.adapter]) for turn in turns]
    return to_stream(served, ranks=ranks).with_rate(speed)


def write_adapters(folder: Path, shape: dict[str, Any], ranks: Sequence[int]) -> None:
    """PEFT adapters adapter-0, ... on q, k, v and o in bfloat16, each a file and contents of its own."""
    noise = torch.randn(_num_values(shape, max(ranks)) + 64 * len(ranks), dtype=torch.bfloat16) * 0.02

    def write(adapter: int) -> None:
        rank = ranks[adapter]
        own = folder / f"adapter-{adapter}"
        own.mkdir(parents=True, exist_ok=True)
        config = {
            "peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(TARGETS),
            "task_type": "CAUSAL_LM", "bias": "none",
        }  # fmt: skip
        (own / "adapter_config.json").write_text(json.dumps(config))
        header = _header(shape, rank)
        # Written by hand: safetensors would ask for 256 tensors that share no memory.
        with open(own / "adapter_model.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            values = noise[64 * adapter :][: _num_values(shape, rank)]
            values.view(torch.uint8).numpy().tofile(file)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(len(ranks))))


def _sizes(shape: dict[str, Any], rank: int) -> dict[str, tuple[int, int]]:
    sizes = {}
    for layer in range(shape["num_hidden_layers"]):
        for module, (inputs, outputs) in projections(shape).items():
            if module.rpartition(".")[2] in TARGETS:
                stem = f"base_model.model.model.layers.{layer}.{module}"
                sizes[f"{stem}.lora_A.weight"] = (rank, inputs)
                sizes[f"{stem}.lora_B.weight"] = (outputs, rank)
    return sizes


def _num_values(shape: dict[str, Any], rank: int) -> int:
    return sum(rows * columns for rows, columns in _sizes(shape, rank).values())


def _header(shape: dict[str, Any], rank: int) -> bytes:
    """A safetensors header: names, types, shapes and byte ranges."""
    tensors, end = {}, 0
    for name, sizes in _sizes(shape, rank).items():
        begin, end = end, end + 2 * sizes[0] * sizes[1]
        tensors[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": (begin, end)}
    text = json.dumps(tensors).encode()
    return text + b" " * (-len(text) % 8)


# ---------------------------------------------------------------- the machine


def ceilings() -> dict[str, float]:
    """What the machine can do: copies on the device and to it, and matrix products."""
    host = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    square = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    to_device_s = _seconds(lambda: device.copy_(host, non_blocking=True))
    to_host_s = _seconds(lambda: host.copy_(device, non_blocking=True))
    gemm_s = _seconds(lambda: square @ square)
    return {
        "device_copy_bytes_per_s": measured_bandwidth(),
        "host_to_device_bytes_per_s": host.numel() / to_device_s,
        "device_to_host_bytes_per_s": host.numel() / to_host_s,
        "gemm_flops_per_s": 2 * 8192**3 / gemm_s,
    }


def _seconds(work: Any, repeats: int = 10) -> float:
    for _ in range(3):
        work()
    start: Any = torch.cuda.Event(enable_timing=True)
    end: Any = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


# ---------------------------------------------------------------- the runs


class CacheComparison:
    """All runs that fit into the time, and the report of them."""

    def __init__(self, args: argparse.Namespace, began_s: float) -> None:
        self.args = args
        self.scale = TOY if args.toy else REAL
        self.began_s = began_s
        self.work = Path(args.work)
        self.adapters = self.work / f"adapters-{'toy' if args.toy else 'llama-2-7b'}"
        self.model = self.scale.model or self.work / "llama-2-7b"
        self.rehearsed: set[int] = set()
        self.recording = Provenance.of(args, args.seed)
        self.previous = _previous(args.previous)
        self.report: Report = {
            "command": self.recording.command,
            "commit": self.recording.commit,
            "device": "cpu" if args.toy else torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "is_toy": args.toy,
            "engine": {**self.scale.engine, "host_pool": args.host_pool},
            "num_adapters": self.scale.num_adapters,
            "ceilings": {},
            "reference": {"vllm": [] if args.toy else VLLM, "paper": PAPER},
            "runs": list(self.previous.runs),
        }

    def prepare(self) -> None:
        """Model, adapters, ceilings."""
        if not self.model.exists():
            write_model(self.model, self.scale.shape)
        if not (self.adapters / "complete").exists():
            write_adapters(self.adapters, self.scale.shape, ranks_of(self.scale))
            (self.adapters / "complete").touch()
        print(f"adapters are there after {self.elapsed_s:.0f} s", flush=True)
        if not self.args.toy:
            self.report["ceilings"] = ceilings()
            torch.cuda.empty_cache()
            print(json.dumps(self.report["ceilings"]), flush=True)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_s

    def run_all(self, cells: Sequence[CacheCell]) -> None:
        for cell in cells:
            if any(cell.is_of(run) for run in self.report["runs"]):
                continue
            turns = turns_of(cell.rate, self.scale)
            needed_s = 1.5 * turns[-1].arrival_s / (cell.scale * self.scale.speed) + self.args.overhead
            if self.elapsed_s + needed_s > self.args.time_budget:
                print(f"no time left for {cell.policy} at {cell.offered_per_s:g}/s", flush=True)
                continue
            run = self.run(cell, turns)
            self.report["runs"].append(run)
            print(f"{self.elapsed_s:4.0f} s  {line_of(run)}", flush=True)
            self.save()

    def run(self, cell: CacheCell, turns: Sequence[Turn]) -> dict[str, Any]:
        """One cell; what goes wrong is said in it, so that the others still run."""
        run: dict[str, Any] = {
            "policy": cell.policy, "trace": f"chat_{cell.rate}rps", "rate_scale": cell.scale,
            "offered_per_s": cell.offered_per_s,
        }  # fmt: skip
        try:
            asyncio.run(self._measure(cell, turns, run))
        except Exception as error:
            run["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        gc.collect()
        return run

    async def _measure(self, cell: CacheCell, turns: Sequence[Turn], run: dict[str, Any]) -> None:
        values = {
            **self.scale.engine, "model": str(self.model), "adapter_dir": str(self.adapters),
            "host_pool": self.args.host_pool, "cache_policy": cell.policy,
        }  # fmt: skip
        settings = build_settings(values)[0]
        # Kernels are compiled on first use, for each size of a page: not while it is measured.
        if settings.cache.page_tokens not in self.rehearsed:
            await self._rehearse({**values, "host_pool": min(self.args.host_pool, "1GiB", key=parse_size)})
            self.rehearsed.add(settings.cache.page_tokens)
        began_s = time.monotonic()
        target = open_engine(settings)
        run["build_s"] = time.monotonic() - began_s
        run["engine_info"] = target.description
        try:
            run["pinned_s"] = await _pinned(target)
            replayed = ReplaySettings(
                seed=self.args.seed, show=show_on_stderr if self.args.progress else None
            )
            stream = stream_of(turns, self.scale, cell.scale * self.scale.speed)
            names = [f"adapter-{adapter}" for adapter in range(self.scale.num_adapters)]
            async with asyncio.timeout(self.args.run_limit):
                found = await measure(target, stream, replayed, is_warm=True, extra_adapters=names)
        finally:
            await target.close()
        run["summary"], run["counters"] = found.summary, found.engine
        if found.error is not None:
            run["error"] = found.error
        self._save_turns(run, found)

    async def _rehearse(self, values: dict[str, Any]) -> None:
        turns = turns_of("20", self.scale)[: self.args.rehearse]
        if not turns:
            return
        target = open_engine(build_settings(values)[0])
        try:
            stream = stream_of(turns, self.scale, self.scale.speed)
            done = await replay(target, stream, ReplaySettings(REHEARSAL_SEED))
        finally:
            await target.close()
        errors = [result.error for result in done.results if result.error is not None]
        print(f"rehearsed {len(turns)} turns, {len(errors)} failed {errors[:1]}", flush=True)

    def _save_turns(self, run: dict[str, Any], found: MeasuredReplay) -> None:
        """A line of JSON a run, in a file of their own."""
        if self.args.turns:
            with open(self.args.turns, "a") as file:
                of = {"policy": run["policy"], "offered_per_s": run["offered_per_s"]}
                file.write(json.dumps({**of, "turns": as_rows(found.results)}) + "\n")

    def save(self) -> None:
        self.report["comparison"] = compare(self.report)
        new = range(len(self.previous.runs), len(self.report["runs"]))
        self.report["provenance"] = [
            *self.previous.provenance,
            *self.recording.provenance("ceilings", "comparison", *(f"runs/{number}" for number in new)),
        ]
        out = Path(self.args.out)
        scratch = out.with_suffix(".part")
        scratch.write_text(json.dumps(self.report, indent=1) + "\n")
        scratch.replace(out)


async def _pinned(target: EngineTarget) -> float | None:
    """Wait until the host's pool is pinned, and say how long: meanwhile copies take several times as long. None
    where it took too long."""
    began_s = time.monotonic()
    while (await target.counters())["host_pages_pinned"] < target.description["num_host_pages"]:
        if time.monotonic() - began_s > MOST_PINNING_S:
            return None
        await asyncio.sleep(0.1)
    return time.monotonic() - began_s


class _Previous(NamedTuple):
    """An earlier report's runs that did not break, and where they come from."""

    runs: list[dict[str, Any]]
    provenance: list[dict[str, Any]]


def _previous(path: str | None) -> _Previous:
    if path is None:
        return _Previous([], [])
    report = json.loads(Path(path).read_text())
    kept = [number for number, run in enumerate(report["runs"]) if "error" not in run]
    places = {f"runs/{old}": f"runs/{new}" for new, old in enumerate(kept)}
    entries = [
        {**entry, "part": places[entry["part"]]}
        for entry in report.get("provenance", [])
        if entry["part"] in places
    ]
    return _Previous([report["runs"][number] for number in kept], entries)


def _cells(args: argparse.Namespace) -> list[CacheCell]:
    """All policies on one trace before the next, so that what is there can be compared."""
    cells = []
    for entry in args.rates.split(","):
        rate, _, scale = entry.partition("*")
        if not (TRACES / f"chat_{rate}rps.jsonl.gz").is_file():
            raise ConfigError(f"there is no trace of {rate!r}/s in {TRACES}")
        try:
            cells += [CacheCell(policy, rate, float(scale or 1)) for policy in args.order.split(",")]
        except ValueError:
            raise ConfigError(f"--rates: {scale!r} is not a number") from None
    for cell in cells:
        if cell.policy not in CACHE_POLICIES:
            raise ConfigError(f"--order: {cell.policy!r} is not one of {', '.join(CACHE_POLICIES)}")
        if not cell.scale > 0:
            raise ConfigError(f"--rates: {cell.scale} must be above 0")
    return cells


def main(argv: Sequence[str] | None = None) -> None:
    began_s = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--turns", help="also append every turn's times, a line a run, to this file")
    parser.add_argument("--previous", help="an earlier report, whose runs are kept and not repeated")
    parser.add_argument("--order", default=",".join(POLICIES), help="policies, most important first")
    parser.add_argument("--rates", default="10,20,5", help="traces, most important first; 20*0.7 is 14/s")
    parser.add_argument(
        "--time-budget", type=float, default=1e9, help="seconds; start no run that may pass it"
    )
    parser.add_argument("--overhead", type=float, default=40.0, help="seconds a run takes beside its trace")
    parser.add_argument(
        "--run-limit", type=float, default=240.0, help="seconds after which a run is given up"
    )
    parser.add_argument("--rehearse", type=int, default=120, help="turns before the first run, unmeasured")
    parser.add_argument("--host-pool", help="size (default: 48GiB, 8MiB with --toy)")
    parser.add_argument("--work", default=str(Path(tempfile.gettempdir()) / "manylora-h200-cache"))
    parser.add_argument("--seed", type=int, default=0)
    add_flags(parser)
    parser.add_argument("--toy", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--progress", action="store_true")
    args = parser.parse_args(argv)
    args.host_pool = args.host_pool or ("8MiB" if args.toy else "48GiB")
    try:
        cells = _cells(args)
    except ConfigError as error:
        parser.error(str(error))
    comparison = CacheComparison(args, began_s)
    comparison.prepare()
    comparison.save()
    comparison.run_all(cells)
    print(f"all done after {comparison.elapsed_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
