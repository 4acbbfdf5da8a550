"""Sentences with their translations: NTREX and OPUS-100, as two files of parallel lines or one TSV.

No times: requests arrive at 0 (see assembly.py). Sources and licences: docs/workloads.md.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from manylora.config import ConfigError
from manylora.workloads.assembly import NO_TIMES, Adapters, TextPieces
from manylora.workloads.stream import Encode, Stream, StreamRequest, in_order
from manylora.workloads.text_file import BadLine, TextFile

_END = object()


class SentencePair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


@dataclasses.dataclass(frozen=True)
class ParallelText:
    """Sentences of one language pair, in order, and what a stream's notes should say of them."""

    pairs: tuple[SentencePair, ...]
    notes: tuple[str, ...] = ()


def languages(path: Path | str) -> tuple[str, ...]:
    """The columns of a TSV of languages, in order; raises ConfigError for an empty file and a language twice."""

    def codes(line: str) -> tuple[str, ...]:
        found = tuple(code.strip() for code in line.split("\t"))
        if len(set(found)) < len(found):
            raise BadLine("a header that has each language once", line)
        return found

    header = next(TextFile(path).lines(codes), None)
    if header is None:
        raise ConfigError(f"{path}: expected a header of languages, found an empty file")
    return header


def read_tsv(
    path: Path | str, source: str, target: str, *, limit: int | None = None, skip_bad_lines: bool = False
) -> ParallelText:
    """The first ``limit`` sentences in two columns of a TSV whose header names languages; nothing is quoted.

    Raises ConfigError for a language that is not there and for a malformed line.
    """

    return read_pairs(path, [(source, target)], limit=limit, skip_bad_lines=skip_bad_lines)[0]


def read_pairs(
    path: Path | str,
    languages: Sequence[tuple[str, str]],
    *,
    limit: int | None = None,
    skip_bad_lines: bool = False,
) -> list[ParallelText]:
    """As ``read_tsv``, for each source and target of ``languages``; the file is read once.

    A line that is malformed in any of these languages is so for all.
    """

    def row(cells: Mapping[str, str]) -> list[SentencePair]:
        return [_pair(cells[source], cells[target]) for source, target in languages]

    file = TextFile(path, skip_bad_lines)
    columns = list(dict.fromkeys(code for pair in languages for code in pair))
    rows = list(itertools.islice(file.rows(columns, row, delimiter="\t", quoted=False), limit))
    return [ParallelText(tuple(pairs[i] for pairs in rows), file.notes) for i in range(len(languages))]


def read_lines(
    source_path: Path | str,
    target_path: Path | str,
    *,
    limit: int | None = None,
    skip_bad_lines: bool = False,
) -> ParallelText:
    """The first ``limit`` pairs of two files in which line i is the translation of line i.

    Raises ConfigError if a line is empty on one side or is not text, and, skipping or not, if one file is longer.
    Skipping leaves out the pair, so that the rest stays aligned.
    """
    pairs: list[SentencePair] = []
    skipped = 0
    paths = (source_path, target_path)
    sides = itertools.zip_longest(*(TextFile(path).every_line() for path in paths), fillvalue=_END)
    for number, sentences in enumerate(sides, start=1):
        if len(pairs) == limit:
            break
        for path, sentence in zip(paths, sentences):
            if sentence is _END:
                raise ConfigError(
                    f"{path}, line {number}: expected as many lines as its parallel file, found its end"
                )
            problem = _problem(sentence)
            if problem and not skip_bad_lines:
                raise ConfigError(f"{path}, line {number}: {problem}")
        source, target = sentences
        if (
            isinstance(source, str)
            and isinstance(target, str)
            and not _problem(source)
            and not _problem(target)
        ):
            pairs.append(SentencePair(source, target))
        else:
            skipped += 1
    names = " and ".join(Path(path).name for path in paths)
    return ParallelText(tuple(pairs), (f"{names}: {skipped} malformed lines left out",) if skipped else ())


def load(
    texts: Mapping[str, ParallelText],
    *,
    encode: Encode | None = None,
    adapters: Adapters | None = None,
    instruction: str | None = None,
) -> Stream:
    """A request for each sentence: the source (after ``instruction``, the same for all) and the target's length.

    ``texts`` by the name of their language pair, such as "eng-deu", which is the key of a request: FastLibra
    (section 6.2) gives each pair an adapter. The pairs take turns: everybody's first sentence, then everybody's
    second. Raises ConfigError if there are none.
    """
    adapters = adapters or Adapters()
    pieces = TextPieces(encode)
    opening = pieces.pieces(instruction) if instruction else ()
    columns = [[(key, pair) for pair in text.pairs] for key, text in texts.items()]
    in_turn = (found for row in itertools.zip_longest(*columns) for found in row if found is not None)
    requests = [
        StreamRequest(
            0.0,
            adapters.choose(key),
            number,
            0,
            opening + pieces.pieces(pair.source),
            pieces.length(pair.target),
        )
        for number, (key, pair) in enumerate(in_turn)
    ]
    notes = dict.fromkeys(note for text in texts.values() for note in text.notes)
    about = ("parallel text: real sentences, no times", *notes, *pieces.notes, NO_TIMES)
    return in_order("translation", requests, adapters.ranks, about)


def _pair(source: str, target: str) -> SentencePair:
    for sentence in (source, target):
        problem = _problem(sentence)
        if problem:
            raise problem
    return SentencePair(source, target)


def _problem(sentence: object) -> BadLine | None:
    """None: there is none."""
    if not isinstance(sentence, str):
        return BadLine("UTF-8 text", "bytes that are not")
    return None if sentence.strip() else BadLine("a sentence", "an empty line")
