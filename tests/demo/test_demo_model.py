"""The shipped demo model is what demo/README.md says: small, whole, and each adapter worth its bytes.

Losses are measured on the first held-out documents of each domain only, so they differ a little
from the full table in the README.
"""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from peft import PeftModel  # noqa: E402
from safetensors import safe_open  # noqa: E402

from demo.train.adapters import load_base  # noqa: E402
from demo.train.base import Schedule  # noqa: E402
from demo.train.data import DOMAINS, SPLITS, Split, load_documents, opening, split_documents  # noqa: E402
from demo.train.encoding import IGNORED, encode  # noqa: E402
from demo.train.matrix import (  # noqa: E402
    Matrix,
    Own,
    held_out_documents,
    load_all,
    measure_matrix,
    measure_own,
)
from demo.train.recipe import ADAPTERS, CURVES, DEMO, MODEL, Recipe, load_recipe  # noqa: E402
from demo.train.tokenizer import load_tokenizer  # noqa: E402

TOKENS_FOR_GAIN = 1800
TOKENS_FOR_MATRIX = 120
SMALLEST_GAIN = 0.10
LARGEST_SIZE = 15_000_000
NAMES = sorted(load_recipe().adapters)
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe()


@pytest.fixture(scope="module")
def configs() -> dict[str, dict[str, Any]]:
    return {name: json.loads((ADAPTERS / name / "adapter_config.json").read_text()) for name in NAMES}


@pytest.fixture(scope="module")
def model() -> PeftModel:
    return load_all()


@pytest.fixture(scope="module")
def matrix(model: PeftModel) -> Matrix:
    return measure_matrix(model, held_out_documents(TOKENS_FOR_MATRIX))


@pytest.fixture(scope="module")
def own(model: PeftModel) -> Own:
    return measure_own(model, held_out_documents(TOKENS_FOR_GAIN))


# Losses


@pytest.mark.long  # that each is the best on its domain is the harder question, and is asked below
@pytest.mark.parametrize("name", NAMES)
def test_adapter_lowers_the_loss_of_its_domain(own: Own, name: str) -> None:
    assert own[name]["gain"] >= SMALLEST_GAIN


@pytest.mark.parametrize("name", NAMES)
def test_adapter_is_the_best_on_its_domain(matrix: Matrix, name: str) -> None:
    assert min(matrix, key=lambda model: matrix[model][name]) == name


def test_recorded_matrix_says_the_same() -> None:
    recorded = json.loads((CURVES / "held_out.json").read_text())
    matrix, own = recorded["matrix"], recorded["own"]
    assert sorted(matrix) == sorted([*NAMES, "base"])
    for name in NAMES:
        assert own[name]["gain"] >= SMALLEST_GAIN
        assert min(matrix, key=lambda model: matrix[model][name]) == name


def test_base_trained_until_an_epoch_at_the_floor_gained_less_than_one_percent(recipe: Recipe) -> None:
    epochs = json.loads((CURVES / "base.json").read_text())
    schedule = Schedule(recipe.base)
    losses: list[float] = []
    for epoch in epochs:
        assert epoch["phase"] == schedule.phase
        losses.append(epoch["validation"])
        last = epoch is epochs[-1]
        assert schedule.advance(losses) != last, "training ended exactly when the rule said"
    assert recipe.base["stop_below"] <= 0.01
    for series in ("validation", "held_out"):
        before, after = epochs[-2][series], epochs[-1][series]
        assert 1 - after / before < 0.01
        assert after <= 1.01 * min(epoch[series] for epoch in epochs), "it did not overfit either"


# Files


def folder_bytes(*folders: Path) -> int:
    return sum(path.stat().st_size for f in folders for path in f.rglob("*") if path.is_file())


def test_model_and_adapters_are_small() -> None:
    assert folder_bytes(MODEL, ADAPTERS) <= LARGEST_SIZE
    assert folder_bytes(DEMO / "data") <= 1_500_000


