"""Train the LoRA adapters with peft, each on its own domain, on top of the shipped base.

Run `python -m demo.train.adapters`, or name some: `python -m demo.train.adapters german coffee`.

An adapter keeps the weights of its best epoch by validation loss and stops once that has not
improved for `patience` epochs.
"""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.utils import set_peft_model_state_dict
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo.train.data import Split, adapter_view, load_documents, split_documents
from demo.train.encoding import Encoded, batches_by_length, encode, pad
from demo.train.measure import mean_loss
from demo.train.recipe import ADAPTERS, BASE_NAME, CURVES, MODEL, Recipe, load_recipe, write_json
from demo.train.tokenizer import load_tokenizer

LORA_SETTINGS = ("r", "lora_alpha", "target_modules", "use_rslora", "rank_pattern", "alpha_pattern")


def load_base() -> LlamaForCausalLM:
    """The shipped weights, computed with in float32."""
    return LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def encode_domain(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, domain: str
) -> dict[Split, list[Encoded]]:
    """A domain's documents as its adapter sees them."""
    splits = split_documents(load_documents(domain), recipe.shares[domain], recipe.seed)
    views_by_split = {
        split: [adapter_view(domain, document) for document in documents]
        for split, documents in splits.items()
    }
    return {
        split: [encode(tokenizer, view, all_count=False) for view in views if view]
        for split, views in views_by_split.items()
    }


def wrap(base: LlamaForCausalLM, settings: dict[str, Any], seed: int) -> PeftModel:
    """The base with a fresh adapter."""
    torch.manual_seed(seed)
    chosen = {key: settings[key] for key in LORA_SETTINGS if key in settings}
    config = LoraConfig(task_type="CAUSAL_LM", lora_dropout=settings["dropout"], **chosen)
    model = get_peft_model(base, config)
    config.base_model_name_or_path = BASE_NAME
    return model


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    batches: list[list[Encoded]],
    pad_id: int,
) -> float:
    """One pass over `batches`; returns the mean training loss."""
    model.train()
    total = 0.0
    for batch in batches:
        loss = model(**pad(batch, pad_id), use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += float(loss.detach())
    return total / len(batches)


def train_adapter(
    model: PeftModel, splits: dict[Split, list[Encoded]], settings: dict[str, Any], pad_id: int
) -> list[dict[str, float]]:
    """Train in place, leave the best epoch's weights in `model`, return the curve."""
    batches = batches_by_length(splits["adapter"], settings["tokens_per_step"])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=settings["rate"], weight_decay=settings["weight_decay"], fused=True
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=settings["epochs"] * len(batches), eta_min=settings["rate"] / 10
    )
    order = random.Random(settings["seed"])
    curve: list[dict[str, float]] = []
    best, best_state, since_best = float("inf"), {}, 0
    for number in range(1, settings["epochs"] + 1):
        order.shuffle(batches)
        training = train_epoch(model, optimizer, schedule, batches, pad_id)
        validation = mean_loss(model, splits["validation"], pad_id)
        curve.append({"number": number, "training": training, "validation": validation})
        since_best += 1
        if validation < best:
            best, since_best = validation, 0
            state = get_peft_model_state_dict(model, save_embedding_layers=False)
            best_state = {name: tensor.clone() for name, tensor in state.items()}
        if since_best == settings["patience"]:
            break
    set_peft_model_state_dict(model, best_state)
    return curve


def save(model: PeftModel, folder: Path) -> None:
    """Save in PEFT's layout with float16 weights."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.half()
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # peft's empty form; demo/README.md is the card
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_modules"].sort()  # peft keeps a set; sorted, a retrained config shows no diff
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main(names: list[str]) -> None:
    """Train and save the named adapters, or all."""
    torch.set_num_threads(1)
    recipe, tokenizer = load_recipe(), load_tokenizer()
    pad_id = int(tokenizer.pad_token_id)
    for name in names or recipe.adapters:
        start = time.monotonic()
        settings = recipe.adapter(name) | {"seed": recipe.seed}
        splits = encode_domain(recipe, tokenizer, name)
        base = load_base()
        before = mean_loss(base, splits["validation"], pad_id)
        model = wrap(base, settings, recipe.seed)
        curve = train_adapter(model, splits, settings, pad_id)
        save(model, ADAPTERS / name)
        write_json(CURVES / "adapters" / f"{name}.json", {"base": before, "epochs": curve})
        best = min(epoch["validation"] for epoch in curve)
        seconds = time.monotonic() - start
        print(
            f"{name}: {before:.3f} -> {best:.3f} ({best / before - 1:+.1%}) validation, "
            f"{len(curve)} epochs, {seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
