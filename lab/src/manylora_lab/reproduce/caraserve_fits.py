"""Lines through what LoRA takes by the ranks of its batch, and those of a device that ship with the laboratory.

From the repository's root, to take them from a record of ``caraserve-fig9`` on a device:

    python -m manylora_lab.reproduce.caraserve_fits docs/results/caraserve-fig9-h200.json
"""

from __future__ import annotations

import argparse
import functools
import json
import operator
import statistics
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np

from manylora_lab.pricing.fit import nonnegative_least_squares
from manylora_lab.reproduce.report import Row

HELD_OUT = 3
"""Every third point is kept out of the fits."""
MEASURES = {"rank_padded": "rows times the largest rank", "rank_sum": "the sum of ranks"}
"""What the paper's lines go over, and rows' fields."""
PAPERS_LINES = {"bgmv": "rank_padded", "mbgmv": "rank_sum"}
"""Which of them is each kernel's."""
SHIPPED = "caraserve_h200.json"


class Fit(NamedTuple):
    """``base_us``, and ``slopes_ns`` for a unit of each field; ``r2``: of the points that it does not know."""

    base_us: float
    slopes_ns: tuple[float, ...]
    r2: float


def fit_of(rows: Sequence[Row], kernel: str, fields: Sequence[str]) -> Fit | None:
    """Least squares through two thirds of a kernel's points, with nothing negative, to four digits; None where
    there are too few points, or a field is the same in all."""
    mine = [
        (tuple(float(row[field]) for field in fields), row["us"]) for row in rows if row["kernel"] == kernel
    ]
    fitted, held_out = [point for place, point in enumerate(mine) if place % HELD_OUT], mine[::HELD_OUT]
    if len(held_out) < 2 or any(len(set(units)) < 2 for units in zip(*(units for units, _ in fitted))):
        return None
    features = np.array([(1.0, *units) for units, _ in fitted])
    found = nonnegative_least_squares(features, np.array([us for _, us in fitted]))
    base_us, *slopes = (float(f"{value:.4g}") for value in found.tolist())
    mean_us = statistics.fmean(us for _, us in held_out)
    around = sum((us - mean_us) ** 2 for _, us in held_out)
    missed = sum((us - base_us - sum(map(operator.mul, slopes, units))) ** 2 for units, us in held_out)
    return Fit(base_us, tuple(round(1e3 * slope, 4) for slope in slopes), round(1 - missed / around, 4))


def papers_lines(rows: Sequence[Row]) -> dict[str, Fit]:
    """The line of each of the paper's kernels for which there are rows enough."""
    found = {kernel: fit_of(rows, kernel, (field,)) for kernel, field in PAPERS_LINES.items()}
    return {kernel: fit for kernel, fit in found.items() if fit is not None}


@functools.cache
def device_lines() -> dict[str, Fit]:
    """What a launch of one projection takes on the device whose lines ship, by kernel."""
    file = resources.files("manylora_lab.reproduce") / "fits" / SHIPPED
    return {
        kernel: Fit(each["base_us"], tuple(each["slopes_ns"]), each["r2"])
        for kernel, each in json.loads(file.read_text())["lines"].items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("record", type=Path)
    record = json.loads(parser.parse_args(argv).record.read_text())
    found = {
        "machine": record["settings"]["machine"], "commit": record["provenance"][0]["commit"],
        "lines": {kernel: fit._asdict() for kernel, fit in papers_lines(record["rows"]).items()},
    }  # fmt: skip
    path = Path(__file__).parent / "fits" / SHIPPED
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
