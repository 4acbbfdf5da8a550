"""Small checkpoints and PEFT adapters written to disk, and the tokens that transformers + PEFT give for them.

For every test that runs the real executor: ``write_model``, ``write_adapter``, then ``Reference``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from manylora.config.cold_start import ColdStartConfig
from manylora.config.merging import MergeConfig
from manylora.config.sections import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from tests.models.tiny import VOCAB, make_model

ALL_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OPT_MODULES = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
CLOSE_LOGITS = 2e-4
"""Where the reference's own top two logits are closer than this, another choice is rounding."""

__all__ = ["ALL_MODULES", "OPT_MODULES", "VOCAB", "Reference", "settings_for", "write_adapter", "write_model"]


def write_model(folder: Path, name: str = "llama") -> Path:
    """Save the tiny random model of that name (a key of ``tests.models.tiny.MODELS``), float32."""
    make_model(name).save_pretrained(folder)
    return folder


def write_adapter(
    folder: Path,
    model: Path,
    rank: int = 4,
    modules: Sequence[str] = ALL_MODULES,
    seed: int = 0,
    **config: object,
) -> Path:
    """Save a random PEFT adapter whose effect on the logits is large. ``config``: more LoraConfig fields."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = {"lora_alpha": 2 * rank, "target_modules": list(modules)} | config
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=rank, **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


def settings_for(
    model: Path,
    *,
    num_pages: int | None = None,
    page_bytes: int = 0,
    num_host_pages: int | None = None,
    page_tokens: int = 4,
    max_num_seqs: int | None = None,
    max_batch_tokens: int | None = None,
    max_model_len: int | None = None,
    device: Any = "cpu",
    dtype: Any = "auto",
    load_format: Any = "auto",
    merge: MergeConfig | None = None,
    cold_start: str = "wait",
    cpu_workers: str = "auto",
) -> EngineSettings:
    """Settings for a tiny model: small pages, pools of so many pages (default: 64 MiB each)."""
    pool = 64 * 2**20 if num_pages is None else num_pages * page_bytes
    host_pool = 64 * 2**20 if num_host_pages is None else num_host_pages * page_bytes
    return EngineSettings(
        model=ModelSettings(str(model), (), device, dtype, load_format, max_model_len),
        cache=CacheSettings(page_tokens=page_tokens, device_pool=pool, host_pool=host_pool),
        scheduler=SchedulerSettings(
            max_num_seqs,
            max_batch_tokens,
            merge=merge or MergeConfig(),
            cold_start=ColdStartConfig(cold_start, cpu_workers=cpu_workers),
        ),
    )


@dataclasses.dataclass(frozen=True)
class _Reference:
    model: torch.nn.Module

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([list(tokens)])).logits[0]
            return logits


class Reference:
    """Greedy tokens by transformers, with PEFT where an adapter is named. Models are loaded once each."""

    def __init__(self, model: Path) -> None:
        self._folder = model
        self._models: dict[Path | None, _Reference] = {}

    def logits(self, tokens: Sequence[int], adapter: Path | None = None) -> torch.Tensor:
        """float32 [len(tokens), vocab]."""
        if adapter not in self._models:
            model = transformers.AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)
            if adapter is not None:
                model = peft.PeftModel.from_pretrained(model, adapter)
            self._models[adapter] = _Reference(model.eval())
        return self._models[adapter].logits(tokens)

    def check_greedy(
        self, prompt: Sequence[int], generated: Sequence[int], adapter: Path | None = None
    ) -> None:
        """Every generated token is the reference's choice after the tokens before it, rounding aside."""
        everything = [*prompt, *generated]
        logits = self.logits(everything[:-1], adapter)[len(prompt) - 1 :]
        assert len(logits) == len(generated)
        for position, (token, row) in enumerate(zip(generated, logits)):
            if token != int(row.argmax()):
                gap = float(row.max() - row[token])
                assert gap < CLOSE_LOGITS, f"generated token {position} is {token}, {gap} below the best"
