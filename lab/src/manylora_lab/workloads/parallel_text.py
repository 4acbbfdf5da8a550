"""Sentences with their translations: NTREX and OPUS-100, as two files of parallel lines or one TSV.

No times: requests arrive at 0 (see assembly.py). Sources and licences: docs/workloads.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from manylora.config.declaring import ConfigError
from manylora_lab.workloads.assembly import NO_TIMES, TextPieces
from manylora_lab.workloads.stream import Stream, StreamRequest, in_order
from manylora_lab.workloads.text_file import BadLine, TextFile
from manylora_lab.workloads.traces import WHOLE, ReadOptions

_END = object()
_NTREX_FILE = re.compile(r".+-(?:src|ref)\.(.+)\.txt(?:\.gz)?")


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


def read_tsv(path: Path | str, source: str, target: str, options: ReadOptions = WHOLE) -> ParallelText:
    """The first ``options.limit`` sentences in two columns of a TSV, unquoted, whose header names languages.

    Raises ConfigError for a language that is not there and for a malformed line.
    """
    return read_pairs(path, [(source, target)], options)[0]


def read_pairs(
    path: Path | str, languages: Sequence[tuple[str, str]], options: ReadOptions = WHOLE
) -> list[ParallelText]:
    """As ``read_tsv``, for each source and target of ``languages``; the file is read once.

    A line that is malformed in any of these languages is so for all.
    """

    def row(cells: Mapping[str, str]) -> list[SentencePair]:
        return [_pair(cells[source], cells[target]) for source, target in languages]

    file = TextFile(path, options.skip_bad_lines)
    columns = list(dict.fromkeys(code for pair in languages for code in pair))
    rows = list(itertools.islice(file.rows(columns, row, delimiter="\t", quoted=False), options.limit))
    return [ParallelText(tuple(pairs[i] for pairs in rows), file.notes) for i in range(len(languages))]


def read_lines(
    source_path: Path | str, target_path: Path | str, options: ReadOptions = WHOLE
) -> ParallelText:
    """The first ``options.limit`` pairs of two files in which line i is the translation of line i.

    Raises ConfigError if a line is empty on one side or is not text, and, skipping or not, if one file is longer.
    Skipping leaves out the pair, so that the rest stays aligned.
    """
    pairs: list[SentencePair] = []
    skipped = 0
    paths = (source_path, target_path)
    sides = itertools.zip_longest(*(TextFile(path).every_line() for path in paths), fillvalue=_END)
    for number, sentences in enumerate(sides, start=1):
        if len(pairs) == options.limit:
            break
        for path, sentence in zip(paths, sentences):
            if sentence is _END:
                raise ConfigError(
                    f"{path}, line {number}: expected as many lines as its parallel file, found its end"
                )
            problem = _problem(sentence)
            if problem and not options.skip_bad_lines:
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


def ntrex_files(folder: Path) -> dict[str, Path]:
    """The files, by language, of NTREX-128 as published: ``newstest2019-src.eng.txt``, ``-ref.deu.txt``, ..."""
    named = ((_NTREX_FILE.fullmatch(file.name), file) for file in sorted(folder.iterdir()))
    return {found[1]: file for found, file in named if found is not None}


def opus_files(folder: Path) -> dict[tuple[str, str], list[tuple[Path, Path]]]:
    """The parallel files, by source and target language, of a folder and all below it, as OPUS-100 is unpacked.

    Parallel are two files of one folder whose names differ in the last suffix alone, their language:
    ``de-en/opus.de-en-test.de`` and ``.en``. Of a pair that comes as train, dev and test sets only the test sets
    are taken (without them dev's): what a model tuned on the others would be asked. Both directions are pairs.
    """
    sides: dict[Path, dict[str, Path]] = {}
    for file in sorted(folder.rglob("*")):
        stem, _, language = file.name.removesuffix(".gz").rpartition(".")
        if stem and file.is_file():
            sides.setdefault(file.with_name(stem), {})[language] = file
    pairs: dict[tuple[str, str], dict[Path, tuple[Path, Path]]] = {}
    for stem_path, files in sides.items():
        if len(files) == 2:
            for source, target in itertools.permutations(files):
                pairs.setdefault((source, target), {})[stem_path] = files[source], files[target]
    return {languages: _one_split(found) for languages, found in pairs.items()}


def _one_split(found: Mapping[Path, tuple[Path, Path]]) -> list[tuple[Path, Path]]:
    for split in ("-test", "-dev"):
        if chosen := [files for stem, files in found.items() if stem.name.endswith(split)]:
            return chosen
    return list(found.values())


def joined(texts: Sequence[ParallelText]) -> ParallelText:
    """One after the other."""
    pairs = tuple(itertools.chain.from_iterable(text.pairs for text in texts))
    return ParallelText(pairs, tuple(note for text in texts for note in text.notes))


def load(
    texts: Mapping[str, ParallelText], options: ReadOptions = WHOLE, instruction: str | None = None
) -> Stream:
    """A request for each sentence: the source (after ``instruction``, the same for all) and the target's length.

    ``texts`` by the name of their language pair, such as "eng-deu", which is the key of a request: FastLibra
    (section 6.2) gives each pair an adapter. The pairs take turns: the first sentence of each, then the
    second of each. Raises ConfigError if there are none.
    """
    pieces = TextPieces(options.encode)
    opening = pieces.pieces(instruction) if instruction else ()
    columns = [[(key, pair) for pair in text.pairs] for key, text in texts.items()]
    in_turn = (found for row in itertools.zip_longest(*columns) for found in row if found is not None)
    requests = [
        StreamRequest(
            0.0,
            options.adapters.choose(key),
            number,
            0,
            opening + pieces.pieces(pair.source),
            pieces.length(pair.target),
        )
        for number, (key, pair) in enumerate(in_turn)
    ]
    notes = dict.fromkeys(note for text in texts.values() for note in text.notes)
    about = ("parallel text: real sentences, no times", *notes, *pieces.notes, NO_TIMES)
    return in_order("translation", requests, options.adapters.ranks, about)


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
