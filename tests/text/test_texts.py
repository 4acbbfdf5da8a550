"""What an adapter's folder says of text, over what its base's does; which tokenizers contradict each other."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoTokenizer

from manylora.text.chat import render_chat
from manylora.text.texts import TEXT_FILES, ModelText, Texts, read_base
from manylora.text.tokenizer import Tokenizer, TokenizerError
from manylora.types import AdapterCard, InvalidRequest
from tests.text import made

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = made.layout_5(tmp_path / "base")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 402}))
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "own"
    folder.mkdir()
    return folder


def texts_of(base: Path, templates: dict[str, str] | None = None, has_defaults: bool = True) -> Texts:
    return Texts(read_base(base, None, has_defaults), base, templates, has_defaults)


def write(folder: Path, **files: Any) -> None:
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))


def prompt(text: ModelText) -> str:
    assert text.tokenizer is not None
    return render_chat(text.tokenizer, CHAT)


def test_the_base_ends_at_its_tokenizers_eos(base: Path) -> None:
    assert read_base(base).eos_ids == (1,)
    write(base, tokenizer_config={"eos_token": "<|late|>"})
    assert read_base(base).eos_ids == (400,)
    write(base, tokenizer_config={})
    assert read_base(base).eos_ids == ()


def test_generation_config_has_defaults(base: Path, own: Path) -> None:
    said = {"temperature": 0.6, "top_k": 1, "top_p": None, "do_sample": False, "max_new_tokens": 9}
    write(base, generation_config=said)
    own_said = {"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    write(own, generation_config={**own_said, "eos_token_id": [3, -1, 4]})
    texts = texts_of(base)
    assert texts.base.defaults == {"temperature": 0.6, "top_k": 1, "max_tokens": 9}
    found = texts.read(own)
    assert found.defaults == {"temperature": 0.6, "max_tokens": 9, **own_said}
    assert found.eos_ids == (1, 3, 4)
    without = texts_of(base, has_defaults=False)
    assert (without.base.defaults, without.read(own).defaults) == ({}, {})
    assert without.read(own).eos_ids == (1, 3, 4)


@pytest.mark.parametrize("said", [{"top_p": 2}, {"temperature": "hot"}, {"eos_token_id": "</s>"}, [1]])
def test_a_wrong_generation_config_is_refused(base: Path, said: Any) -> None:
    write(base, generation_config=said)
    with pytest.raises(TokenizerError, match="generation_config"):
        read_base(base)


def test_an_adapter_may_bring_a_template(base: Path, own: Path) -> None:
    texts = texts_of(base, {"named": "of the flag"})
    (base / "chat_template.jinja").unlink()
    assert texts.read(own) is texts.base
    assert prompt(texts.read(own, "named")) == "of the flag"
    write(own, tokenizer_config={"chat_template": "inline {{ eos_token }}", "eos_token": "<|user|>"})
    found = texts.read(own)
    assert prompt(found) == "inline <|user|>"
    assert found.eos_ids == (1, 3)
    (own / "chat_template.jinja").write_text("its own")
    assert prompt(texts.read(own)) == "its own"
    assert prompt(texts.read(own, "named")) == "of the flag"
    assert prompt(texts.base) == "<|bos|><|user|>Hi<|eos|><|assistant|>"
    with pytest.raises(InvalidRequest, match="no chat template"):
        prompt(texts_of(base).base)
    assert prompt(texts_of(base).read(own)) == "its own"


def saved(made_folder: Path, folder: Path) -> Tokenizer:
    """As a training script saves it beside an adapter."""
    AutoTokenizer.from_pretrained(made_folder).save_pretrained(folder)
    return Tokenizer.from_folder(folder, made_folder)


@pytest.mark.parametrize(
    "layout",
    [made.layout_5, made.layout_4, lambda folder: made.layout_llama(folder, "llama"), made.layout_old],
)
def test_what_transformers_saves_is_the_base_itself(
    layout: Callable[[Path], Path], tmp_path: Path, own: Path
) -> None:
    (tmp_path / "base").mkdir()
    base = layout(tmp_path / "base")
    saved(base, own)
    texts = texts_of(base)
    found = texts.read(own)
    assert found.warnings == ()
    assert found.tokenizer is not None
    assert texts.base.tokenizer is not None
    assert found.tokenizer._backend is texts.base.tokenizer._backend


def changed(folder: Path, change: Callable[[dict[str, Any]], Any], source: Path) -> None:
    content = json.loads((source / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))


def padded(content: dict[str, Any]) -> None:
    """Nothing of this changes an id: another pad token beyond all rows, padding, truncation, the order of keys."""
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.enable_truncation(8)
    backend.enable_padding(length=16)
    written = json.loads(backend.to_str())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    written["added_tokens"].append({"id": 402, "content": "[PAD]", **flags})
    written["model"]["vocab"] = dict(reversed(written["model"]["vocab"].items()))
    written["pre_tokenizer"]["trim_offsets"] = False
    content.clear()
    content.update(reversed(written.items()))


def test_what_changes_no_id_does_not_count(base: Path, own: Path) -> None:
    changed(own, padded, base)
    write(own, tokenizer_config={"pad_token": "[PAD]", "padding_side": "left"})
    found = texts_of(base).read(own)
    assert found.warnings == ()
    assert found.tokenizer is not None
    assert found.tokenizer.encode(made.TEXTS[0]) == Tokenizer.from_folder(base).encode(made.TEXTS[0])


def swap(content: dict[str, Any]) -> None:
    vocab = content["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]


def normalize(content: dict[str, Any]) -> None:
    content["normalizer"] = json.loads(normalizers.Lowercase().__getstate__())


def split(content: dict[str, Any]) -> None:
    content["pre_tokenizer"] = json.loads(pre_tokenizers.Whitespace().__getstate__())


def rename(content: dict[str, Any]) -> None:
    content["added_tokens"][3]["content"] = "<|other|>"
    content["model"]["vocab"]["<|other|>"] = content["model"]["vocab"].pop("<|user|>")


def lack(content: dict[str, Any]) -> None:
    content["model"]["vocab"].pop("Ā")


DIFFERENT = [
    (swap, "token '[AB]' has id"),
    (lambda content: content["model"]["merges"].reverse(), "merges"),
    (lambda content: content["model"]["merges"].pop(), "merges"),
    (normalize, "normalizer"),
    (split, "pre-tokenizer"),
    (rename, "id 3 is token '<|other|>'"),
    (lack, "'Ā' is missing"),
    (lambda content: content["model"].update(byte_fallback=True), "byte_fallback"),
]


@pytest.mark.parametrize(("change", "name"), DIFFERENT)
def test_another_tokenizer_is_refused_by_what_differs(
    base: Path, own: Path, change: Callable[[dict[str, Any]], Any], name: str
) -> None:
    changed(own, change, base)
    with pytest.raises(TokenizerError, match=name) as caught:
        texts_of(base).read(own)
    assert str(own.parent) not in str(caught.value)


def test_added_tokens(base: Path, own: Path) -> None:
    write(own, tokenizer_config={"additional_special_tokens": ["<|one|>", "<|two|>"]})
    changed(own, lambda content: None, base)
    found = texts_of(base).read(own)
    assert found.warnings == ()
    assert found.tokenizer is not None
    assert found.tokenizer.encode("<|one|>a<|two|>", False)[::2] == [400, 401]
    write(own, tokenizer_config={"additional_special_tokens": ["<|one|>", "<|two|>", "<|three|>"]})
    (warning,) = texts_of(base).read(own).warnings
    assert "no row for 1 of" in warning
    assert "<|three|>" in warning


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer": {"model": 3}},
        {"tokenizer_config": [1]},
        {"tokenizer_config": {"added_tokens_decoder": [1]}},
        {"tokenizer_config": {"chat_template": [1]}},
        {"tokenizer_config": {"eos_token": 3}},
        {"added_tokens": {"a": "b"}},
        {"generation_config": {"top_k": -7}},
    ],
)
def test_unusable_files_are_refused(base: Path, own: Path, files: dict[str, Any]) -> None:
    changed(own, lambda content: None, base)
    write(own, **files)
    with pytest.raises(TokenizerError):
        texts_of(base).read(own)


@pytest.mark.parametrize("name", TEXT_FILES)
def test_files_are_bounded(base: Path, own: Path, name: str) -> None:
    with (own / name).open("wb") as file:
        file.truncate(TEXT_FILES[name] + 1)
    with pytest.raises(TokenizerError, match="larger"):
        texts_of(base).read(own)
    (own / name).unlink()
    os.mkfifo(own / name)  # would be waited for
    assert texts_of(base).read(own).warnings == ()


def test_a_version_is_read_once(base: Path, own: Path) -> None:
    texts, card = texts_of(base), AdapterCard("a", str(own), 1, 8, 3, 0)
    (own / "chat_template.jinja").write_text("first")

    async def scenario() -> list[str]:
        first = prompt(await texts.of(card))
        (own / "chat_template.jinja").write_text("second")
        again = AdapterCard("a", str(own), 2, 8, 3, 0)
        return [
            first,
            prompt(await texts.of(card)),
            prompt(await texts.of(again)),
            prompt(await texts.of(None)),
        ]

    assert asyncio.run(scenario())[:3] == ["first", "first", "second"]
