"""Train the base model until its validation loss improves by less than 1 % an epoch.

Run `python -m demo.train.base`.

The learning rate warms up, stays at its peak, decays linearly, then stays at a floor (WSD). Two
rules read the validation loss: the decay begins after the first peak epoch that gains less than
`stop_below`, and training ends after the first floor epoch that gains less than `stop_below`.
The second makes the plateau genuine: the rate no longer falls when it is measured.
"""

import copy
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo.train.data import DOMAINS, Split, base_view, load_documents, split_documents
from demo.train.encoding import Encoded, encode
from demo.train.measure import cap_tokens, mean_loss
from demo.train.recipe import CURVES, MODEL, Recipe, load_recipe, write_json
from demo.train.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Epoch:
    """One pass over the base's training documents, and the losses after it."""

    number: int
    phase: str
    rate: float
    tokens: int
    training: float
    validation: float
    held_out: float
    seconds: float


@dataclass
class Schedule:
    """The learning rate of each epoch, decided by the validation losses so far."""

    settings: dict[str, Any]
    phase: str = "peak"
    decayed: int = 0

    def rates(self) -> tuple[float, float]:
        """The rate at the start and at the end of the coming epoch."""
        peak, floor = self.settings["peak_rate"], self.settings["floor_rate"]
        if self.phase == "peak":
            return peak, peak
        if self.phase == "floor":
            return floor, floor
        step = (peak - floor) / self.settings["decay_epochs"]
        return peak - step * self.decayed, peak - step * (self.decayed + 1)

    def advance(self, losses: list[float]) -> bool:
        """Take in the latest loss; False when training is over."""
        gain = 1 - losses[-1] / losses[-2] if len(losses) > 1 else 1.0
        flat = gain < self.settings["stop_below"]
        if self.phase == "peak":
            if flat or len(losses) >= self.settings["max_peak_epochs"]:
                self.phase = "decay"
        elif self.phase == "decay":
            self.decayed += 1
            if self.decayed == self.settings["decay_epochs"]:
                self.phase = "floor"
        elif flat:
            return False
        return True


class BaseTexts:
    """The base's documents of all domains, encoded, for one split or another."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
        self.measured_tokens: int = recipe.base["measured_tokens_per_domain"]
        self.by_domain: dict[str, dict[Split, list[Encoded]]] = {}
        for domain in DOMAINS:
            splits = split_documents(load_documents(domain), recipe.shares[domain], recipe.seed)
            self.by_domain[domain] = {
                split: [encode(tokenizer, base_view(domain, d), all_count=True) for d in documents]
                for split, documents in splits.items()
            }

    def blocks(self, block_tokens: int, seed: int) -> torch.Tensor:
        """One epoch: all training documents in a fresh order, end to end, cut into blocks."""
        documents = [item.ids for splits in self.by_domain.values() for item in splits["base"]]
        random.Random(seed).shuffle(documents)
        stream = torch.tensor([token for ids in documents for token in ids])
        return stream[: len(stream) // block_tokens * block_tokens].view(-1, block_tokens)

    def mixture_loss(self, model: nn.Module, split: Split, pad_id: int) -> float:
        """The loss on unseen documents, domains weighted as in training.

        This estimates the loss on one more document drawn from the training mixture.
        """
        parts = self.by_domain
        weights = {d: sum(len(item.ids) for item in parts[d]["base"]) for d in parts}
        measured = {d: cap_tokens(parts[d][split], self.measured_tokens) for d in parts}
        losses = {d: mean_loss(model, items, pad_id) for d, items in measured.items()}
        return sum(weights[d] * losses[d] for d in losses) / sum(weights.values())


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A freshly initialised base."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        **recipe.architecture,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def new_optimizer(model: nn.Module, settings: dict[str, Any]) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": settings["weight_decay"]},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=tuple(settings["betas"]), fused=True)


def train_epoch(
    model: Callable[..., Any],
    optimizer: torch.optim.AdamW,
    blocks: torch.Tensor,
    rates: tuple[float, float],
    settings: dict[str, Any],
    warmup_steps: int,
) -> float:
    """One pass over `blocks`; returns the mean training loss."""
    per_step = settings["blocks_per_step"]
    whole = len(blocks) // per_step * per_step  # a compiled model wants one shape
    steps = blocks[:whole].view(-1, per_step, blocks.shape[1])
    total = 0.0
    for number, step in enumerate(steps):
        rate = rates[0] + (rates[1] - rates[0]) * (number + 1) / len(steps)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (number + 1) / max(1, warmup_steps))
        loss = model(input_ids=step, labels=step, use_cache=False).loss
        loss.backward()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, settings["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        total += float(loss.detach())
    return total / len(steps)


def save(model: LlamaForCausalLM) -> None:
    """Write the weights as float16: its mantissa is finer than bfloat16's, its range enough."""
    half = copy.deepcopy(model).half()
    half.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    half.save_pretrained(MODEL)


def main() -> None:
    """Train, writing model and curve after every epoch."""
    torch.set_num_threads(1)
    recipe, tokenizer = load_recipe(), load_tokenizer()
    texts, settings = BaseTexts(recipe, tokenizer), recipe.base
    model = new_model(recipe, tokenizer)
    compiled = torch.compile(model, dynamic=False)
    optimizer, schedule = new_optimizer(model, settings), Schedule(settings)
    epochs: list[Epoch] = []
    going = True
    while going:
        start, number, rates = time.monotonic(), len(epochs) + 1, schedule.rates()
        blocks = texts.blocks(settings["block_tokens"], seed=recipe.seed + number)
        warmup = settings["warmup_steps"] if number == 1 else 0
        training = train_epoch(compiled, optimizer, blocks, rates, settings, warmup)
        epochs.append(
            Epoch(
                number=number,
                phase=schedule.phase,
                rate=rates[1],
                tokens=blocks.numel(),
                training=training,
                validation=texts.mixture_loss(model, "validation", tokenizer.pad_token_id),
                held_out=texts.mixture_loss(model, "held_out", tokenizer.pad_token_id),
                seconds=round(time.monotonic() - start, 1),
            )
        )
        print(epochs[-1], flush=True)
        going = schedule.advance([epoch.validation for epoch in epochs])
        save(model)
        write_json(CURVES / "base.json", [asdict(epoch) for epoch in epochs])


if __name__ == "__main__":
    main()
