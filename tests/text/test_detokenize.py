"""Incremental text equals the whole decode, for any tokens."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.text.detokenize import WindowDetokenizer
from manylora.text.tokenizer import Tokenizer
from tests.text import made


@functools.cache
def byte_level() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.from_folder(made.layout_4(Path(folder)))


@functools.cache
def metaspace() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.from_folder(made.layout_old(Path(folder)))


@functools.cache
def decoded_by(kind: str) -> Tokenizer:
    return Tokenizer(made.DECODERS[kind]())


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool, prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip, prompt)
    return [*map(detokenizer.add, ids), detokenizer.finish()]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 420), max_size=60), skip=st.booleans())
def test_byte_level_equals_whole_decode_of_any_ids(ids: list[int], skip: bool) -> None:
    tokenizer = byte_level()
    assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40), skip=st.booleans())
def test_metaspace_equals_whole_decode_of_any_text(text: str, skip: bool) -> None:
    tokenizer = metaspace()
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(259, 599) | st.integers(0, 2), max_size=40))
def test_metaspace_equals_whole_decode_of_any_ids_but_stray_bytes(ids: list[int]) -> None:
    tokenizer = metaspace()
    assert "".join(pieces(tokenizer, ids, True)) == tokenizer.decode(ids)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 599), max_size=60))
def test_metaspace_with_stray_bytes_loses_no_character(ids: list[int]) -> None:
    """A byte that makes a run of bytes invalid comes too late for what was already shown of the run."""
    tokenizer = metaspace()
    shown, whole = "".join(pieces(tokenizer, ids, True)), tokenizer.decode(ids)
    stripped = str.maketrans("", "", "\ufffd")
    for char in set(whole.translate(stripped)):
        assert char in shown


@pytest.mark.parametrize("tokenizer", [byte_level, metaspace])
def test_a_character_is_never_shown_in_parts(tokenizer: Callable[[], Tokenizer]) -> None:
    ids = tokenizer().encode("a🙂ﷺ b", add_special_tokens=False)
    assert len(ids) > 6
    assert not any("\ufffd" in piece for piece in pieces(tokenizer(), ids, True))


def test_an_unfinished_character_shows_at_the_end() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("🙃", add_special_tokens=False)
    assert len(ids) > 1
    assert pieces(tokenizer, ids[:-1], True)[-1] == tokenizer.decode(ids[:-1]) != ""


@pytest.mark.parametrize("kind", made.DECODERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), text=st.text(alphabet="the dog's a. ä🙂ﷺ", max_size=30), skip=st.booleans())
def test_text_follows_the_prompt(kind: str, data: st.DataObject, text: str, skip: bool) -> None:
    """Wherever a text is cut, within a character too; the judge is the whole decode after the prompt's."""
    tokenizer = decoded_by(kind)
    ids = tokenizer.encode(data.draw(st.sampled_from(["", *made.TEXTS])) + text)
    cut = data.draw(st.integers(0, len(ids)))
    after = tokenizer.decode(ids, skip)[len(tokenizer.decode(ids[:cut], skip)) :]
    assert "".join(pieces(tokenizer, ids[cut:], skip, ids[:cut])) == after


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 420), max_size=40), cut=st.integers(0, 40), skip=st.booleans())
def test_any_byte_level_ids_follow_any_prompt(ids: list[int], cut: int, skip: bool) -> None:
    tokenizer = byte_level()
    after = tokenizer.decode(ids, skip)[len(tokenizer.decode(ids[:cut], skip)) :]
    assert "".join(pieces(tokenizer, ids[cut:], skip, ids[:cut])) == after


def test_a_long_prompt_costs_no_more() -> None:
    lengths = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return metaspace().decode(ids)

    prompt = metaspace().encode("ﷺ" * 5000)  # one run of bytes
    detokenizer = WindowDetokenizer(decode, frozenset(), prompt)
    assert "".join(map(detokenizer.add, prompt[-3:])) == "ﷺ"
    assert max(lengths) < 40


def test_window_stays_short() -> None:
    lengths = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return metaspace().decode(ids)

    detokenizer = WindowDetokenizer(decode, frozenset())
    stray = metaspace().encode("🙂", add_special_tokens=False)[-1]
    for _ in range(200):
        detokenizer.add(stray)
    assert max(lengths) < 40
