"""Measure base and every adapter on every domain's held-out documents.

Run `python -m demo.train.matrix`.

Writes `demo/curves/held_out.json` and prints the table that demo/README.md shows.
"""

import sys

import torch
from peft import PeftModel

from demo.train.adapters import encode_domain, load_base
from demo.train.encoding import Encoded
from demo.train.measure import cap_tokens, mean_loss
from demo.train.recipe import ADAPTERS, CURVES, load_recipe, write_json
from demo.train.tokenizer import load_tokenizer

TOKENS_PER_DOMAIN = 3000
"""What of each domain's held-out documents the matrix measures. Gains are measured on all."""

Matrix = dict[str, dict[str, float]]
"""Loss by model (an adapter's name, or `base`), then by domain."""

Own = dict[str, dict[str, float]]
"""By domain: the loss of `base` and of its own `adapter`, and the adapter's relative `gain`."""


def held_out_documents(tokens_per_domain: int | None = None) -> dict[str, list[Encoded]]:
    """Each adapter's domain, held-out documents only, at most so many tokens of each."""
    recipe, tokenizer = load_recipe(), load_tokenizer()
    documents = {}
    for name in recipe.adapters:
        held_out = encode_domain(recipe, tokenizer, name)["held_out"]
        documents[name] = cap_tokens(held_out, tokens_per_domain) if tokens_per_domain else held_out
    return documents


def load_all() -> PeftModel:
    """The shipped base with every shipped adapter, computed with in float32."""
    first, *others = load_recipe().adapters
    model = PeftModel.from_pretrained(load_base(), ADAPTERS / first, adapter_name=first)
    for name in others:
        model.load_adapter(ADAPTERS / name, adapter_name=name)
    return model.float()


def measure_matrix(model: PeftModel, documents: dict[str, list[Encoded]]) -> Matrix:
    """The loss of base and every adapter on every domain."""
    pad_id = int(model.config.pad_token_id)
    with model.disable_adapter():
        matrix = {"base": {d: mean_loss(model, items, pad_id) for d, items in documents.items()}}
    for name in documents:
        model.set_adapter(name)
        matrix[name] = {d: mean_loss(model, items, pad_id) for d, items in documents.items()}
    return matrix


def measure_own(model: PeftModel, documents: dict[str, list[Encoded]]) -> Own:
    """The loss of base and own adapter on each domain: far less work than the matrix."""
    pad_id = int(model.config.pad_token_id)
    own: Own = {}
    for name, items in documents.items():
        model.set_adapter(name)
        adapted = mean_loss(model, items, pad_id)
        with model.disable_adapter():
            base = mean_loss(model, items, pad_id)
        own[name] = {"base": base, "adapter": adapted, "gain": 1 - adapted / base}
    return own


def markdown(matrix: Matrix, own: Own) -> str:
    """The matrix as a table, each domain's best in bold."""
    domains = list(matrix["base"])
    lines = [
        "| model | " + " | ".join(domains) + " |",
        "| --- |" + " ---: |" * len(domains),
    ]
    best = {d: min(matrix, key=lambda model: matrix[model][d]) for d in domains}
    for model, losses in matrix.items():
        marks = {d: "**" if best[d] == model else "" for d in domains}
        cells = [f"{marks[d]}{losses[d]:.2f}{marks[d]}" for d in domains]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    gains = " | ".join(f"{own[d]['gain']:.1%}" for d in domains)
    return "\n".join([*lines, f"| own adapter's gain | {gains} |"])


def main() -> None:
    """Measure, record, print."""
    torch.set_num_threads(1)
    model = load_all()
    matrix = measure_matrix(model, held_out_documents(TOKENS_PER_DOMAIN))
    own = measure_own(model, held_out_documents())
    write_json(CURVES / "held_out.json", {"matrix": matrix, "own": own})
    sys.stdout.write(markdown(matrix, own) + "\n")


if __name__ == "__main__":
    main()
