"""Encoding and decoding equal transformers' AutoTokenizer, in every layout on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from manylora.text.tokenizer import MissingTokenizer, Tokenizer, TokenizerError
from tests.text import made

LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "5-bos": lambda folder: made.layout_5(folder, with_bos=True),
    "5-plain": lambda folder: made.layout_5(folder, with_bos=False),
    "4-bos": lambda folder: made.layout_4(folder, with_bos=True),
    "4-plain": lambda folder: made.layout_4(folder, with_bos=False),
    "old-metaspace": made.layout_old,
    "llama": made.layout_llama,
    "llama-legacy": lambda folder: made.layout_llama(folder, "llama", legacy=True, unk_token="<unk>"),
    "llama-no-prefix": lambda folder: made.layout_llama(folder, "qwen3", add_prefix_space=False, legacy=None),
    "llama-of-mistral": lambda folder: made.layout_llama(folder, "mistral", legacy=False),
    "llama-fast": lambda folder: made.layout_llama(folder, "llama", tokenizer_class="LlamaTokenizerFast"),
    "llama-code": lambda folder: made.layout_code_llama(folder, legacy=True),
    "llama-code-no-prefix": lambda folder: made.layout_code_llama(folder, add_prefix_space=False),
    "late-decoder": lambda folder: made.layout_late(folder, decoder=True),
    "late-alone": lambda folder: made.layout_late(folder, decoder=False),
}
SAMPLES = [
    *made.TEXTS,
    "",
    " ",
    "  two  spaces ",
    "<|user|>hello<|eos|> there",
    "<|late|> <tool_call>x</s>",
    "<s> one</s>two <|new|>  three</s> ",
    "\x00\n\t é́ 🙂‍↔️ ﷽",
]


@pytest.fixture(params=LAYOUTS, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return LAYOUTS[request.param](tmp_path_factory.mktemp("tokenizer"))


def test_equals_transformers(folder: Path) -> None:
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    for text in SAMPLES:
        for add_special_tokens in (True, False):
            ids = ours.encode(text, add_special_tokens)
            assert ids == theirs.encode(text, add_special_tokens=add_special_tokens), text
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.special_tokens == theirs.special_tokens_map


def test_demo_tokenizer_equals_transformers() -> None:
    folder = Path(__file__).parents[2] / "demo" / "model"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("the demo model has not been made")
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in SAMPLES:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.chat_templates["default"] == theirs.chat_template


def test_ignores_truncation_and_padding_in_the_file(tmp_path: Path) -> None:
    backend = made.byte_level(with_bos=False)
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_folder(made.write_folder(tmp_path, backend, {}))
    text = made.TEXTS[0]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_template_file_wins_over_config(tmp_path: Path) -> None:
    config = {"chat_template": "inline"}
    folder = made.write_folder(tmp_path, made.byte_level(False), config, chat_template="from the file")
    assert Tokenizer.from_folder(folder).chat_templates == {"default": "from the file"}


def test_named_templates(tmp_path: Path) -> None:
    assert set(Tokenizer.from_folder(made.layout_4(tmp_path)).chat_templates) == {"default", "tool_use"}


def test_missing_and_broken(tmp_path: Path) -> None:
    with pytest.raises(MissingTokenizer, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_broken_config(tmp_path: Path) -> None:
    made.layout_5(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="not JSON"):
        Tokenizer.from_folder(tmp_path)


def test_token_bytes_join_to_the_text(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    for text in made.TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert joined.lstrip() == tokenizer.decode(ids, skip_special_tokens=False).lstrip()
    assert tokenizer.token_bytes(10**6) == b""
