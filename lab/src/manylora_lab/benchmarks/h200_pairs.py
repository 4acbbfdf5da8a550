"""This code beside another tree of it on one GPU, in turns: decode steps, first tokens, a chat.

    git archive COMMIT src lab demo/model/config.json | tar x -C TREE
    python -m manylora_lab.benchmarks.h200_pairs --before TREE --before-commit COMMIT --out pairs.json

Each turn is a process of its own, of either tree: Llama-2-7B shape, dummy weights, bfloat16. ``steps``:
milliseconds of captured decode steps of 1 and 32 rows, on the base and over as many adapters of rank 16 (``gpu``:
replayed back to back; ``wall1``, ``wall2``: on the clock, one and two in flight; ``sampled2``: with top-p).
``first``: milliseconds to the first token of a prompt of 64. ``chat``: TTFT of the trace of 10 requests a second,
its first ``--chat`` seconds. The report has every turn, and per figure the ratio of the medians, this tree's over
the other's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BATCHES = (1, 32)
STEPS, REPEATS = 120, 3
ENGINE = {
    "device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "max_model_len": 4096, "max_num_seqs": 128,
    "max_batch_tokens": 8192, "device_pool": "76GiB", "host_pool": "24GiB",
}  # fmt: skip


TURN = """
import json, pathlib, runpy, sys
place, program, work, out, chat_s = sys.argv[1:]
sys.path[:0] = [place, place + "/src", place + "/lab/src"]
found = runpy.run_path(program)["turn"](pathlib.Path(work), float(chat_s))
pathlib.Path(out).write_text(json.dumps(found))
"""
"""A turn's process: this program, on the packages of the tree at ``place``."""


def module(*names: str) -> Any:
    """The first of these that the process' tree has."""
    for name in names[:-1]:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return importlib.import_module(names[-1])


def benchmark(name: str) -> Any:
    """A benchmark of the process' tree, wherever that has them."""
    return module(f"benchmarks.{name}", f"manylora_lab.benchmarks.{name}")


def turn(work: Path, chat_s: float) -> dict[str, Any]:
    """What this process' tree takes. ``work`` keeps the files that all turns share."""
    from manylora.executor.build import build_worker
    from manylora.flags import build_settings
    from manylora.models.config import read_model_config

    h200, h200_aims = benchmark("h200"), benchmark("h200_aims")
    write_random_adapters = module(
        "manylora.warmup.random_adapters", "manylora.bench.random_adapters"
    ).write_random_adapters
    model, adapters = work / "model", work / "adapters"
    if not model.exists():
        h200.write_model(model, h200.SHAPES["llama-2-7b"])
        write_random_adapters(adapters, read_model_config(model), "bfloat16", [16], 40)
    paths = sorted(path for path in adapters.iterdir() if path.is_dir())
    settings = build_settings({**ENGINE, "model": str(model)})[0]
    worker, policy, info = build_worker(settings, registry_path=work / "registry.sqlite")
    found: dict[str, Any] = {"steps": steps(worker, policy.num_pages, [str(path) for path in paths])}
    aims = made_aims(h200_aims.Aims, worker, policy, info, {path.name: str(path) for path in paths}, work)
    for _ in range(2):  # the first one compiles
        asyncio.run(h200_aims.first(aims))
    rows = aims.report["first"][len(aims.report["first"]) // 2 :]
    found["first"] = {row["kind"]: row["ms"] for row in rows}
    if chat_s:
        found["chat"] = asyncio.run(chat(aims, work, chat_s))
    worker.close()
    return found


def steps(worker: Any, num_pages: int, adapters: list[str]) -> dict[str, float]:
    """Medians of repeats, by batch and figure."""
    h200_steps = benchmark("h200_steps")
    kind = getattr(h200_steps, "StepBench", None) or h200_steps.Bench
    bench = kind(worker, num_pages)
    bench.load(adapters)
    found: dict[str, float] = {}
    for adapted in (False, True):
        for batch in BATCHES:
            greedy = bench.starts(batch, adapted, h200_steps.GREEDY, STEPS + 1)
            sampled = bench.starts(batch, adapted, h200_steps.SAMPLED, STEPS + 1)
            middle = bench.starts(batch, adapted, h200_steps.GREEDY, 1, 300)
            taken: dict[str, list[float]] = {}
            for _ in range(REPEATS):
                taken.setdefault("gpu", []).append(bench.device_ms(middle, adapted, 40))
                taken.setdefault("wall1", []).append(bench.decode(greedy, STEPS, 1)["wall_ms"])
                taken.setdefault("wall2", []).append(bench.decode(greedy, STEPS, 2)["wall_ms"])
                taken.setdefault("sampled2", []).append(bench.decode(sampled, STEPS, 2)["wall_ms"])
            kind = "adapters" if adapted else "base"
            found |= {f"{batch} {kind} {name}": statistics.median(each) for name, each in taken.items()}
    for number in range(1, len(adapters) + 1):
        forget(worker, number)
    return found


def forget(worker: Any, adapter: int) -> None:
    """Evict and forget, in either tree's words."""
    if hasattr(worker, "obey"):
        from manylora.protocol import EvictAdapter, ForgetAdapter

        worker.obey(EvictAdapter(adapter))
        worker.obey(ForgetAdapter(adapter))
    else:
        worker.evict_adapter(adapter)
        worker.remove_adapter(adapter)


def made_aims(kind: Any, worker: Any, policy: Any, info: Any, adapters: dict[str, str], work: Path) -> Any:
    """``h200_aims.Aims`` of this process' tree."""
    args = argparse.Namespace(toy=False, rates="10", time_budget=1e9, out=str(work / "aims.json"))
    fields = {"worker": worker, "policy": policy, "info": info, "adapters": adapters, "args": args}
    fields |= {"report": {"left_out": []}, "began_s": 0.0, "recording": _Unrecorded()}
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in fields.items() if name in known})


