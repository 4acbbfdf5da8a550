"""What a marker says of a figure: which values of which records, what is computed of them, how it is shown.

    RECORD:PATH; FORMAT
    OPERATION RECORD:PATH; RECORD:PATH; FORMAT

The operations are a closed set; there is no code in pages."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tools.records import FigureError, Records

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

_OPERAND = re.compile(r"(?P<words>(?:[a-z]+ )*)(?P<record>[\w.-]+\.json)?:(?P<path>.+)")
_FORMAT = re.compile(r"(?:x(?P<factor>-?\d+(?:\.\d*)?(?:e-?\d+)?) )?(?P<shown>\+?,?)\.(?P<digits>-?\d)f")


@dataclass(frozen=True)
class Operand:
    """``reduce``: an operation of one over the path's values, or None."""

    reduce: str | None
    record: str
    path: str

    def values(self, records: Records) -> list[float]:
        """Raises FigureError."""
        values = records.numbers(self.record, self.path)
        return [OF_ONE[self.reduce](values)] if self.reduce else values


@dataclass(frozen=True)
class Format:
    """``shown``: a sign and separators, as Python writes them. ``digits``: after the point; below 0 before it."""

    factor: float
    shown: str
    digits: int

    @classmethod
    def parse(cls, text: str) -> Format:
        """Raises FigureError."""
        match = _FORMAT.fullmatch(text)
        if match is None:
            raise FigureError(f"malformed format {text!r}")
        return cls(float(match["factor"] or 1), match["shown"], int(match["digits"]))

    def text(self, value: float) -> str:
        shown = f"{round(value * self.factor, self.digits):{self.shown}.{max(self.digits, 0)}f}"
        return shown if re.search(r"[1-9]", shown) else shown.lstrip("-+")


@dataclass(frozen=True)
class Figure:
    """``combine``: an operation of two, over pairs of values. ``reduce``: one of one, over what results."""

    reduce: str | None
    combine: str | None
    operands: tuple[Operand, ...]
    format: Format

    @classmethod
    def parse(cls, text: str) -> Figure:
        """Raises FigureError."""
        *parts, shape = [part.strip() for part in text.split(";")]
        found = [match for match in map(_OPERAND.fullmatch, parts) if match is not None]
        if len(found) != len(parts) or not 1 <= len(parts) <= 2 or found[0]["record"] is None:
            raise FigureError(f"malformed marker: {text!r} is not RECORD:PATH; FORMAT")
        words = [match["words"].split() for match in found]
        for word in (word for one in words for word in one):
            if word not in OF_ONE and word not in OF_TWO:
                raise FigureError(f"there is no operation {word!r}")
        outer, combine = words[0], None
        place = next((place for place, word in enumerate(outer) if word in OF_TWO), len(outer))
        outer, rest = outer[:place], outer[place:]
        if rest:
            combine = rest.pop(0)
        words[0] = rest
        if (combine is None) != (len(parts) == 1) or any(
            len(one) > 1 or not set(one) <= set(OF_ONE) for one in (outer, *words)
        ):
            raise FigureError(f"malformed marker: the operations in {text!r} do not fit its operands")
        operands = tuple(
            Operand(one[0] if one else None, match["record"] or found[0]["record"], match["path"])
            for one, match in zip(words, found, strict=True)
        )
        return cls(outer[0] if outer else None, combine, operands, Format.parse(shape))

    def text(self, records: Records) -> str:
        """The figure as it stands in the page. Raises FigureError."""
        values = self._values(records)
        if self.reduce:
            values = [OF_ONE[self.reduce](values)]
        if len(values) != 1:
            raise FigureError(f"{len(values)} values, where one is needed")
        return self.format.text(values[0])

    def _values(self, records: Records) -> list[float]:
        lists = [operand.values(records) for operand in self.operands]
        if self.combine is None:
            return lists[0]
        num_pairs = max(map(len, lists))
        if any(len(values) not in (1, num_pairs) for values in lists):
            raise FigureError(f"{len(lists[0])} and {len(lists[1])} values make no pairs")
        first, second = (values * num_pairs if len(values) == 1 else values for values in lists)
        try:
            return [OF_TWO[self.combine](*pair) for pair in zip(first, second, strict=True)]
        except ZeroDivisionError:
            raise FigureError("a division by zero") from None
