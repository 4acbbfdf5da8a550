"""Stored cells of FastLibra's table, simulated again to the same bits: the cheapest of each policy.

``cells.jsonl`` holds lines of the table's stores as they were written when the cells were run.
"""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.baselines import ALL_CACHE_POLICIES
from manylora_lab.reproduce.cells import Cell, run_cell

CELLS: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent / "cells.jsonl").read_text().splitlines()
]
LEAST_CELLS, LEAST_A_POLICY = 40, 4
LIMITS = "page_kept"
"""Among the results of cells that were run with what any policy could have kept."""


def named(line: dict[str, Any]) -> str:
    cell = line["cell"]
    return f"{cell['policy']}-{cell['hardware']}-{cell['model']}-{cell['num_adapters']}-{cell['rate']}"


def check(line: dict[str, Any]) -> None:
    result = run_cell(Cell(**line["cell"]), with_limits=LIMITS in line["result"])
    assert json.loads(json.dumps(result)) == line["result"]


def cheapest() -> list[dict[str, Any]]:
    """One of each policy."""
    of = {
        policy: [line for line in CELLS if line["cell"]["policy"] == policy] for policy in ALL_CACHE_POLICIES
    }
    return [min(lines, key=lambda line: float(line["seconds"])) for lines in of.values()]


@pytest.mark.parametrize("line", cheapest(), ids=named)
def test_to_the_same_bits(line: dict[str, Any]) -> None:
    check(line)


@pytest.mark.long
@pytest.mark.parametrize("line", [line for line in CELLS if line not in cheapest()], ids=named)
def test_all_the_others(line: dict[str, Any]) -> None:
    check(line)


def test_there_are_enough() -> None:
    assert len(CELLS) >= LEAST_CELLS
    policies = collections.Counter(line["cell"]["policy"] for line in CELLS)
    assert min(policies[policy] for policy in ALL_CACHE_POLICIES) >= LEAST_A_POLICY
