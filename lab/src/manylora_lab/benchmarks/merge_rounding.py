"""How far the rounding of merged 16-bit weights moves a model's answers: the demo's, with its trained adapters.

Each row compares the distributions after some prompts with those of the same engine in float32, unmerged: the mean
Kullback-Leibler divergence and the largest, in millionths, and how often the most likely token is the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from manylora.config import MergeConfig
from manylora.executor.forward import Outputs
from manylora.pricing.shapes import ModelShape
from manylora.protocol import RunStep, SequenceStart, SetMerged, StepRow
from manylora.types import BASE
from manylora_lab.benchmarks.engine_rig import EngineRig
from manylora_lab.benchmarks.run_report import Row
from manylora_lab.benchmarks.step_rig import GREEDY, PAGE_TOKENS, StepRig

MOST_TOKENS = 64
ADAPTERS = ("french", "japanese")
"""The merged one, and the one beside it."""
MERGED, OTHER = 1, 2
MERGING = MergeConfig(mode="manylora", minority="mixed", mixed_16bit=True)
CASES = {
    "unmerged": (BASE, MERGED), "merged": (MERGED, MERGED), "other unmerged": (BASE, OTHER),
    "other beside merged": (MERGED, OTHER), "base": (BASE, BASE), "base beside merged": (MERGED, BASE),
}  # fmt: skip
"""What is merged, and whose rows these are."""


class RoundingRun:
    """The demo's engine in float32, then in bfloat16, and PEFT's own merge in bfloat16 where it is installed."""

    def __init__(self, shape: ModelShape, settings: Mapping[str, Any], demo: Path, num_prompts: int) -> None:
        self._shape = shape
        self._settings = {
            **settings, "load_format": "auto", "cuda_graphs": "off", "max_model_len": 256,
            "max_num_seqs": num_prompts, "max_batch_tokens": num_prompts * MOST_TOKENS,
        }  # fmt: skip
        self._demo = demo
        tokenizer = Tokenizer.from_file(str(demo / "model" / "tokenizer.json"))
        asked = json.loads((demo / "prompts.json").read_text())[:num_prompts]
        texts = [one["prompt"] if "prompt" in one else one["messages"][-1]["content"] for one in asked]
        self._prompts = [tokenizer.encode(text).ids[:MOST_TOKENS] for text in texts]

    def rows(self) -> Iterator[Row]:
        """One for each case."""
        exact = self._distributions("float32", {name: (BASE, own) for name, (_, own) in CASES.items()})
        rough = self._distributions("bfloat16", CASES)
        for name in CASES:
            yield {"case": name, **compared(exact[name], rough[name])}
        theirs = self._by_peft()
        if theirs is not None:
            yield {"case": "merged by PEFT", **compared(exact["merged"], theirs)}

    def _distributions(self, dtype: str, cases: Mapping[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
        """float64 log-probabilities [prompts, vocab] after each prompt."""
        found = {}
        settings = {**self._settings, "dtype": dtype}
        with EngineRig(self._shape, settings, self._demo / "model", MERGING) as rig:
            steps = StepRig(rig.worker, rig.policy.num_pages)
            steps.load([str(self._demo / "adapters" / name) for name in ADAPTERS])
            for number, (name, (merged, own)) in enumerate(cases.items(), 1):
                done = steps.direct.set_merged(SetMerged(number, merged))
                assert done.ok, done.error
                found[name] = self._step(rig, steps, number, merged, own)
        return found

    def _step(self, rig: EngineRig, steps: StepRig, number: int, merged: int, own: int) -> torch.Tensor:
        forward = rig.worker._forward
        assert forward is not None
        computed: list[Outputs] = []
        compute = forward.compute

        def kept(*args: Any) -> Outputs:
            computed.append(compute(*args))
            return computed[-1]

        starts, each = [], MOST_TOKENS // PAGE_TOKENS
        for row, prompt in enumerate(self._prompts):
            pages = tuple(range(row * each, row * each + each))
            starts.append(SequenceStart(row, 0, own, tuple(prompt), len(prompt), 0, pages, GREEDY, ()))
        rows = tuple(StepRow(start.sequence, 0, len(start.tokens), 1) for start in starts)
        shards, rig.worker._shards = rig.worker._shards, None  # whose parts would be computed side by side
        forward.compute = kept  # type: ignore[method-assign, assignment]
        done = steps.direct.run_step(RunStep(number, tuple(starts), rows, merged)).done
        forward.compute, rig.worker._shards = compute, shards  # type: ignore[method-assign]
        assert done.ok, done.error
        for start in starts:
            steps.direct.end_sequence(start.sequence)
        (outputs,) = computed
        return outputs.logits[: len(rows)].double().log_softmax(-1).cpu()

    def _by_peft(self) -> torch.Tensor | None:
        try:
            import peft
            import transformers
        except ImportError:
            return None
        device = self._settings["device"]
        base = transformers.AutoModelForCausalLM.from_pretrained(self._demo / "model", dtype=torch.bfloat16)
        adapted = peft.PeftModel.from_pretrained(base, self._demo / "adapters" / ADAPTERS[0])
        model = adapted.to(torch.bfloat16).merge_and_unload().to(device).eval()
        with torch.inference_mode():
            each = [model(torch.tensor([prompt], device=device)).logits[0, -1] for prompt in self._prompts]
        logits: torch.Tensor = torch.stack(each)
        return logits.double().log_softmax(-1).cpu()


def compared(exact: torch.Tensor, found: torch.Tensor) -> Row:
    """Of log-probabilities [prompts, vocab]."""
    divergence = (exact.exp() * (exact - found)).sum(-1)
    same = (exact.argmax(-1) == found.argmax(-1)).double().mean()
    return {
        "kl_mean_e6": round(1e6 * float(divergence.mean()), 2),
        "kl_largest_e6": round(1e6 * float(divergence.max()), 2),
        "same_top1": round(float(same), 4),
        "prompts": len(exact),
    }
