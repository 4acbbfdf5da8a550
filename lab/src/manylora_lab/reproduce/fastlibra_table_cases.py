"""Which cells the FastLibra table has, and at which rates: found once, written down, and used from then on.

Owns the settings of both hardwares and the file of rates; does not know how cells are run or reported.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manylora.config.declaring import ConfigError
from manylora_lab.reproduce.cells import MEASURED, REFERENCE, Cell
from manylora_lab.reproduce.experiment import Setup
from manylora_lab.reproduce.fastlibra_grid import (
    BASELINES,
    MANY_ADAPTERS,
    POPULARITIES,
    cases,
    cases_of_many,
    rate_shares,
)
from manylora_lab.reproduce.fastlibra_table_peaks import LIMIT_MS, Peak, Search, rounded

HARDWARE = {"npu": ("fastlibra-npu", None), "h200": (MEASURED, "fastlibra-npu")}
"""What cells run on, and what limits their pools: the H200's are as large as those that weights leave on the
paper's NPU."""

PAGED = "fastlibra-pages"
"""The table's FastLibra: nodes of pages. Its cells are of before there were nodes of turns, which took over the
name."""
VARIANTS = tuple(f"{PAGED}-{variant}" for variant in ("wom", "wos", "wol"))
COMPARED = (PAGED, *VARIANTS, *BASELINES, "lru", "manylora")
"""The policies of the main cases."""
COMPARED_AMONG_MANY = (PAGED, *BASELINES, "manylora")
"""Those of the cases with 1,000 and 2,000 adapters (§6.9), of which no peaks are told."""


@dataclasses.dataclass(frozen=True)
class Table:
    """``main``: the cases of §6.3 by name; ``many``: those of §6.9. All under ``fastlibra-pages``, at a first
    guess of its peak."""

    hardware: str
    main: dict[str, Cell]
    many: dict[str, Cell]
    shares: tuple[float, ...]
    search: Search
    guess: Search

    @property
    def cases(self) -> dict[str, Cell]:
        """All of them."""
        return {**self.main, **self.many}

    @property
    def batches(self) -> list[list[str]]:
        """The cases in the order in which they are run, so that a part is worth reading: one model after the
        other, each with every scenario at one number of adapters before the next number; then the many."""
        by_model: dict[str, list[str]] = {}
        for case, cell in sorted(self.main.items(), key=lambda item: item[1].num_adapters):
            by_model.setdefault(cell.model, []).append(case)
        return [*by_model.values(), list(self.many)]

    def policies(self, case: str) -> tuple[str, ...]:
        """Compared in a case, the reference last."""
        return (*(COMPARED if case in self.main else COMPARED_AMONG_MANY), REFERENCE)

    def cells(self, case: str, rates: Mapping[str, list[float]]) -> dict[tuple[float, str], Cell]:
        """The cells of a case, by rate and policy; those of one rate in a row, since they share the stream."""
        return {
            (rate, policy): dataclasses.replace(self.cases[case], rate=rate, policy=policy)
            for rate in rates[case]
            for policy in self.policies(case)
        }

    def peak_cell(self, case: str, policy: str, rates: Mapping[str, list[float]]) -> Cell:
        """Where the search for a policy's peak begins: at ``fastlibra-pages``'s."""
        return dataclasses.replace(self.cases[case], policy=policy, rate=rates[case][-1])


def table(setup: Setup, hardware: str) -> Table:
    """All cases at the setup's scale. Raises ConfigError for a hardware that there is not."""
    if hardware not in HARDWARE:
        raise ConfigError(f"there is no hardware {hardware!r} for the table: use {' or '.join(HARDWARE)}")
    device, pool_like = HARDWARE[hardware]
    numbers = setup.pick(MANY_ADAPTERS, MANY_ADAPTERS[:1], ())
    names = setup.pick(tuple(POPULARITIES), ("uniform",), ())
    main, many = (
        {
            name: dataclasses.replace(cell, policy=PAGED, hardware=device, pool_like=pool_like)
            for name, cell in found.items()
        }
        for found in (cases(setup), cases_of_many(setup, numbers, names))
    )
    return Table(
        hardware, main, many, rate_shares(setup),
        setup.pick(Search(0.035, 1.06, 4000.0), Search(0.25, 1.5, 400.0), Search(0.5, 2.0, 8.0)),
        Search(0.12, 2.0, 4000.0),
    )  # fmt: skip


# ---------------------------------------------------------------- rates


class RatesFile:
    """The rates of each case, which are shares of ``fastlibra-pages``'s peak, as they were fixed.

    ``settings``: what they were found with; a file with others is refused.
    """

    def __init__(self, path: Path, shown: Table) -> None:
        """Reads the file, which need not exist yet. Raises ConfigError."""
        self.path = path
        self._table = shown
        self._cases: dict[str, dict[str, Any]] = {}
        if not path.exists():
            return
        try:
            values = json.loads(path.read_text())
            found, settings = dict(values["cases"]), values["settings"]
            self._cases = {name: found[name] for name in shown.cases if name in found}
            complete = all(len(case["rates"]) == len(shown.shares) for case in self._cases.values())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"the rates {path} cannot be read: {error}") from None
        for name, value in self._settings().items():
            if settings.get(name) != value:
                raise ConfigError(
                    f"the rates {path} were found with {name} {settings.get(name)!r}, not {value!r}"
                )
        if not complete:
            raise ConfigError(f"the rates {path} have not {len(shown.shares)} of each case")

    @property
    def rates(self) -> dict[str, list[float]]:
        """The rates by case, rising; the last is the peak itself."""
        return {name: case["rates"] for name, case in self._cases.items()}

    def fix(self, case: str, peak: Peak) -> None:
        """Write a case's rates down. Raises ConfigError where there is none."""
        if not peak.per_s:
            raise ConfigError(
                f"no rate is borne in {case}: a mean TTFT below {LIMIT_MS:g} ms is out of reach"
            )
        self._cases[case] = {
            "peak_per_s": peak.per_s,
            "missed_per_s": peak.missed_per_s,
            "rates": [rounded(share * peak.per_s) for share in self._table.shares],
        }
        lines = [
            f"  {json.dumps(name)}: {json.dumps(self._cases[name])}"
            for name in self._table.cases
            if name in self._cases
        ]
        text = (
            f'{{\n "settings": {json.dumps(self._settings())},\n "cases": {{\n'
            + ",\n".join(lines)
            + "\n }\n}\n"
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(text)
        except OSError as error:
            raise ConfigError(f"the rates {self.path} cannot be written: {error.strerror}") from None

    def _settings(self) -> dict[str, Any]:
        shown = self._table
        first = next(iter(shown.main.values()))
        return {
            "hardware": shown.hardware, "policy": first.policy, "most_ttft_mean_ms": LIMIT_MS,
            "duration_s": first.duration_s, "seed": first.seed, "shares": list(shown.shares),
            "tolerance": shown.search.tolerance,
        }  # fmt: skip
