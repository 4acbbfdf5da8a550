"""Cold rows that a CUDA device hands to CPU threads in its own order: exact tokens, also where these are late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.executor.conftest import Files, files  # noqa: F401  # fixtures
from tests.executor.drive import Rig
from tests.executor.test_cold_rows import (  # noqa: F401  # tests
    served,
    served_by_cpu,
    test_adapters_without_rank_on_some_projections_beside_each_other,
    test_prompts_in_chunks_meet_the_adapter_as_it_lands,
    test_they_end_before_the_copy_begins_and_read_nothing_that_lay_in_its_pages,
)
from tests.executor.test_gates import PROMPT, bring, check
from tests.executor.test_queued import (  # noqa: F401  # tests and the fixture that uses ours
    cold,
    handover_of,
    test_a_step_that_fails_leaves_the_threads_free,
    test_a_step_that_finds_the_threads_busy_waits_for_the_copy,
    test_threads_that_are_late_at_any_product_invalidate_their_own_rows_only,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def queued(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:  # noqa: F811
    made = served_by_cpu(
        files, tmp_path_factory.mktemp("queued"), device="cuda", dtype="float32", pads_steps=False
    )
    yield made
    made.worker.close()


def test_the_host_goes_on_while_the_device_waits(cold: Rig, files: Files) -> None:  # noqa: F811
    """The step is launched while the device is busy with what came before."""
    for turn, adapter in enumerate((2, 3)):  # what a step loads when it first runs may wait for the device
        command = bring(cold, adapter, 8)
        cold.open(adapter, PROMPT, adapter=adapter)
        step = served(cold, command, (adapter,))
        torch.cuda._sleep(4_000_000_000 if turn else 1)  # type: ignore[no-untyped-call]
        cold.direct.issue_step(step)
        if turn:
            assert not torch.cuda.current_stream().query()
            assert handover_of(cold).is_busy
        assert cold.finish(step).done.invalid == ()
        assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
    cold.decode(3, 2, 3)
    check(cold, files, 2, 3)
