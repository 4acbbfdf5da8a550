"""Figures in README.md and docs/ that come from a record are filled in from it.

    python -m tools.figures              # write every figure anew, in place (make docs)
    python -m tools.figures --check      # write nothing; exit code 1 where a figure differs
    python -m tools.figures --list [NAME ...]    # each marker's value, record, command and commit

A figure stands between two comments, which no reader of the rendered page sees:

    <!--fig NAME: RECORD:PATH; FORMAT-->4.2<!--/-->
    <!--fig NAME: OPERATION RECORD:PATH; RECORD:PATH; FORMAT-->13<!--/-->

NAME is unique among all pages. RECORD is a file in docs/results, PATH a path in it (``tools/records.py``); the second
operand may leave the record's name out (``:PATH``). An operation is

- of one operand, whose path may name several values: ``mean``, ``median``, ``min``, ``max``, ``sum``, ``count``;
- of two: ``ratio`` (first / second), ``change`` (from second to first, in percent), ``diff`` (first - second),
  ``share`` (first / (first + second)), ``equal`` (1 or 0). Each operand may have an operation of one of its own
  (``ratio mean A; mean B``). Where operands name several values, these are taken in pairs, and an operation of one
  before the other says what of the results is meant (``median change A; B``).

FORMAT is a format of Python's for numbers (``.1f``, ``,.0f``; ``.-3f`` rounds to thousands), after a factor if one is
needed (``x100 .1f``).

A table is written by a function of ``tools/tables.py``:

    <!--table NAME: RECORD; FUNCTION-->
    | ... |
    <!--/table-->

and some pages are written as a whole (``tables.PAGES``). Markers in code are text. All pages are computed before the
first is written: on any error nothing is, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.origins import origin_of
from tools.records import FigureError, Found, Records
from tools.tables import PAGES, TABLES

ROOT = Path(__file__).resolve().parent.parent
RECORDS = Path("docs/results")

OF_ONE: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "sum": sum,
    "count": len,
}
OF_TWO: dict[str, Callable[[float, float], float]] = {
    "ratio": lambda first, second: first / second,
    "change": lambda first, second: 100 * (first / second - 1),
    "diff": lambda first, second: first - second,
    "share": lambda first, second: first / (first + second),
    "equal": lambda first, second: float(first == second),
}

_COMMENT = re.compile(r"<!--(?P<text>[^\n]*?)-->")
_LOOKS_LIKE = re.compile(r"<!--\s*(?:fig\b|table\b|/)")
_OPENS = re.compile(r"(?P<kind>fig|table) (?P<name>[\w.-]+): (?P<rest>.+)")
_OPERAND = re.compile(r"(?P<words>(?:[a-z]+ )*)(?P<record>[\w.-]+\.json)?:(?P<path>.+)")
_FORMAT = re.compile(r"(?:x(?P<factor>-?\d+(?:\.\d*)?(?:e-?\d+)?) )?(?P<shown>\+?,?)\.(?P<digits>-?\d)f")
_CODE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)", re.S | re.M)
_LINE_START = re.compile(r"\s*(?:(?:[-*+>]|\d+[.)])\s*)*")


@dataclass(frozen=True)
class Marker:
    """``start``, ``end``: where its value stands in the page, in characters. ``rest``: what follows its name."""

    page: Path
    line: int
    kind: str
    name: str
    rest: str
    start: int
    end: int


@dataclass(frozen=True)
class Operand:
    """``reduce``: an operation of one, or None."""

    reduce: str | None
    record: str
    path: str

    def values(self, records: Records) -> list[float]:
        values = records.numbers(self.record, self.path)
        return [OF_ONE[self.reduce](values)] if self.reduce else values


@dataclass(frozen=True)
class Figure:
    """What a marker of a figure says. ``reduce``: an operation of one over the pairs' results, or None."""

    reduce: str | None
    combine: str | None
    operands: tuple[Operand, ...]
    factor: float
    shown: str
    digits: int

    @classmethod
    def parse(cls, text: str) -> Figure:
        """Raises FigureError."""
        *parts, shape = [part.strip() for part in text.split(";")]
        form = _FORMAT.fullmatch(shape)
        if form is None:
            raise FigureError(f"malformed format {shape!r}")
        found = [match for match in map(_OPERAND.fullmatch, parts) if match is not None]
        if len(found) != len(parts) or not 1 <= len(parts) <= 2 or found[0]["record"] is None:
            raise FigureError(f"malformed marker: {text!r} is not RECORD:PATH; FORMAT")
        words = [match["words"].split() for match in found]
        for word in (word for one in words for word in one):
            if word not in OF_ONE and word not in OF_TWO:
                raise FigureError(f"there is no operation {word!r}")
        place = next((place for place, word in enumerate(words[0]) if word in OF_TWO), None)
        outer, combine = words[0], None
        if place is not None:
            outer, combine, words[0] = words[0][:place], words[0][place], words[0][place + 1 :]
        else:
            words[0] = []
        if (combine is None) != (len(parts) == 1) or any(len(one) > 1 for one in (outer, *words)):
            raise FigureError(f"malformed marker: the operations in {text!r} do not fit its operands")
        operands = tuple(
            Operand(one[0] if one else None, match["record"] or found[0]["record"], match["path"])
            for one, match in zip(words, found, strict=True)
        )
        factor = float(form["factor"]) if form["factor"] else 1.0
        return cls(outer[0] if outer else None, combine, operands, factor, form["shown"], int(form["digits"]))

    def text(self, records: Records) -> str:
        """The figure as it stands in the page. Raises FigureError."""
        values = self._values(records)
        if self.reduce:
            values = [OF_ONE[self.reduce](values)]
        if len(values) != 1:
            raise FigureError(f"{len(values)} values, where one is needed")
        value = round(values[0] * self.factor, self.digits)
        shown = f"{value:{self.shown}.{max(self.digits, 0)}f}"
        return shown if re.search(r"[1-9]", shown) else shown.lstrip("-+")

    def _values(self, records: Records) -> list[float]:
        lists = [operand.values(records) for operand in self.operands]
        if self.combine is None:
            return lists[0]
        first, second = lists
        if len(first) != len(second) and 1 not in (len(first), len(second)):
            raise FigureError(f"{len(first)} and {len(second)} values make no pairs")
        pairs = zip(first * (len(second) if len(first) == 1 else 1), second * (len(first) if len(second) == 1 else 1))
        try:
            return [OF_TWO[self.combine](*pair) for pair in pairs]
        except ZeroDivisionError:
            raise FigureError("a division by zero") from None


