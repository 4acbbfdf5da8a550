"""The experiments by name: paper and number. Each is imported when it is asked for."""

from __future__ import annotations

import importlib

from manylora.config import ConfigError
from manylora.reproduce.experiment import Experiment
from manylora.workloads.terms import suggestion

TITLES: dict[str, str] = {
    "fastlibra-fig2": "TTFT over time of vLLM with static parts for LoRA and KV (static-lru), in three scenarios",
    "fastlibra-fig4": "use of the LoRA and the KV part of vLLM's memory (static-lru) over time, translation",
    "fastlibra-fig5": "ranks of visits, swap cost and last use of KV caches and adapters, against one another",
    "fastlibra-fig9": "TTFT of vLLM (static-lru) over the share of memory that adapters get, chatbot",
    "fastlibra-fig11": "TTFT, TPOT and peak rate of the cache policies, by scenario, model and number of adapters",
    "fastlibra-fig12": "parts of TTFT (queue, LoRA cold start, KV cold start) of the cache policies, by scenario",
    "fastlibra-fig13": "use of device memory and hit rates of the cache policies, by scenario",
    "fastlibra-fig14": "device memory by use over time, load rising and falling, chatbot, 13B, 100 adapters",
    "fastlibra-fig15": "TTFT and TPOT of FastLibra without its manager, its swapper, its LoRA reward, normalised",
    "fastlibra-fig16": "TTFT and TPOT with 1,000 and 2,000 adapters asked for uniformly, in turn, or skewed",
    "fastlibra-table": "Every cache policy and limit in every FastLibra case",
    "fastlibra-overhead": "real time of matching and updating the tree, and of a swap decision, on this CPU",
    "s-lora-table3": "Throughput by number of adapters, beside PEFT and merged copies",
    "s-lora-fig5": "Throughput and latency of S-LoRA and its own variants, by number of adapters",
    "s-lora-fig6": "Throughput, TTFT and attainment of S-LoRA and its own variants, by request rate",
    "s-lora-fig7": "Throughput and attainment of S-LoRA and its own variants, on a real service's arrivals",
    "s-lora-fig10": "Attainment and satisfaction of admission policies, by burstiness of arrivals",
    "punica-fig1": "Latency of prefill and decode steps by batch size and sequence length",
    "punica-fig7": "Roofline of the batched LoRA operator, by popularity of the adapters",
    "punica-fig8": "The batched LoRA operator against a loop over adapters and against Gather-BMM",
    "punica-fig9": "The batched LoRA operator by rank and batch size, by popularity of the adapters",
    "punica-fig10": "One transformer layer with LoRA, by batch size, model, length and popularity",
    "punica-fig11": "Text generation on one card, batching across adapters or within one",
}
"""In the order of the papers. ``a-fig1`` is in ``a_fig1.py``."""


def experiment(name: str) -> Experiment:
    """Raises ConfigError for a name that there is not, with the nearest ones."""
    if name not in TITLES:
        hint = suggestion(name, TITLES) or "; manylora reproduce --list names them"
        raise ConfigError(f"there is no experiment {name!r}{hint}")
    module = importlib.import_module(f"manylora.reproduce.{name.replace('-', '_')}")
    found = module.EXPERIMENT
    assert isinstance(found, Experiment)
    assert (found.name, found.title) == (name, TITLES[name])
    return found
