"""Mistakes of the executor that a history of switches must find: each is one line of it that is wrong."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from manylora.config import MergeTimes
from manylora.executor import build
from manylora.executor.merging import MergedWeights
from manylora.executor.tables import AdapterTables
from manylora.kernels.cpu import CpuOps
from manylora.types import BASE
from tests.executor.conftest import Files
from tests.executor.drive import Rig
from tests.executor.test_merging import PROMPT, bits, fail_merges, make_rig, may_run, weights_of
from tests.kernels.implementations import Subject
from tests.kernels.test_lora import geometry_of
from tests.kernels.test_merge_linears import check
from tests.policy.test_merging_mutants import Mutant, mutated

pytestmark = pytest.mark.long

MUTANTS = [
    Mutant("restore from W", MergedWeights._write, "data if pristine is None else pristine[number]", "data"),
    Mutant(
        "what the last adapter changed stays", MergedWeights._write,
        "plan.wanted, plan.wanted | self._differs", "plan.wanted, plan.wanted",
    ),
    Mutant(
        "a failed switch is left half done", MergedWeights.switch, "self._write(self._rows(BASE), pristine)",
        "None",
    ),
    Mutant("a failed switch counts as done", MergedWeights._note, "if failed", "if False"),
    Mutant("what was laid out before the switch is kept", AdapterTables.merge, "self.version += 1", "pass"),
]  # fmt: skip
TWICE = Mutant(
    "round twice", CpuOps.merge_linears, "_merge(merged[begin:end], pristine[begin:end], a, b, scale)",
    "merged[begin:end].copy_(pristine[begin:end] + (b.float().T @ a.float() * scale).to(merged.dtype))",
)  # fmt: skip


@pytest.fixture
def rig(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(build, "measure_merging", lambda *args, steps_wait: MergeTimes(steps_wait))
    logging.disable(logging.ERROR)
    made = make_rig(files, tmp_path)
    yield made
    made.worker.close()
    logging.disable(logging.NOTSET)


def put(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = getattr(sys.modules[mutant.function.__module__], mutant.function.__qualname__.split(".")[0])
    monkeypatch.setattr(owner, mutant.function.__name__, mutated(mutant))


def history(rig: Rig, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the base and of each adapter while one after another is merged, one switch failing."""
    weights, failing = weights_of(rig.worker), set[int]()
    before, calls = bits(weights), fail_merges(rig, monkeypatch, failing)
    for sequence in range(4):
        rig.open(sequence, PROMPT, sequence)
    rig.step(*(rig.row(sequence) for sequence in range(4)))
    for merged in (1, 3, 2, BASE, 2, 1):
        assert rig.merge(merged).ok
        rig.decode(2, *may_run(merged))
    for merged in (1, BASE, 1):
        assert rig.merge(merged).ok
        rig.decode(2, 1)  # the same rows, with segments and without
    failing.add(len(calls) + 1)
    assert not rig.merge(3).ok
    rig.decode(2, *range(4))
    assert bits(weights) == before
    failing.clear()
    assert rig.merge(2).ok
    rig.decode(2, 2)
    assert rig.merge(BASE).ok
    assert bits(weights) == before
    for held in rig.sequences.values():
        files.reference.check_greedy(PROMPT, held.generated, files.path(held.adapter))


def test_the_history_itself_is_right(rig: Rig, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    history(rig, files, monkeypatch)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_it_is_found(mutant: Mutant, rig: Rig, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    put(mutant, monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        history(rig, files, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_twice_is_found(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    put(TWICE, monkeypatch)
    with pytest.raises(AssertionError):
        check(Subject("cpu", dtype), geometry_of(dtype), [33, 70])
