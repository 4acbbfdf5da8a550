"""Nine models on a CPU: manylora beside transformers + PEFT and merged copies, in one run, on the demo model.

64 requests at once, 32 prompt and 128 generated tokens, greedy, no end-of-sequence, round-robin over the
base and eight adapters, float32, two threads. The systems take turns, so that noise of the machine meets all
alike; compare the ratios. Also draws where a manylora step's time goes. Run from the repository's root:

    python -m manylora_lab.benchmarks.cpu_vs_peft --out docs/results/cpu_vs_peft.json \\
        --picture docs/results/cpu_vs_peft.png
"""

from __future__ import annotations

import argparse
import collections
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers

from manylora import LLM, SamplingParams
from manylora_lab.bench.provenance import ROOT, Provenance, add_flags

DEMO = ROOT / "demo"
REQUESTS, PROMPT, GENERATE, ADAPTERS, THREADS = 64, 32, 128, 8, 2
Run = Callable[[list[list[int]], list[str | None]], list[list[int]]]


class ManyloraSide:
    """The engine in this process, all adapters served."""

    def __init__(self, adapters: dict[str, str]) -> None:
        self.llm = LLM(str(DEMO / "model"), adapters=adapters, device="cpu", dtype="float32")

    def run(self, prompts: list[list[int]], models: list[str | None]) -> list[list[int]]:
        params = SamplingParams(max_tokens=GENERATE, temperature=0.0, ignore_eos=True)
        return [r.outputs[0].token_ids for r in self.llm.generate(prompts, params, models)]


class Peft:
    """transformers + PEFT, all adapters loaded once."""

    def __init__(self, adapters: dict[str, str]) -> None:
        names = list(adapters)
        self.model = peft.PeftModel.from_pretrained(_plain(), adapters[names[0]], adapter_name=names[0])
        for name in names[1:]:
            self.model.load_adapter(adapters[name], adapter_name=name)
        self.model.eval()

    @torch.inference_mode()
    def per_adapter(self, prompts: list[list[int]], models: list[str | None]) -> list[list[int]]:
        """Each model's requests as one batch, one model after the other."""
        results: list[list[int]] = [[] for _ in prompts]
        for name in dict.fromkeys(models):
            mine = [i for i, model in enumerate(models) if model == name]
            if name is None:
                with self.model.disable_adapter():
                    outs = _generate(self.model, [prompts[i] for i in mine])
            else:
                self.model.set_adapter(name)
                outs = _generate(self.model, [prompts[i] for i in mine])
            for i, out in zip(mine, outs, strict=True):
                results[i] = out
        return results

    @torch.inference_mode()
    def mixed(self, prompts: list[list[int]], models: list[str | None]) -> list[list[int]]:
        """All requests in one batch, by PEFT's ``adapter_names``."""
        return _generate(self.model, prompts, adapter_names=[m or "__base__" for m in models])

    @torch.inference_mode()
    def base_only(self, prompts: list[list[int]], models: list[str | None]) -> list[list[int]]:
        """The base model alone, one batch: no adapters anywhere."""
        with self.model.disable_adapter():
            return _generate(self.model, prompts)


class MergedCopies:
    """transformers with a copy of the model for each adapter, merged into its weights; and one without."""

    def __init__(self, adapters: dict[str, str]) -> None:
        self.models: dict[str | None, Any] = {None: _plain()}
        for name, folder in adapters.items():
            merged: Any = peft.PeftModel.from_pretrained(_plain(), folder).merge_and_unload()
            self.models[name] = merged.eval()

    @property
    def weight_bytes(self) -> int:
        """Of all copies."""
        return sum(_weight_bytes(model) for model in self.models.values())

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], models: list[str | None]) -> list[list[int]]:
        """Each copy's requests as one batch, one copy after the other."""
        results: list[list[int]] = [[] for _ in prompts]
        for name in dict.fromkeys(models):
            mine = [i for i, model in enumerate(models) if model == name]
            for i, out in zip(mine, _generate(self.models[name], [prompts[i] for i in mine]), strict=True):
                results[i] = out
        return results


def _plain() -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def _weight_bytes(model: Any) -> int:
    return sum(each.numel() * each.element_size() for each in model.parameters())


