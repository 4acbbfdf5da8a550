"""Throughput on the CPU demo beside another commit's, in interleaved pairs.

    python -m manylora_lab.benchmarks.pairs --against COMMIT --pairs 15 --out FILE.json

An engine of each tree stays up in a process of its own, and they take turns with the same requests: 64 at once
over the base and eight adapters, 32 prompt and 128 generated tokens, greedy. A pair gives the ratio of their
rates; shown is the median with a bootstrap 95 % interval. All tokens must be equal; where the two best logits of a
sequence lie within 2e-4, which comes first is rounding: such a sequence is counted, and compared up to there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manylora_lab.bench.provenance import ROOT, Provenance, add_flags, commit_of

REQUESTS, PROMPT, GENERATE, ADAPTERS = 64, 32, 128, 8
DRAWS = 10_000
TIE = 2e-4  # of log-probability, as in tests/parity
ENGINE = """
import json, random, sys, time
from pathlib import Path
from manylora import LLM, SamplingParams
demo, (requests, prompt, generate, adapters) = Path(sys.argv[1]), map(int, sys.argv[2:])
folders = {folder.name: str(folder) for folder in sorted((demo / "adapters").iterdir())[:adapters]}
models = [[None, *folders][i % (adapters + 1)] for i in range(requests)]
params = SamplingParams(max_tokens=generate, temperature=0.0, ignore_eos=True)
best_two = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=2)
def prompts_of(seed):
    draw = random.Random(seed)
    return [[draw.randrange(5, 4096) for _ in range(prompt)] for _ in range(requests)]
def run(seed):
    prompts = prompts_of(seed)
    began = time.perf_counter()
    results = llm.generate(prompts, params, models)
    seconds = time.perf_counter() - began
    return [seconds, [r.outputs[0].token_ids for r in results]]
def gap_after(seed, number, tokens):
    result = llm.generate([prompts_of(seed)[number] + tokens], best_two, [models[number]])[0]
    values = sorted(found.logprob for found in result.outputs[0].logprobs[0].values())
    return values[-1] - values[-2]
with LLM(str(demo / "model"), folders, device="cpu", dtype="float32") as llm:
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps({"run": run, "gap_after": gap_after}[name](*arguments)), flush=True)
"""


class Engine:
    """An engine of one tree, which runs what it is told and says how long it took."""

    def __init__(self, tree: Path) -> None:
        shape = map(str, (REQUESTS, PROMPT, GENERATE, ADAPTERS))
        self._process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(ROOT / "demo"), *shape],
            env={**os.environ, "PYTHONPATH": str(tree / "src")}, cwd=tree, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def run(self, seed: int) -> tuple[float, list[list[int]]]:
        """Seconds, and every request's tokens."""
        seconds, tokens = self._ask("run", seed)
        return seconds, tokens

    def gap_after(self, seed: int, number: int, tokens: list[int]) -> float:
        """How far apart the two best log-probabilities are where request ``number`` has these tokens."""
        return float(self._ask("gap_after", seed, number, tokens))

    def _ask(self, *question: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@contextlib.contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """A checkout of another commit, gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "other"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def interval(ratios: list[float]) -> list[float]:
    """The bootstrap's 95 % of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return [medians[int(0.025 * DRAWS)], medians[int(0.975 * DRAWS)]]


def count_ties(engine: Engine, seed: int, ours: list[list[int]], others: list[list[int]]) -> int:
    """How many requests part at two equal logits; those that part anywhere else are an error."""
    ties = 0
    for number, (mine, theirs) in enumerate(zip(ours, others, strict=True)):
        if mine != theirs:
            parts = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
            gap = engine.gap_after(seed, number, mine[:parts])
            assert gap <= TIE, (
                f"seed {seed}, request {number}: tokens differ where logits are {gap:.2g} apart"
            )
            ties += 1
    return ties


def measure(other: Path, pairs: int) -> dict[str, Any]:
    """The pairs' seconds and ratios; the first pair warms up and is left out."""
    engines = [Engine(other), Engine(ROOT)]
    seconds: list[list[float]] = []
    ties = 0
    for seed in range(pairs + 1):
        turns = (0, 1) if seed % 2 else (1, 0)  # neither is always first
        results = {number: engines[number].run(seed) for number in turns}
        ties += count_ties(engines[1], seed, results[1][1], results[0][1])
        seconds.append([results[0][0], results[1][0]])
    for engine in engines:
        engine.close()
    ratios = [before / after for before, after in seconds[1:]]
    return {
        "seconds": [[round(value, 4) for value in pair] for pair in seconds[1:]],
        "rate_ratio_median": round(statistics.median(ratios), 4),
        "rate_ratio_interval": [round(value, 4) for value in interval(ratios)],
        "sequences": (pairs + 1) * REQUESTS,
        "ties": ties,
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", required=True, metavar="COMMIT", help="whose rate is the measure")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--out", type=Path)
    add_flags(parser)
    args = parser.parse_args()
    recording = Provenance.of(args, "the pair's number")
    with tree_of(args.against) as other:
        against, found = commit_of(other), measure(other, args.pairs)
    print(json.dumps({name: found[name] for name in ("rate_ratio_median", "rate_ratio_interval")}))
    if args.out:
        report = {"benchmark": "pairs", "against": against, **found, "provenance": recording.provenance()}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