class Site:
    """The pages below ``root`` and the records that they cite."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.records = Records(root / RECORDS)
        self.errors: list[str] = []

    def pages(self) -> list[Path]:
        docs = sorted((self.root / "docs").rglob("*.md"))
        return [page for page in (self.root / "README.md", *docs) if page.is_file()]

    def restored(self) -> dict[Path, str]:
        """Every page as its records have it; what is wrong stands in ``errors``."""
        named: dict[str, Marker] = {}
        texts = {}
        for page in self.pages():
            text = page.read_bytes().decode("utf-8")
            whole = PAGES.get(page.relative_to(self.root).as_posix())
            if whole is not None:
                record, write = whole
                made = self._tried(page, 1, lambda write=write, record=record: write(self.records[record]))
                texts[page] = text if made is None else made
                continue
            pieces, position = [], 0
            for marker in self.markers(page, text):
                if marker.name in named:
                    other = named[marker.name]
                    self.error(page, marker.line, f"{marker.name} is named in {self.where(other)} already")
                named[marker.name] = marker
                value = self._tried(page, marker.line, lambda marker=marker: self.value(marker))
                pieces += [text[position : marker.start], "" if value is None else value]
                position = marker.end
            texts[page] = "".join((*pieces, text[position:]))
        return texts

    def value(self, marker: Marker) -> str:
        """Raises FigureError."""
        if marker.kind == "fig":
            return Figure.parse(marker.rest).text(self.records)
        record, _, function = (part.strip() for part in marker.rest.partition(";"))
        if function not in TABLES:
            raise FigureError(f"there is no table {function!r}")
        return "\n" + TABLES[function](self.records[record]).strip("\n") + "\n"

    def markers(self, page: Path, text: str) -> list[Marker]:
        """In order; what is malformed is left out and stands in ``errors``."""
        code = [match.span() for match in _CODE.finditer(text)]
        opened: tuple[int, re.Match[str], re.Match[str]] | None = None
        found: list[Marker] = []
        for start in (match.start() for match in _LOOKS_LIKE.finditer(text)):
            if any(first <= start < last for first, last in code):
                continue
            line = text.count("\n", 0, start) + 1
            comment = _COMMENT.match(text, start)
            if comment is None:
                self.error(page, line, "a marker that does not end in its line")
            elif comment["text"] in ("/", "/table"):
                if opened is None:
                    self.error(page, line, "a marker ends that did not begin")
                    continue
                began, opening, named = opened
                opened = None
                kind = named["kind"]
                value = text[opening.end() : start]
                if (comment["text"] == "/table") != (kind == "table") or (kind == "fig" and re.search("[<\n]", value)):
                    self.error(page, began, f"{named['name']} does not end")
                    continue
                found.append(Marker(page, began, kind, named["name"], named["rest"], opening.end(), start))
            else:
                if opened is not None:
                    self.error(page, opened[0], f"{opened[2]['name']} does not end")
                match = _OPENS.fullmatch(comment["text"])
                opened = None
                if match is None:
                    self.error(page, line, f"malformed marker {comment[0]}")
                    continue
                if (match["kind"] == "table") != _starts_line(text, start):
                    where = "begins its line, which ends" if match["kind"] == "fig" else "does not begin its line, in"
                    self.error(page, line, f"{match['name']} {where} the paragraph")
                opened = line, comment, match
        if opened is not None:
            self.error(page, opened[0], f"{opened[2]['name']} does not end")
        return found

    def where(self, marker: Marker) -> str:
        return f"{marker.page.relative_to(self.root).as_posix()}:{marker.line}"

    def error(self, page: Path, line: int, reason: str) -> None:
        self.errors.append(f"{page.relative_to(self.root).as_posix()}:{line}: {reason}")

    def _tried(self, page: Path, line: int, made: Callable[[], str]) -> str | None:
        try:
            return made()
        except FigureError as error:
            self.error(page, line, str(error))
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            self.error(page, line, f"the record has not what the table needs: {type(error).__name__} {error}")
        return None

    def listed(self) -> Iterator[tuple[Marker, str]]:
        """Each marker with its value."""
        for page in self.pages():
            for marker in self.markers(page, page.read_bytes().decode("utf-8")):
                yield marker, "a table" if marker.kind == "table" else self.value(marker)

    def found(self, marker: Marker) -> list[tuple[str, Found]]:
        """The records that a marker cites, each with the first value that is meant."""
        if marker.kind == "table":
            record = marker.rest.partition(";")[0].strip()
            return [(record, Found(self.records[record], (), ()))]
        operands = Figure.parse(marker.rest).operands
        return [(one.record, self.records.find(one.record, one.path)[0]) for one in operands]


def _starts_line(text: str, start: int) -> bool:
    return _LINE_START.fullmatch(text, text.rfind("\n", 0, start) + 1, start) is not None


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.figures", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a figure differs")
    parser.add_argument("--list", nargs="*", metavar="NAME", help="each marker's value, record, command and commit")
    args = parser.parse_args(argv)
    site = Site(root)
    texts = site.restored()
    if site.errors:
        print("\n".join(site.errors), file=sys.stderr)
        return 1
    if args.list is not None:
        return _list(site, args.list)
    changed = {page: text for page, text in texts.items() if page.read_bytes().decode("utf-8") != text}
    for page, text in changed.items():
        name = page.relative_to(root).as_posix()
        if args.check:
            line = _first_difference(page.read_bytes().decode("utf-8"), text)
            print(f"{name}:{line}: not what its records say; `make docs` restores it", file=sys.stderr)
        else:
            page.write_bytes(text.encode("utf-8"))
            print(f"{name}: restored")
    return 1 if args.check and changed else 0


def _list(site: Site, names: Sequence[str]) -> int:
    unknown = set(names)
    for marker, value in site.listed():
        if names and marker.name not in names:
            continue
        unknown.discard(marker.name)
        print(f"{marker.name} = {value}    {site.where(marker)}\n    {marker.rest}")
        for record, found in dict(site.found(marker)).items():
            print(f"    {record}: {origin_of(site.records[record], found)}")
    if unknown:
        print(f"there is no marker {', '.join(sorted(unknown))}", file=sys.stderr)
    return 1 if unknown else 0


def _first_difference(have: str, want: str) -> int:
    pairs = enumerate(zip(have.splitlines(), want.splitlines(), strict=False), 1)
    return next((line for line, (mine, theirs) in pairs if mine != theirs), 1)


if __name__ == "__main__":
    sys.exit(main())
