"""Mixed-adapter decoding on one GPU: Llama-2-7B and Llama-3-8B shapes, dummy weights, beside the roofline.

Per shape: 64 concurrent requests on the base alone, then over 64 adapters of mixed ranks 8-64; then adapter
churn (load, use, unload, under a pool that cannot hold them all) for some minutes, after which no page and no
byte may be missing. Writes JSON; run from the repository's root:

    python -m manylora_lab.benchmarks.h200 --out results.json
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from manylora import LLM, SamplingParams
from manylora_lab.bench.provenance import Provenance, add_flags

SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000,
        "rope_theta": 10000.0, "max_position_embeddings": 4096,
    },
    "llama-3-8b": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "rope_theta": 500000.0, "max_position_embeddings": 8192,
    },
}  # fmt: skip
RANKS = (8, 16, 32, 64)
PROMPT, GENERATE = 128, 256
SAMPLE_S = 10.0


def write_model(folder: Path, shape: dict[str, Any]) -> None:
    """A config.json is all that dummy weights need."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, **shape,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def projections(shape: dict[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden),
    }  # fmt: skip


def write_adapters(folder: Path, shape: dict[str, Any], count: int) -> dict[str, str]:
    """``count`` adapters of the ranks in turn. Those of one rank link to one file; each takes its own pages."""
    made: dict[int, Path] = {}
    adapters = {}
    for index in range(count):
        rank = RANKS[index % len(RANKS)]
        if rank not in made:
            made[rank] = folder / f"weights-r{rank}.safetensors"
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {}
            for layer in range(shape["num_hidden_layers"]):
                for module, (inputs, outputs) in projections(shape).items():
                    stem = f"base_model.model.model.layers.{layer}.{module}"
                    tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, inputs, dtype=torch.bfloat16) * 0.02
                    tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, rank, dtype=torch.bfloat16) * 0.02
            save_file(tensors, made[rank])
        own = folder / f"adapter-{index}"
        own.mkdir()
        modules = sorted({module.rpartition(".")[2] for module in projections(shape)})
        (own / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules})
        )
        (own / "adapter_model.safetensors").symlink_to(made[rank])
        adapters[f"adapter-{index}"] = str(own)
    return adapters


def adapter_bytes(shape: dict[str, Any], rank: int) -> int:
    return 2 * rank * shape["num_hidden_layers"] * sum(sum(sizes) for sizes in projections(shape).values())


def weight_bytes(shape: dict[str, Any]) -> int:
    """What one decode step reads of the base: all layers and the output matrix."""
    layer = sum(inputs * outputs for inputs, outputs in projections(shape).values())
    return 2 * (layer * shape["num_hidden_layers"] + shape["vocab_size"] * shape["hidden_size"])


def kv_bytes(shape: dict[str, Any], context: float) -> float:
    head = shape["hidden_size"] // shape["num_attention_heads"]
    return 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head * context