class _Unrecorded:
    """The turn's report is the parent's."""

    def provenance(self) -> list[dict[str, Any]]:
        return []


async def chat(aims: Any, work: Path, most_s: float) -> dict[str, float]:
    """Mean, median and p99 of TTFT, and the mean of TPOT, in ms."""
    bench = benchmark("h200_aims_chat").Chat.of(aims, work / "chat")
    found = (await bench.serve(aims.open(bench.names, **bench.limits), "10", most_s)).summary
    ttft, tpot = found["ttft_ms"], found["tpot_ms"]
    return {
        "ttft mean": ttft["mean"],
        "ttft p50": ttft["p50"],
        "ttft p99": ttft["p99"],
        "tpot mean": tpot["mean"],
    }


def ratios(turns: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each figure, this tree's median over the other's."""
    found: dict[str, dict[str, float]] = {}
    for part in ("steps", "first", "chat"):
        for name in turns[0]["found"].get(part, {}):
            here, there = (
                statistics.median(one["found"][part][name] for one in turns if one["tree"] == tree)
                for tree in ("this", "before")
            )
            found.setdefault(part, {})[name] = round(here / there, 4)
    return found


def main() -> None:
    """See the module."""
    from manylora_lab.bench.provenance import ROOT, Provenance, add_flags  # the other tree may not have it

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="the other tree")
    parser.add_argument("--before-commit", default="unknown", help="the other tree's, noted in the report")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=2, help="of each tree")
    parser.add_argument("--chat", type=float, default=20.0, help="seconds of the chat; 0: none")
    add_flags(parser)
    args = parser.parse_args()
    recording = Provenance.of(args, "0 of the chat's tokens and of sampled rows; values decide no time")
    report: dict[str, Any] = {"before": args.before_commit, "this": recording.commit, "turns": []}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(args.turns):
            for tree, place in (("before", args.before.resolve()), ("this", ROOT)):
                out = Path(scratch) / f"{tree}{number}.json"
                arguments = [str(place), str(Path(__file__).resolve()), scratch, str(out), str(args.chat)]
                subprocess.run([sys.executable, "-c", TURN, *arguments], cwd=place, check=True)
                report["turns"].append({"tree": tree, "found": json.loads(out.read_text())})
                print(json.dumps(report["turns"][-1]), flush=True)
                if tree == "this":
                    report["ratios"] = ratios(report["turns"])
                report["provenance"] = recording.provenance()
                args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["ratios"]), flush=True)


if __name__ == "__main__":
    main()
