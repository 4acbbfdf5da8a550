"""Steps that await copies on a CUDA device: order, exact tokens, captured and eager, also after failures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from manylora.executor import graphs
from tests.executor.conftest import Files, files  # noqa: F401  # fixtures
from tests.executor.drive import Rig
from tests.executor.test_captured_gates import (  # noqa: F401  # tests
    KernelHand,
    bringer_of,
    check_order,
    test_a_cold_row_with_one_token_left_waits_for_the_whole_copy,
)
from tests.executor.test_gates import (  # noqa: F401  # tests
    LAYERS,
    PROMPT,
    Hand,
    awaiting,
    bring,
    check,
    check_late,
    keep_on_host,
    note_passes,
    test_a_copy_that_fails_invalidates_its_own_rows_only,
    test_a_step_that_awaits_what_nobody_brings_fails_and_harms_none,
    test_closing_while_a_step_waits,
    test_two_copies_two_adapters_and_kv_in_one_step,
)
from tests.executor.test_graphs import NUM_PAGES, SENTINEL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def made(files: Files, folder: Path, monkeypatch: pytest.MonkeyPatch, *, captured: bool, dtype: str) -> Rig:  # noqa: F811
    monkeypatch.setattr(graphs, "RANK_CLASSES", (16,))
    monkeypatch.setattr(graphs, "MIXED_TOKENS", (16, 32))
    rig = Rig(
        files.model, folder, num_pages=NUM_PAGES, page_bytes=3072 if dtype == "float32" else 1536, device="cuda",
        dtype=dtype, max_num_seqs=16, pads_steps=captured, cold_start="layerwise",
    )  # fmt: skip
    return keep_on_host(rig, files)


@pytest.fixture(params=[True, False], ids=["captured", "eager"])
def cold(
    files: Files,  # noqa: F811
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Rig]:
    rig = made(files, tmp_path, monkeypatch, captured=request.param, dtype="float32")
    yield rig
    rig.worker.close()


@pytest.fixture
def gated(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:  # noqa: F811
    rig = made(files, tmp_path, monkeypatch, captured=True, dtype="float32")
    assert bringer_of(rig).words is not None
    yield rig
    rig.worker.close()


@contextlib.contextmanager
def own_stream() -> Iterator[None]:
    """Beside the steps'."""
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        yield


def test_keys_are_written_layer_by_layer(
    gated: Rig,
    files: Files,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device runs the layers whose groups have landed, and no others."""
    gated.open(9, PROMPT, adapter=1)
    gated.decode(1, 9)  # what a step loads when it first runs may wait for the device
    hand = KernelHand(gated, monkeypatch, own_stream)
    with own_stream():
        check_order(gated, hand)
    gated.decode(3, 1, 9)
    check(gated, files, 1, 9)


def test_the_same_bits_as_a_step_that_begins_when_all_is_there(
    files: Files,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In bfloat16: keys, values and tokens of a forced sequence of steps."""
    rig = made(files, tmp_path, monkeypatch, captured=True, dtype="bfloat16")
    found: list[tuple[list[int], torch.Tensor]] = []
    for awaits in (False, True):
        for page in rig.free:
            rig.worker._arena.page(page).fill_(SENTINEL)
        command = bring(rig, 2, 8)
        rig.open(1, PROMPT, adapter=2)
        rig.open(2, PROMPT[:3], adapter=1)
        step = awaiting(rig, command, 1, others=(2,))
        if not awaits:
            assert rig.direct.wait_for(command).ok  # type: ignore[union-attr]
            step.awaits = ()
        assert rig.run(step).done.ok
        rig.decode(8, 1, 2)
        rig.worker._device.synchronize()
        held = [rig.sequences.pop(1), rig.sequences.pop(2)]
        pages = [rig.worker._arena.page(page) for one in held for page in one.pages]
        found.append(([token for one in held for token in one.generated], torch.stack(pages)))
        for sequence in (1, 2):
            rig.direct.end_sequence(sequence)
        rig.direct.evict_adapter(2)
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    rig.worker.close()


def test_a_copy_that_is_late_invalidates_its_rows_and_the_step_still_ends_after_its_answer(
    cold: Rig,
    files: Files,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed, graphs = note_passes(monkeypatch), cold.worker._graphs
    hand = Hand(cold, monkeypatch) if graphs is None else KernelHand(cold, monkeypatch, own_stream)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def is_late() -> bool:
        """As the device tells where it waits, beside its work; else the host."""
        if graphs is None:
            return bool(passed)
        with torch.cuda.stream(stream):
            return bool(graphs._gates._told[1])  # type: ignore[union-attr]

    check_late(cold, files, monkeypatch, hand, is_late)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_step_behind_a_busy_device(cold: Rig, files: Files, groups: int) -> None:  # noqa: F811
    """The lane's stream is kept busy, so that without the gate the step would run long before the copy."""
    lane = cold.worker._copier._lanes[True].copies

    def keep_busy() -> None:
        with torch.cuda.stream(lane.stream):  # type: ignore[attr-defined]
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]

    for turn in range(4):
        command = bring(cold, 2, groups, keep_busy)
        cold.open(turn, [turn, *PROMPT], adapter=2)
        assert cold.run(awaiting(cold, command, turn)).done.invalid == ()
        assert cold.direct.has_landed(command)
        assert cold.direct.wait_for(command).ok  # type: ignore[union-attr]
        cold.decode(4, turn)
        cold.direct.end_sequence(turn)
        cold.direct.evict_adapter(2)
    check(cold, files, *range(4))