def _generate(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    ids = torch.tensor(prompts)
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=GENERATE,
        min_new_tokens=GENERATE,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return [row[PROMPT:].tolist() for row in out]


def measure(repeats: int) -> dict[str, Any]:
    """Tokens per second of every system, in turns, and how many requests agree on all tokens."""
    folders = sorted((DEMO / "adapters").iterdir())[:ADAPTERS]
    adapters = {folder.name: str(folder) for folder in folders}
    models = [([None, *adapters])[i % (ADAPTERS + 1)] for i in range(REQUESTS)]
    generator = np.random.default_rng(0)
    ours, theirs, copies = ManyloraSide(adapters), Peft(adapters), MergedCopies(adapters)
    systems: dict[str, tuple[Run, list[str | None]]] = {
        "PEFT, one mixed batch": (theirs.mixed, models),
        "PEFT, one batch per adapter": (theirs.per_adapter, models),
        "merged copies, one batch each": (copies.run, models),
        "manylora, nine models": (ours.run, models),
        "manylora, base only": (ours.run, [None] * REQUESTS),
        "transformers, base only": (theirs.base_only, [None] * REQUESTS),
    }
    times: dict[str, list[float]] = collections.defaultdict(list)
    agree = total = 0
    for repeat in range(repeats + 1):
        prompts = generator.integers(5, 4096, (REQUESTS, PROMPT)).tolist()
        results = {}
        for name, (run, assigned) in systems.items():
            began = time.perf_counter()
            results[name] = run(prompts, assigned)
            if repeat:  # the first round warms up
                times[name].append(time.perf_counter() - began)
        pairs = zip(results["manylora, nine models"], results["PEFT, one batch per adapter"], strict=True)
        agree += sum(a == b for a, b in pairs)
        total += REQUESTS
    rates = {name: REQUESTS * GENERATE / statistics.median(t) for name, t in times.items()}
    breakdown = step_breakdown(ours, generator.integers(5, 4096, (REQUESTS, PROMPT)).tolist(), models)
    ours.llm.close()
    return {
        "tokens_per_s": rates,
        "all_seconds": times,
        "ratio_to_peft_per_adapter": rates["manylora, nine models"] / rates["PEFT, one batch per adapter"],
        "ratio_to_peft_mixed": rates["manylora, nine models"] / rates["PEFT, one mixed batch"],
        "ratio_to_merged_copies": rates["manylora, nine models"] / rates["merged copies, one batch each"],
        "weight_bytes": {
            "merged copies": copies.weight_bytes,
            "one base and all adapters": _weight_bytes(theirs.model),
        },
        "ratio_to_transformers_base": rates["manylora, nine models"] / rates["transformers, base only"],
        "nine_models_over_one": rates["manylora, nine models"] / rates["manylora, base only"],
        "requests_equal_to_peft": [agree, total],
        "step_ms": breakdown,
    }


PARTS = ("lora", "attention", "write_kv", "_rope", "rms_norm", "add_rms_norm", "gate_mul")


def step_breakdown(
    ours: ManyloraSide, prompts: list[list[int]], models: list[str | None]
) -> dict[str, float]:
    """Milliseconds of a decode step by part, by wrapping the ops; the wrapping itself costs a little."""
    driver = ours.llm._llm._driver
    worker: Any = driver._ports._executor
    spent: dict[str, float] = collections.defaultdict(float)

    def timed(owner: Any, method: str, label: str) -> None:
        original = getattr(owner, method)  # bound, where the owner is an object

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent[label] += time.perf_counter() - began

        object.__setattr__(owner, method, wrapper)  # some owners are frozen

    decoder = worker._forward.decoder
    ops = decoder.ops
    for part in PARTS:
        timed(ops, part, part)
    timed(worker._inputs, "build", "inputs")
    timed(decoder, "forward", "forward")
    timed(worker._forward, "run", "compute")
    timed(worker, "_launched", "run")
    timed(worker, "obey", "step")
    timed(driver._machine, "handle", "policy")
    before, began = ours.llm.stats(), time.perf_counter()
    ours.run(prompts, models)
    wall = time.perf_counter() - began
    steps = ours.llm.stats().steps - before.steps
    per_step = {name: 1e3 * seconds / steps for name, seconds in spent.items()}
    # The parts of a step run side by side: their time is shown as its share of the step's wall time.
    share = min(1.0, per_step["compute"] / per_step["forward"])
    for name in (*PARTS, "forward"):
        per_step[name] *= share
    inside = sum(per_step[part] for part in PARTS)
    return {
        "base matrix products and the rest of forward": per_step["forward"] - inside,
        "LoRA": per_step["lora"],
        "attention": per_step["attention"],
        "write KV": per_step["write_kv"],
        "norms, rope, activation": sum(per_step[p] for p in PARTS[3:]),
        "inputs": per_step["inputs"],
        "sampling": per_step["run"] - per_step["forward"] - per_step["inputs"],
        "handing over, waiting": per_step["step"] - per_step["run"],
        "policy": per_step["policy"],
        "loop, threads, text": 1e3 * wall / steps - per_step["step"] - per_step["policy"],
    }


def draw(breakdown: dict[str, float], rates: dict[str, float], path: str) -> None:
    """Where a step's time goes, above; tokens per second of the systems, below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 6), layout="constrained")
    left = 0.0
    for name, ms in breakdown.items():
        top.barh(["step"], [ms], left=left, label=f"{name}: {ms:.2f} ms")
        left += ms
    top.set_title("where a decode step goes: 64 requests over nine models")
    top.set_xlabel("ms")
    top.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3)
    names = list(rates)
    bars = bottom.barh(
        names,
        [rates[n] for n in names],
        color=["C0" if name.startswith("manylora") else "C7" for name in names],
    )
    bottom.bar_label(bars, fmt="%.0f", fontsize=8)
    bottom.invert_yaxis()
    bottom.set_xlabel("generated tokens/s, two CPU threads, float32")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--picture")
    parser.add_argument("--repeats", type=int, default=3)
    add_flags(parser)
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    recording = Provenance.of(args, 0)
    report = {
        "command": recording.command,
        "commit": recording.commit,
        "machine": f"{platform.processor() or platform.machine()}, {THREADS} threads",
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft)},
        "settings": {
            "requests": REQUESTS, "prompt_tokens": PROMPT, "generated_tokens": GENERATE,
            "models": ADAPTERS + 1, "dtype": "float32",
        },
        **measure(args.repeats),
        "provenance": recording.provenance(),
    }  # fmt: skip
    Path(args.out).write_text(json.dumps(report, indent=1))
    if args.picture:
        draw(report["step_ms"], report["tokens_per_s"], args.picture)
    print(json.dumps({k: v for k, v in report.items() if k != "all_seconds"}, indent=1))


if __name__ == "__main__":
    main()
