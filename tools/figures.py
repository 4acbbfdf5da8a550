"""Figures in README.md and docs/ that come from a record are filled in from it.

    python -m tools.figures              # write every figure anew, in place (make docs)
    python -m tools.figures --check      # write nothing; exit code 1 where a figure differs
    python -m tools.figures --list [NAME ...]    # each marker's value, record, command and commit
    python -m tools.figures --command NAME       # a line for a shell that makes the marker's record again

A figure stands between two comments, which no reader of the rendered page sees:

    <!--fig NAME: RECORD:PATH; FORMAT-->4.2<!--/-->
    <!--fig NAME: OPERATION RECORD:PATH; RECORD:PATH; FORMAT-->13<!--/-->

NAME is unique among all pages. RECORD is a file in docs/results, PATH a path in it (``tools/records.py``); the
second operand may leave the record's name out (``:PATH``). An operation is

- of one operand, whose path may name several values: ``mean``, ``median``, ``min``, ``max``, ``sum``, ``count``;
- of two: ``ratio`` (first / second), ``change`` (from second to first, in percent), ``diff`` (first - second),
  ``share`` (first / (first + second)), ``equal`` (1 or 0). Each operand may have an operation of one of its own
  (``ratio mean A; mean B``). Where operands name several values, these are taken in pairs, and an operation of one
  before the other says what of the results is meant (``median change A; B``).

FORMAT is a format of Python's for numbers (``.1f``, ``,.0f``; ``.-3f`` rounds to thousands), after a factor if one
is needed (``x100 .1f``).

A table is written by a function of ``tools/tables.py``:

    <!--table NAME: RECORD; FUNCTION-->
    | ... |
    <!--/table-->

and some pages are written as a whole (``tables.PAGES``). Markers in code are text. All pages are computed before
the first is written: on any error nothing is, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.expressions import Figure
from tools.markers import Marker, Problem, scan
from tools.origins import Origin, origin_of, origins_of
from tools.records import FigureError, Records
from tools.tables import PAGES, TABLES

ROOT = Path(__file__).resolve().parent.parent
RECORDS = Path("docs/results")
_NO_NUMBER = re.compile(r"(?<![\w.])(?:nan|inf)(?![\w.])")


class Filled(NamedTuple):
    """A marker, the page that it stands in (below the site's root), and its value as the record has it."""

    page: str
    marker: Marker
    value: str


class Site:
    """The pages below ``root`` and the records that they cite. What is wrong is kept in ``errors``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.records = Records(root / RECORDS)
        self.errors: list[str] = []
        self.filled: list[Filled] = []

    def pages(self) -> list[Path]:
        docs = sorted((self.root / "docs").rglob("*.md"))
        return [page for page in (self.root / "README.md", *docs) if page.is_file()]

    def restore(self) -> dict[str, tuple[str, str]]:
        """Every page by its path below the root: as it is, and as its records have it."""
        texts = {}
        for path in self.pages():
            page = path.relative_to(self.root).as_posix()
            data = path.read_bytes()
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError as error:
                self._error(page, data.count(b"\n", 0, error.start) + 1, f"no UTF-8: {error.reason}")
                continue
            texts[page] = text, self._whole(page, text) if page in PAGES else self._page(page, text)
        return texts

    def _page(self, page: str, text: str) -> str:
        pieces, position = [], 0
        for marker in self._markers(page, text):
            try:
                value = self.value(marker)
            except FigureError as error:
                self._error(page, marker.line, str(error))
                continue
            self.filled.append(Filled(page, marker, value))
            pieces += [text[position : marker.start], value]
            position = marker.end
        return "".join((*pieces, text[position:]))

    def _whole(self, page: str, text: str) -> str:
        try:
            return self._made(*PAGES[page])
        except FigureError as error:
            self._error(page, 1, str(error))
            return text

    def _markers(self, page: str, text: str) -> Iterator[Marker]:
        places = {one.marker.name: f"{one.page}:{one.marker.line}" for one in self.filled}
        for found in scan(text):
            if isinstance(found, Problem):
                self._error(page, found.line, found.reason)
                continue
            if found.name in places:
                self._error(page, found.line, f"{found.name} is named in {places[found.name]} already")
            places.setdefault(found.name, f"{page}:{found.line}")
            yield found

    def value(self, marker: Marker) -> str:
        """What belongs between the two comments. Raises FigureError."""
        if marker.kind == "fig":
            return Figure.parse(marker.rest).text(self.records)
        record, _, function = (part.strip() for part in marker.rest.partition(";"))
        if function not in TABLES:
            raise FigureError(f"there is no table {function!r}")
        return f"\n{self._made(record, TABLES[function]).rstrip()}\n"

    def _made(self, record: str, function: Callable[[Any], str]) -> str:
        content = self.records[record]
        try:
            text = function(content)
        except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
            raise FigureError(
                f"{record} has not what the table needs: {type(error).__name__} {error}"
            ) from None
        if found := _NO_NUMBER.search(text):
            raise FigureError(f"the table of {record} would have {found[0]}")
        return text

    def origins(self, marker: Marker) -> list[tuple[str, Origin]]:
        """The records that a marker cites, and what made them; of several values of one path, the first."""
        if marker.kind == "table":
            record = marker.rest.partition(";")[0].strip()
            cited = [(record, origin) for origin in origins_of(self.records[record])]
        else:
            cited = [
                (one.record, origin_of(self.records[one.record], self.records.find(one.record, one.path)[0]))
                for one in Figure.parse(marker.rest).operands
            ]
        return list(dict.fromkeys(cited))

    def _error(self, page: str, line: int, reason: str) -> None:
        self.errors.append(f"{page}:{line}: {reason}")


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.figures",
        description="Fill the figures of README.md and docs/ in from their records.",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 where a figure differs"
    )
    parser.add_argument(
        "--list", nargs="*", metavar="NAME", help="each marker's value, record, command, commit"
    )
    parser.add_argument("--command", metavar="NAME", help="a line for a shell that makes its record again")
    args = parser.parse_args(argv)
    site = Site(root)
    texts = site.restore()
    if site.errors:
        print("\n".join(site.errors), file=sys.stderr)
        return 1
    if args.list is not None:
        return _list(site, args.list)
    if args.command is not None:
        return _command(site, args.command)
    changed = {page: pair for page, pair in texts.items() if pair[0] != pair[1]}
    for page, (have, want) in changed.items():
        if args.check:
            line = _first_difference(have, want)
            print(f"{page}:{line}: not what its records say; `make docs` restores it", file=sys.stderr)
        else:
            (root / page).write_bytes(want.encode("utf-8"))
            print(f"{page}: restored")
    return 1 if args.check and changed else 0


def _list(site: Site, names: Sequence[str]) -> int:
    unknown = set(names) - {one.marker.name for one in site.filled}
    for page, marker, value in site.filled:
        if names and marker.name not in names:
            continue
        print(
            f"{marker.name} = {value.strip() if marker.kind == 'fig' else 'a table'}    {page}:{marker.line}"
        )
        print(f"    {marker.rest}")
        print("\n".join(f"    {record}: {origin}" for record, origin in site.origins(marker)))
    if unknown:
        print(f"there is no marker {', '.join(sorted(unknown))}", file=sys.stderr)
    return 1 if unknown else 0


def _command(site: Site, name: str) -> int:
    """A line for each record that the marker cites; what a record does not tell goes to stderr."""
    cited = [one.marker for one in site.filled if one.marker.name == name]
    if not cited:
        print(f"there is no marker {name}", file=sys.stderr)
        return 1
    code = 0
    for record, origin in site.origins(cited[0]):
        line = origin.shell()
        if line is None:
            print(f"{record} tells no command and commit of {name}", file=sys.stderr)
            code = 1
        else:
            print(f"( {line} )")
    return code


def _first_difference(have: str, want: str) -> int:
    pairs = enumerate(zip(have.splitlines(), want.splitlines(), strict=False), 1)
    return next((line for line, (mine, theirs) in pairs if mine != theirs), 1)


if __name__ == "__main__":
    sys.exit(main())
