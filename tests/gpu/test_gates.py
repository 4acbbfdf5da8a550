"""Steps that await copies on a CUDA device: exact tokens, captured and eager, also after failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.executor.conftest import Files, files  # noqa: F401  # fixtures
from tests.executor.drive import Rig
from tests.executor.test_gates import (  # noqa: F401  # tests
    PROMPT,
    awaiting,
    bring,
    check,
    keep_on_host,
    test_a_copy_that_fails_spoils_its_own_rows_only,
    test_a_copy_that_is_late_spoils_its_rows_and_the_step_still_ends_after_its_answer,
    test_a_step_that_awaits_what_nobody_brings_fails_and_harms_none,
    test_closing_while_a_step_waits,
    test_two_copies_two_adapters_and_kv_in_one_step,
)
from tests.executor.test_graphs import NUM_PAGES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=["auto", "off"], ids=["captured", "eager"])
def cold(files: Files, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:  # noqa: F811
    made = Rig(
        files.model, tmp_path, num_pages=NUM_PAGES, page_bytes=3072, device="cuda", dtype="float32",
        max_num_seqs=16, pads_steps=request.param == "auto",
    )  # fmt: skip
    yield keep_on_host(made, files)
    made.worker.close()


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_step_behind_a_busy_device(cold: Rig, files: Files, groups: int) -> None:  # noqa: F811
    """The lane's stream is kept busy, so that without the gate the step would run long before the copy."""
    lane = cold.worker._copier._lanes[True].copies
    for turn in range(4):
        with torch.cuda.stream(lane._stream):  # type: ignore[attr-defined]
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        command = bring(cold, 2, groups)
        cold.open(turn, [turn, *PROMPT], adapter=2)
        assert cold.run(awaiting(cold, command, turn)).done.spoilt == ()
        assert cold.direct.has_landed(command)
        assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
        cold.decode(4, turn)
        cold.direct.end_sequence(turn)
        cold.direct.evict_adapter(2)
    check(cold, files, *range(4))