def test_base_has_between_three_and_four_million_parameters_in_16_bits() -> None:
    with safe_open(MODEL / "model.safetensors", framework="pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert 3_000_000 <= sum(tensor.numel() for tensor in tensors) <= 4_000_000
    assert {tensor.dtype for tensor in tensors} == {torch.float16}
    assert load_base().num_parameters() == sum(tensor.numel() for tensor in tensors)


@pytest.mark.parametrize("name", NAMES)
def test_adapter_files_are_whole(configs: dict[str, dict[str, Any]], name: str) -> None:
    config = configs[name]
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == "manylora-demo"
    with safe_open(ADAPTERS / name / "adapter_model.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    layers = load_recipe().architecture["num_hidden_layers"]
    assert len(tensors) == 2 * layers * len(config["target_modules"])
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert all(tensor.isfinite().all() and tensor.any() for tensor in tensors.values())


def test_adapters_cover_the_shapes_that_a_server_must_handle(configs: dict[str, dict[str, Any]]) -> None:
    assert len(configs) >= 8
    assert all(name.replace("-", "").isalpha() for name in configs)
    ranks = {config["r"] for config in configs.values()}
    assert min(ranks) == 4
    assert max(ranks) == 32
    targets = [set(config["target_modules"]) for config in configs.values()]
    for wanted in ({"q_proj", "v_proj"}, ATTENTION, PROJECTIONS - ATTENTION, PROJECTIONS):
        assert wanted in targets
    assert sum(config["use_rslora"] for config in configs.values()) == 1
    assert sum(bool(config["rank_pattern"]) for config in configs.values()) == 1
    assert sum(bool(config["alpha_pattern"]) for config in configs.values()) == 1


# Data


@pytest.mark.parametrize("domain", DOMAINS)
def test_no_training_document_is_held_out(recipe: Recipe, domain: str) -> None:
    """By text, case aside: equal texts under two ids would count as leaks."""
    splits = split_documents(load_documents(domain), recipe.shares[domain], recipe.seed)

    def texts(split: Split) -> set[str]:
        return {"\n".join(document.texts).casefold() for document in splits[split]}

    trained = texts("base") | texts("adapter")
    for split in ("held_out", "validation"):
        assert splits[split]
        assert not texts(split) & trained
    assert not texts("held_out") & texts("validation")
    groups = [{document.group for document in splits[split]} for split in SPLITS]
    assert sum(map(len, groups)) == len(set().union(*groups))


def test_held_out_sentences_are_held_out_in_every_language(recipe: Recipe) -> None:
    """The English side of a held-out pair must not be a sentence that the base trained on."""
    english = split_documents(load_documents("english"), recipe.shares["english"], recipe.seed)
    german = split_documents(load_documents("german"), recipe.shares["german"], recipe.seed)
    for split in ("held_out", "validation"):
        assert [d.texts[0] for d in english[split]] == [d.texts[0] for d in german[split]]


def test_encoding_is_the_chat_template(recipe: Recipe) -> None:
    tokenizer = load_tokenizer()
    document = load_documents("coffee")[0]
    messages = [{"role": role, "content": text} for role, text in document.turns]
    encoded = encode(tokenizer, document, all_count=False)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert encoded.ids == tokenizer.encode(rendered, add_special_tokens=False)
    replies = [text + tokenizer.eos_token for role, text in document.turns if role == "assistant"]
    counted = [label for label in encoded.labels if label != IGNORED]
    assert tokenizer.decode(counted) == "".join(replies)


def test_every_model_has_prompts_that_it_was_not_trained_on(recipe: Recipe) -> None:
    prompts = json.loads((DEMO / "prompts.json").read_text())
    assert {prompt["model"] for prompt in prompts} == {*NAMES, "base"}
    trained = set()
    for domain in DOMAINS:
        splits = split_documents(load_documents(domain), recipe.shares[domain], recipe.seed)
        trained |= {opening(d.texts[0]) for d in splits["base"] + splits["adapter"]}
    for prompt in prompts:
        if prompt["api"] == "chat":
            assert prompt["messages"][-1]["role"] == "user"
            assert opening(prompt["messages"][0]["content"]) not in trained
        else:
            assert prompt["api"] == "completion"
            assert not any(text.startswith(opening(prompt["prompt"])) for text in trained)
