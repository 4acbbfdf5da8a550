"""What an experiment found: rows as in the paper's table or figure, and its headline beside the paper's.

Owns the form of ``NAME.json``; does not know how experiments run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Headline:
    """One figure. ``paper``: only where the paper's text states it; ``is_recalled``: not read there, but from
    memory; ``artifact``: only where files that the authors published have it."""

    metric: str
    ours: float | None
    paper: float | None = None
    is_recalled: bool = False
    artifact: float | None = None


@dataclasses.dataclass(frozen=True)
class ExperimentReport:
    """``settings``: all that a repetition needs. ``notes``: what was assumed, substituted or left out."""

    experiment: str
    title: str
    settings: dict[str, Any]
    rows: list[Row]
    headline: list[Headline]
    notes: tuple[str, ...] = ()

    def write(self, folder: Path, provenance: Sequence[Row] = ()) -> Path:
        """``NAME.json`` in the folder, which is made; returns its path. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.experiment}.json"
        headline = []
        for figure in self.headline:
            values: Row = {"metric": figure.metric, "ours": figure.ours, "paper": figure.paper}
            if figure.is_recalled:
                values["paper_is_recalled"] = True
            if figure.artifact is not None:
                values["artifact"] = figure.artifact
            headline.append(values)
        values = {**dataclasses.asdict(self), "headline": headline, "notes": list(self.notes)}
        values["provenance"] = list(provenance)
        path.write_text(json.dumps(values, indent=1) + "\n")
        return path


def ratio(ours: float | None, other: float | None) -> float | None:
    """``ours / other``, where both are there."""
    if ours is None or not other:
        return None
    return round(ours / other, 4)


def change(ours: float | None, other: float | None) -> float | None:
    """``ours / other - 1``: -0.5 is half."""
    quotient = ratio(ours, other)
    return None if quotient is None else round(quotient - 1, 4)


def mean(values: list[float | None]) -> float | None:
    """The mean of the values that are not None."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