def measured_bandwidth() -> float:
    """Bytes per second of a large device-to-device copy, read plus written."""
    source = torch.empty(4 * 2**30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        target.copy_(source)
    start.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 10 * 2 * source.numel() / (start.elapsed_time(end) / 1e3)


def decode(llm: LLM, models: list[str | None], floor_s: float) -> dict[str, Any]:
    """64 requests at once: all tokens over wall time, and the mean step beside its floor."""
    generator = random.Random(len(models))
    params = SamplingParams(max_tokens=GENERATE, temperature=0.0, ignore_eos=True)

    def run() -> tuple[float, Any, Any]:
        prompts = [[generator.randrange(3, 30000) for _ in range(PROMPT)] for _ in models]
        before, began = llm.stats(), time.perf_counter()
        llm.generate(prompts, params, models)
        return time.perf_counter() - began, before, llm.stats()

    run()  # compiles kernels, reads adapters
    times = [run() for _ in range(3)]
    wall, before, after = sorted(times, key=lambda item: item[0])[1]
    step_s = (after.step_s - before.step_s) / (after.steps - before.steps)
    return {
        "tokens_per_s": len(models) * GENERATE / wall,
        "wall_s": wall,
        "all_wall_s": [t[0] for t in times],
        "mean_step_ms": step_s * 1e3,
        "host_between_steps_ms": (wall - (after.step_s - before.step_s)) / (after.steps - before.steps) * 1e3,
        "floor_step_ms": floor_s * 1e3,
        "step_over_floor": step_s / floor_s,
    }


def churn(llm: LLM, adapters: dict[str, str], seconds: float) -> dict[str, Any]:
    """Load, use and unload adapters at random from several threads; then everything must be back."""
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    deadline = time.monotonic() + seconds
    counts = {"requests": 0, "loads": 0, "unloads": 0}
    lock = threading.Lock()
    errors: list[str] = []
    names = sorted(adapters)

    def work(worker: int, mine: list[str]) -> None:
        generator = random.Random(worker)
        try:
            while time.monotonic() < deadline:
                name = generator.choice(mine)
                prompts = [
                    [generator.randrange(3, 30000) for _ in range(generator.randrange(8, 200))]
                    for _ in range(3)
                ]
                llm.generate(prompts, params, [name, None, generator.choice(mine)])
                if generator.random() < 0.3:
                    llm.remove_adapter(name)
                    llm.add_adapter(name, adapters[name])
                    with lock:
                        counts["loads"] += 1
                        counts["unloads"] += 1
                with lock:
                    counts["requests"] += 3
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    torch.cuda.synchronize()
    gc.collect()
    memory_before = torch.cuda.memory_allocated()
    before = llm.stats()
    # Each thread owns some adapters, so that unloading one never surprises another's request.
    workers = [threading.Thread(target=work, args=(i, names[i::8])) for i in range(8)]
    for worker in workers:
        worker.start()
    samples = []
    while alive := [worker for worker in workers if worker.is_alive()]:
        samples.append((torch.cuda.memory_allocated() - memory_before, private_bytes()))
        alive[0].join(SAMPLE_S)
    after = llm.stats()
    for name in names:
        llm.remove_adapter(name)
    end = llm.stats()
    gc.collect()
    torch.cuda.synchronize()
    result = {
        "seconds": seconds, **counts, "errors": errors,
        "adapter_reads": after.adapter_reads - before.adapter_reads,
        "adapter_evictions": after.adapter_evictions - before.adapter_evictions,
        "history_evictions": after.history_evictions - before.history_evictions,
        "preemptions": after.preemptions - before.preemptions,
        "mean_read_ms": 1e3 * (after.adapter_read_s - before.adapter_read_s)
        / max(1, after.adapter_reads - before.adapter_reads),
        "pages_leaked": end.pages_total - end.pages_free - end.pages_history,
        "adapter_pages_left": end.pages_adapters, "running_pages_left": end.pages_running,
        "device_bytes_grown": torch.cuda.memory_allocated() - memory_before,
        "sample_s": SAMPLE_S,
        "device_bytes_grown_samples": [device for device, _ in samples],
        "host_private_bytes_samples": [host for _, host in samples],
    }  # fmt: skip
    assert not errors, errors
    assert result["pages_leaked"] == result["adapter_pages_left"] == result["running_pages_left"] == 0, result
    return result


def private_bytes() -> int:
    """The memory of this process, without shared memory: the host's pool is that, and fills while it is used."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--churn-s", type=float, default=0.0)
    add_flags(parser)
    args = parser.parse_args()
    recording = Provenance.of(args, "the number of models, and of each churning thread")
    bandwidth = measured_bandwidth()
    torch.cuda.empty_cache()
    report: dict[str, Any] = {
        "command": recording.command, "commit": recording.commit,
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "bandwidth_bytes_per_s": bandwidth, "prompt_tokens": PROMPT, "generated_tokens": GENERATE, "shapes": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.shapes:
            report["shapes"][name] = measure(Path(scratch) / name, SHAPES[name], bandwidth, args.churn_s)
            print(json.dumps({name: report["shapes"][name]}), flush=True)
            report["provenance"] = recording.provenance()
            Path(args.out).write_text(json.dumps(report, indent=1))


def measure(folder: Path, shape: dict[str, Any], bandwidth: float, churn_s: float) -> dict[str, Any]:
    write_model(folder / "model", shape)
    adapters = write_adapters(folder / "adapters", shape, 64)
    result: dict[str, Any] = {}
    kv = 64 * kv_bytes(shape, PROMPT + GENERATE / 2)
    base_floor = (weight_bytes(shape) + kv) / bandwidth
    added = sum(adapter_bytes(shape, RANKS[i % len(RANKS)]) for i in range(64)) / bandwidth
    began = time.perf_counter()
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "load_format": "dummy"}
    with LLM(str(folder / "model"), adapters=adapters, **options) as llm:
        result["start_s"] = time.perf_counter() - began
        result["pages"] = llm.info.num_pages
        result["page_bytes"] = llm.info.page_bytes
        result["base"] = decode(llm, [None] * 64, base_floor)
        result["mixed"] = decode(llm, list(adapters), base_floor + added)
        result["mixed_over_base_tokens"] = result["mixed"]["tokens_per_s"] / result["base"]["tokens_per_s"]
        result["floor_ratio"] = base_floor / (base_floor + added)
        stats = llm.stats()
        result["adapter_read_ms_mean"] = 1e3 * stats.adapter_read_s / stats.adapter_reads
    if churn_s:
        # A pool that holds about a third of the adapters.
        pool = sum(adapter_bytes(shape, RANKS[i % len(RANKS)]) for i in range(64)) // 3 + 2 * 2**30
        with LLM(str(folder / "model"), adapters=adapters, device_pool=pool, **options) as llm:
            result["churn"] = churn(llm, adapters, churn_s)
    return result


if __name__ == "__main__":
    main()
