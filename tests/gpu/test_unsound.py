"""Logits that are not finite, and time spent on compiling, on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from manylora.devices.preparation import PREPARATION
from manylora.executor.sampling import greedy
from tests.executor.conftest import Files, files  # noqa: F401  # fixtures
from tests.executor.drive import Rig
from tests.executor.test_graphs import NUM_PAGES
from tests.executor.test_unsound import test_an_adapter_that_overflows_beside_others  # noqa: F401  # tests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=["auto", "off"], ids=["captured", "eager"])
def rig(files: Files, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:  # noqa: F811
    """A worker with all adapters resident, whose steps are captured or not."""
    before = PREPARATION.seconds()
    made = Rig(
        files.model, tmp_path, num_pages=NUM_PAGES, page_bytes=3072, device="cuda", dtype="float32",
        max_num_seqs=16, pads_steps=request.param == "auto",
    )  # fmt: skip
    for adapter, path in files.adapters.items():
        made.serve(adapter, path)
    assert request.param == "off" or PREPARATION.seconds() > before, "capturing is preparation"
    yield made
    made.worker.close()


def test_a_kernel_that_is_compiled_is_preparation() -> None:
    import triton
    import triton.language as tl

    from manylora.kernels.triton.launch import report_compilation

    @triton.jit  # type: ignore[untyped-decorator]  # triton has no types
    def fill(out, value, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(out + tl.arange(0, SIZE), value)

    report_compilation()
    out = torch.zeros(16, device="cuda")
    before = PREPARATION.seconds()
    fill[(1,)](out, 1.5, SIZE=16)
    compiled = PREPARATION.seconds()
    assert compiled > before
    fill[(1,)](out, 2.5, SIZE=16)
    assert PREPARATION.seconds() == compiled
    assert out.tolist() == [2.5] * 16


@pytest.mark.parametrize("size", [1, 7, 256])
def test_the_most_likely_and_their_logits(size: int) -> None:
    logits = torch.randn(size, 4096, device="cuda")
    logits[0, 5] = float("nan")
    best = greedy(logits)
    assert int(best.tokens[0]) == 5
    assert best.tokens[1:].tolist() == logits[1:].argmax(-1).tolist()
    assert torch.equal(best.values[1:], logits[1:].amax(-1))
    assert best.unpack(best.packed.cpu().numpy(), size)[1] == [0]
