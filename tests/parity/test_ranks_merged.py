"""Engines of several processes that merge adapters into each process's part of the weights give the reference's
tokens."""

from __future__ import annotations

import itertools

import pytest

from tests.parity.conftest import make_bench
from tests.parity.test_merged import MODES, check_mode
from tests.parity.test_ranks import all_cases

CASES = [
    (family, count, sharding, mode, copy)
    for (family, count, sharding), mode, copy in itertools.product(all_cases(), MODES, ("device", "host"))
    if count == 2 or (family == "ranks-12-1" and copy == "device")
]
IN_CI = (
    ("ranks-8-4", 2, "sharded", "wait", "device"),
    ("opt-350m", 2, "replicated", "unmerge", "host"),
    ("ranks-12-1", 3, "sharded", "unmerge", "device"),
)


def test_the_sample_is_of_the_cases() -> None:
    assert set(IN_CI) <= set(CASES)


@pytest.mark.parametrize(
    ("family", "count", "sharding", "mode", "copy"),
    [
        pytest.param(*case, id="-".join(map(str, case)), marks=() if case in IN_CI else pytest.mark.long)
        for case in CASES
    ],
)
def test_engines_of_every_mode(
    family: str,
    count: int,
    sharding: str,
    mode: str,
    copy: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = {"tensor_parallel_size": count, "lora_sharding": sharding, "merge_copy": copy}
    check_mode(make_bench(tmp_path_factory, family), mode, monkeypatch, **ranks)
