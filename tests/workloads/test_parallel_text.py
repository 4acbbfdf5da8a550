"""Parallel text, on real sentences of NTREX-128."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from manylora_lab.workloads import parallel_text
from manylora_lab.workloads.assembly import Adapters
from manylora_lab.workloads.parallel_text import ParallelText, SentencePair
from manylora_lab.workloads.traces import ReadOptions

from manylora.config.declaring import ConfigError
from tests.workloads.damage import SAMPLES, refuses, with_line, zipped

TABLE = "ntrex_128.tsv"
CELLS = [line.split("\t") for line in (SAMPLES / TABLE).read_text().splitlines()]


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_two_columns() -> None:
    assert parallel_text.languages(SAMPLES / TABLE) == ("eng", "deu", "fra", "arb", "jpn")
    found = parallel_text.read_tsv(SAMPLES / TABLE, "fra", "deu")
    assert found.pairs == tuple(SentencePair(row[2], row[1]) for row in CELLS[1:])
    assert len(parallel_text.read_tsv(SAMPLES / TABLE, "fra", "deu", ReadOptions(limit=4)).pairs) == 4
    with pytest.raises(ConfigError, match=r"line 1: expected a header with eng, tlh"):
        parallel_text.read_tsv(SAMPLES / TABLE, "eng", "tlh")


def test_quotes_are_text(tmp_path: Path) -> None:
    path = tmp_path / "table.tsv"
    path.write_text('eng\tdeu\n"yes\tja"\n')
    assert parallel_text.read_tsv(path, "eng", "deu").pairs == (SentencePair('"yes', 'ja"'),)


def two_files(folder: Path, source: str, target: str) -> tuple[Path, Path]:
    paths = folder / "test.eng", folder / "test.deu"
    for path, content in zip(paths, (source, target)):
        path.write_text(content)
    return paths


def test_two_files(tmp_path: Path) -> None:
    columns = ["\n".join(row[column] for row in CELLS[1:]) for column in (0, 1)]
    eng, deu = two_files(tmp_path, columns[0], columns[1])
    expected = parallel_text.read_tsv(SAMPLES / TABLE, "eng", "deu")
    assert parallel_text.read_lines(eng, deu) == expected
    deu.write_bytes(gzip.compress(deu.read_bytes()))
    assert parallel_text.read_lines(eng, deu) == expected
    assert parallel_text.read_lines(eng, deu, ReadOptions(limit=2)).pairs == expected.pairs[:2]


def test_two_files_stay_aligned_when_a_line_is_left_out(tmp_path: Path) -> None:
    eng, deu = two_files(tmp_path, "one\n\nthree\nfour\n", "eins\nzwei\ndrei\n \n")
    with pytest.raises(ConfigError, match=r"test.eng, line 2: expected a sentence, found 'an empty line'"):
        parallel_text.read_lines(eng, deu)
    found = parallel_text.read_lines(eng, deu, ReadOptions(skip_bad_lines=True))
    assert found.pairs == (SentencePair("one", "eins"), SentencePair("three", "drei"))
    assert found.notes == ("test.eng and test.deu: 2 malformed lines left out",)
    deu.write_bytes(b"eins\nzwei\ndr\xff\nvier\n")
    eng.write_text("one\ntwo\nthree\nfour\n")
    with pytest.raises(ConfigError, match=r"test.deu, line 3: expected UTF-8 text"):
        parallel_text.read_lines(eng, deu)
    assert len(parallel_text.read_lines(eng, deu, ReadOptions(skip_bad_lines=True)).pairs) == 3


@pytest.mark.parametrize("skip", [False, True])
def test_two_files_of_unlike_length(tmp_path: Path, skip: bool) -> None:
    eng, deu = two_files(tmp_path, "one\ntwo\n", "eins\n")
    with pytest.raises(ConfigError, match=r"test.deu, line 2: expected as many lines"):
        parallel_text.read_lines(eng, deu, ReadOptions(skip_bad_lines=skip))


def test_a_stream_takes_turns_between_pairs() -> None:
    texts = {
        "eng-deu": ParallelText((SentencePair("one", "eins"), SentencePair("two", "zwei")), ("a note",)),
        "eng-fra": ParallelText((SentencePair("one", "un"),)),
        "deu-eng": ParallelText((SentencePair("eins", "one"), SentencePair("zwei", "two"))),
    }
    stream = parallel_text.load(
        texts, ReadOptions(Adapters.in_turn((8, 16, 32)), encode=letters), instruction="Say: "
    )
    assert [
        ("".join(chr(t) for t in r.prompt[1].tokens or ()), r.output_tokens, r.adapter)
        for r in stream.requests
    ] == [("one", 4, 0), ("one", 2, 1), ("eins", 3, 2), ("two", 4, 0), ("zwei", 3, 2)]
    assert len({request.prompt[0] for request in stream.requests}) == 1
    assert stream.requests[0].new_tokens == len("Say: one")
    assert "a note" in stream.notes


def test_estimated_lengths_count_bytes() -> None:
    pairs = {"eng-jpn": parallel_text.read_tsv(SAMPLES / TABLE, "eng", "jpn")}
    stream = parallel_text.load(pairs)
    for request, row in zip(stream.requests, CELLS[1:]):
        assert request.new_tokens == (len(row[0].encode()) + 3) // 4
        assert request.output_tokens == (len(row[4].encode()) + 3) // 4


@pytest.mark.parametrize(
    ("line", "expected", "found"),
    [
        ("a\tb\tc", "5 columns", "3: a b c"),
        ("a\t \tc\td\te", "a sentence", "an empty line"),
    ],
)
def test_bad_lines(tmp_path: Path, line: str, expected: str, found: str) -> None:
    path = with_line(tmp_path, TABLE, 6, line)
    left = refuses(
        lambda skip: parallel_text.read_tsv(path, "eng", "deu", ReadOptions(skip_bad_lines=skip)),
        path,
        6,
        expected,
        found,
    )
    assert len(left.pairs) == 11
    assert parallel_text.read_tsv(zipped(tmp_path, TABLE), "eng", "deu").pairs[4] not in left.pairs
