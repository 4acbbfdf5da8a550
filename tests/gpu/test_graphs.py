"""Captured decoding steps on a CUDA device: float32 tokens, fixed tables under replay, and no waiting.

The tests of padding and of overlapped steps are those of tests/executor/test_graphs.py, run here on captures.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from manylora import LLM
from manylora.executor.graphs import MAX_BYTES
from manylora.types import SamplingParams
from tests.executor.conftest import Files, files  # noqa: F401  # fixtures
from tests.executor.drive import Rig
from tests.executor.test_graphs import (  # noqa: F401  # tests
    NUM_PAGES,
    PROMPTS,
    SENTINEL,
    check,
    graphs_of,
    open_all,
    test_a_sequence_that_ends_while_a_step_is_on_its_way,
    test_any_number_of_rows_and_segments_in_any_order,
    test_prompts_are_padded_up_to_a_size,
    test_prompts_between_decoding_steps,
    test_random_overlapped_steps,
    test_sampling_logprobs_and_penalties_in_a_padded_step,
    test_steps_that_score_prompts_run_eagerly,
    test_steps_whose_adapters_change_the_head_run_eagerly,
    test_tokens_that_have_not_arrived_are_computed_with,
)
from tests.gpu.test_parity import ADAPTERS, DEMO, GREEDY, workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def padded(files: Files, tmp_path: Path) -> Iterator[Rig]:  # noqa: F811
    """As on the CPU, but what is padded is captured."""
    rig = Rig(
        files.model, tmp_path, num_pages=NUM_PAGES, page_bytes=3072, device="cuda", dtype="float32", max_num_seqs=6
    )  # fmt: skip
    for adapter, path in files.adapters.items():
        rig.serve(adapter, path)
    for page in rig.free:
        rig.worker._arena.page(page).fill_(SENTINEL)
    yield rig
    rig.worker.close()


def tokens(**settings: Any) -> list[list[int]]:
    prompts, models = workload()
    with LLM(str(DEMO / "model"), adapters=ADAPTERS, dtype="float32", **settings) as llm:
        return [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY, models)]


def test_tokens_are_the_same_with_and_without(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="manylora"):
        captured = tokens(device="cuda", device_pool="1GiB")
    (said,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("captured ")]
    print(said)
    found = re.fullmatch(r"captured (\d+) of \1 .* in ([\d.]+) s and (\d+) MiB", said)
    assert found is not None
    assert int(found[1]) >= 90
    assert int(found[3]) * 2**20 < MAX_BYTES
    eager = tokens(device="cuda", device_pool="1GiB", cuda_graphs="off")
    assert captured == eager
    assert captured == tokens(device="cpu", device_pool="256MiB")


def test_a_small_batch_and_chunks() -> None:
    settings = {"device": "cuda", "device_pool": "1GiB", "max_batch_tokens": 64, "max_num_seqs": 7}
    assert tokens(**settings) == tokens(**settings, cuda_graphs="off")


def test_issuing_a_step_waits_for_nothing(padded: Rig) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=32),
        SamplingParams(temperature=1.0, seed=1, top_p=0.9, top_k=40, max_tokens=32),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, logprobs=2, max_tokens=32),
        SamplingParams(temperature=0.7, seed=2, min_p=0.05, logit_bias=((5, 1.0),), max_tokens=32),
    ]
    for sequence, chosen in enumerate(params, 1):
        adapter, prompt = PROMPTS[sequence]
        padded.open(sequence, prompt, adapter, params=chosen)
    padded.decode(2, 1, 2, 3, 4)
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = padded.issue(*(padded.row(sequence) for sequence in (1, 2, 3, 4)))
        second = padded.issue(*(padded.row(sequence) for sequence in (1, 2, 3, 4)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    padded.arrive(first)
    padded.arrive(second)


def test_captures_survive_a_cell_table_that_moves(padded: Rig, files: Files) -> None:  # noqa: F811
    open_all(padded)
    padded.decode(2, *PROMPTS)
    before, tables = len(graphs_of(padded).captured), padded.worker._tables
    cells = tables.cells
    tables.cells = cells.new_zeros(2 * len(cells))
    tables.cells[: len(cells)] = cells
    cells.fill_(0)
    tables.version += 1
    padded.decode_overlapped(3, *PROMPTS)
    assert len(graphs_of(padded).captured) == before
    check(padded, files)


def test_the_same_steps_twice_are_bit_identical(padded: Rig) -> None:
    """Same rows, order, lengths and buckets: the same keys, values and tokens.

    Not asked of a CPU, whose library's products depend on where its operands happen to lie.
    """
    seen = []
    for turn in (0, 10):
        for sequence, (adapter, prompt) in PROMPTS.items():
            padded.open(turn + sequence, prompt, adapter)
        numbers = [turn + sequence for sequence in PROMPTS]
        padded.decode(4, *numbers)
        held = [padded.sequences[number] for number in numbers]
        pages = [padded.worker._arena.page(page).clone() for each in held for page in each.pages]
        seen.append(([each.generated for each in held], torch.stack(pages)))
        for number in numbers:
            padded.direct.end_sequence(number)
    assert seen[0][0] == seen[1][0]
    assert torch.equal(seen[0][1], seen[1][1])
