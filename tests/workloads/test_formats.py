"""Files by the name of their format: synthetic rows, real schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manylora.config import ConfigError
from manylora.workloads.formats import Wish, read_file
from manylora.workloads.stream import Stream


def read(path: Path, name: str, **wish: object) -> Stream:
    return read_file(path, name, Wish(**wish))  # type: ignore[arg-type]


@pytest.fixture
def opus(tmp_path: Path) -> Path:
    """As OPUS-100 is unpacked: two files a pair, line i the translation of line i."""
    for stem, sides in {
        "opus.de-en-test": {"de": "Guten Tag\nDanke\n", "en": "Good day\nThanks a lot\n"},
        "opus.en-fr-test": {"en": "Yes\n", "fr": "Oui\n"},
    }.items():
        for language, text in sides.items():
            (tmp_path / f"{stem}.{language}").write_text(text)
    (tmp_path / "LICENSE.txt").write_text("one file alone is no pair")
    return tmp_path


def test_parallel_files_are_adapters(opus: Path) -> None:
    stream = read(opus, "opus")
    assert len(stream.ranks) == 4  # two pairs, both ways
    assert len(stream.requests) == 2 * 2 + 2 * 1
    assert len({request.adapter for request in stream.requests}) == 4
    assert len(read(opus, "opus", num_adapters=2).ranks) == 2


def test_bad_folders_are_one_line(opus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"4 pairs .* fewer than 9 adapters"):
        read(opus, "opus", num_adapters=9)
    with pytest.raises(ConfigError, match="not a folder"):
        read(opus / "LICENSE.txt", "opus")
    (opus / "opus.en-fr-test.fr").write_text("Oui\nNon\n")
    with pytest.raises(ConfigError, match=r"opus.en-fr-test.en, line 2: expected as many lines"):
        read(opus, "opus")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="0 pairs"):
        read(empty, "opus")


def test_the_arena_has_times_and_models(tmp_path: Path) -> None:
    def dialog(reply: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": reply}]

    rows = [
        {
            "question_id": str(number), "model_a": "koala", "model_b": "gpt", "winner": "tie", "turn": 1,
            "conversation_a": dialog("Hi"), "conversation_b": dialog("Good day"), "language": "English",
            "tstamp": 100.0 + 3 * number, "anony": True,
        }
        for number in range(2)
    ]  # fmt: skip
    path = tmp_path / "arena.json"
    path.write_text(json.dumps(rows))
    stream = read(path, "arena", num_adapters=2)
    assert [request.arrival_s for request in stream.requests] == [0.0, 0.0, 3.0, 3.0]
    assert len(stream.ranks) == 2
