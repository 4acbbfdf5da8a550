"""What transformers and PEFT generate, one prompt at a time, and what counts as the same."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import peft
import torch
import transformers

CLOSE_LOGITS = 2e-4
"""Where the reference's own top two logits are closer than this, another choice between them is rounding."""


class Oracle(Protocol):
    """Greedy tokens and logits of a model; ``adapter`` None is the base."""

    def greedy(self, prompt: Sequence[int], adapter: str | None, num_tokens: int) -> list[int]:
        """The next tokens, end-of-sequence ids like any others."""

    def next_logits(self, tokens: Sequence[int], adapter: str | None) -> torch.Tensor:
        """[vocab]: what follows ``tokens``."""


def assert_greedy(oracle: Oracle, prompt: Sequence[int], adapter: str | None, tokens: Sequence[int]) -> None:
    """Each token is the reference's own choice after those before it, but for rounding."""
    context, rest = list(prompt), list(tokens)
    while rest:
        expected = oracle.greedy(context, adapter, len(rest))
        same = next((i for i, (a, b) in enumerate(zip(rest, expected)) if a != b), len(rest))
        if same == len(rest):
            return
        context += rest[:same]
        best = oracle.next_logits(context, adapter).topk(2)
        gap = float(best.values[0] - best.values[1])
        is_rounding = gap < CLOSE_LOGITS and rest[same] in best.indices.tolist()
        assert is_rounding, (
            f"token {len(context) - len(prompt)} under {adapter or 'the base'} is {rest[same]}, the "
            f"reference says {expected[same]} by {gap:.4g}; prompt {list(prompt)}, got {list(tokens)}"
        )
        context.append(rest[same])
        rest = rest[same + 1 :]


class Reference:
    """A transformers model with PEFT adapters read from their files. Greedy tokens are remembered."""

    def __init__(self, model: Path, adapters: Mapping[str, Path]) -> None:
        base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model: Any = base
        with warnings.catch_warnings():
            # PEFT only warns of tensors that it did not find in the file.
            warnings.filterwarnings("error", "Found missing adapter keys")
            for name, path in adapters.items():
                if self._model is base:
                    self._model = peft.PeftModel.from_pretrained(base, path, adapter_name=name)
                else:
                    self._model.load_adapter(path, adapter_name=name)
        self._model.eval()
        base.generation_config.eos_token_id = None
        self._greedy: dict[tuple[tuple[int, ...], str | None], list[int]] = {}

    def greedy(self, prompt: Sequence[int], adapter: str | None, num_tokens: int) -> list[int]:
        known = self._greedy.get((tuple(prompt), adapter), [])
        if len(known) < num_tokens:
            known = self.generate(prompt, adapter, num_tokens)
            self._greedy[tuple(prompt), adapter] = known
        return known[:num_tokens]

    def generate(
        self, prompt: Sequence[int], adapter: str | None, num_tokens: int, **settings: Any
    ) -> list[int]:
        """By transformers' own ``generate``, with its KV cache."""
        ids = torch.tensor([list(prompt)])
        with self._using(adapter) as model:
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                pad_token_id=0,
                **settings,
            )
        generated: list[int] = out[0, len(prompt) :].tolist()
        return generated

    def logits(self, tokens: Sequence[int], adapter: str | None) -> torch.Tensor:
        """[len(tokens), vocab], computed at once without a KV cache."""
        with self._using(adapter) as model:
            found: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return found

    def next_logits(self, tokens: Sequence[int], adapter: str | None) -> torch.Tensor:
        return self.logits(tokens, adapter)[-1]

    @contextlib.contextmanager
    def _using(self, adapter: str | None) -> Iterator[Any]:
        with torch.inference_mode():
            if adapter is not None:
                self._model.set_adapter(adapter)
                yield self._model
            elif isinstance(self._model, peft.PeftModel):
                with self._model.disable_adapter():
                    yield self._model
            else:
                yield self._model
