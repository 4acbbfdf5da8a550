"""Decoding steps at fixed sizes, and steps issued before the tokens of the one before have arrived.

On the CPU nothing is captured, but padding, buckets, fixed tables and pending tokens are those of a GPU. The
Triton kernels run in the interpreter; what only a device can show is in tests/gpu/test_graphs.py.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manylora.devices.device import Device
from manylora.executor import graphs
from manylora.executor.graphs import StepGraphs, bucket_sizes
from manylora.kernels.triton.operations import TritonOps
from manylora.types import BASE, SamplingParams, TokenLogprobs
from tests.executor.conftest import Files
from tests.executor.drive import Rig
from tests.executor.tiny import VOCAB, write_adapter

SENTINEL = 1234.0
NUM_PAGES = 260


class CapturingDevice(Device):
    """Says that it captures; a replay runs the same function on the same tensors."""

    captures = True


def made(files: Files, folder: Path, **settings: Any) -> Rig:
    rig = Rig(files.model, folder, pads_steps=True, num_pages=NUM_PAGES, page_bytes=3072, **settings)
    for adapter, path in files.adapters.items():
        rig.serve(adapter, path)
    return rig


@pytest.fixture
def padded(files: Files, tmp_path: Path) -> Iterator[Rig]:
    """A worker with all adapters resident whose decoding steps are padded; its free pages hold no zeros."""
    rig = made(files, tmp_path, max_num_seqs=6)
    for page in rig.free:
        rig.worker._arena.page(page).fill_(SENTINEL)
    yield rig
    rig.worker.close()


def use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take the Triton kernels, in the interpreter, and a device that captures."""
    monkeypatch.setattr("manylora.executor.build.ops_for", lambda *_, **__: TritonOps())
    monkeypatch.setattr("manylora.executor.plan.open_device", lambda _: CapturingDevice())


def graphs_of(rig: Rig) -> StepGraphs:
    assert rig.worker._graphs is not None
    return rig.worker._graphs


def check(rig: Rig, files: Files, *sequences: int) -> None:
    for sequence in sequences or rig.sequences:
        held = rig.sequences[sequence]
        prompt = held.tokens[: held.num_prompt]
        files.reference.check_greedy(prompt, held.generated, files.path(held.adapter))


def check_untouched(rig: Rig) -> None:
    """Nobody wrote to a page that nobody holds."""
    for page in rig.free:
        assert bool((rig.worker._arena.page(page) == SENTINEL).all()), f"page {page}"


PROMPTS = {
    1: (BASE, [5, 6, 7, 8, 9]),
    2: (2, [1, 2, 3]),
    3: (1, [9, 8, 7, 6, 5, 4, 3, 2, 9, 8, 7]),
    4: (BASE, [44]),
    5: (1, [60, 61, 62, 63, 64, 65, 66]),
    6: (3, [17, 3, 17, 3, 17, 3, 17]),
}


def open_all(rig: Rig, *sequences: int, **options: Any) -> None:
    for sequence in sequences or PROMPTS:
        adapter, prompt = PROMPTS[sequence]
        rig.open(sequence, prompt, adapter, **options)
    rig.decode(1, *(sequences or PROMPTS))


# ---------------------------------------------------------------- padding


def test_any_number_of_rows_and_segments_in_any_order(padded: Rig, files: Files) -> None:
    open_all(padded)
    # More and fewer rows and segments than the step before, with and without adapters, full buckets and not.
    for chosen in [(1,), (1, 2), (3, 5), (6, 5, 4, 3, 2, 1), (1, 4), (2, 3, 6), (5,), (6, 2), (4, 1, 3, 6)]:
        padded.decode(1, *chosen)
    assert len(graphs_of(padded).captured) >= 4
    check(padded, files)
    check_untouched(padded)


def test_fixed_tables_of_the_triton_kernels(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_triton(monkeypatch)
    monkeypatch.setattr(graphs, "RANK_CLASSES", (16,))
    monkeypatch.setattr(graphs, "MIXED_TOKENS", (24, 32))
    rig = made(files, tmp_path, max_num_seqs=3)
    for page in rig.free:
        rig.worker._arena.page(page).fill_(SENTINEL)
    captured = len(graphs_of(rig).captured)
    assert captured == 10, "rows 1, 2 and 3, prompts and longer ones, with and without adapters"
    open_all(rig, 1, 2, 3)
    for chosen in [(3,), (1, 3, 2), (2, 3)]:
        rig.decode_overlapped(1, *chosen)
    tables = rig.worker._tables
    cells = tables.cells
    tables.cells = cells.new_zeros(2 * len(cells))
    tables.cells[: len(cells)] = cells
    cells.fill_(0)
    tables.version += 1
    rig.decode_overlapped(2, 3, 2)
    assert len(graphs_of(rig).captured) == captured, "captured anew, in place of those before"
    check(rig, files)
    check_untouched(rig)
    rig.worker.close()


def test_prompts_between_decoding_steps(padded: Rig, files: Files) -> None:
    open_all(padded, 1, 2, 3)
    padded.decode(1, 1, 2, 3)
    padded.open(6, PROMPTS[6][1], PROMPTS[6][0])
    padded.step(padded.row(3), padded.row(6, 4), padded.row(1))
    # A chunk of one token is a row like any other, though it draws nothing.
    padded.step(padded.row(2), padded.row(6, 1), padded.row(3))
    padded.step(padded.row(6), padded.row(1))
    padded.decode(2, 1, 2, 3, 6)
    check(padded, files)
    check_untouched(padded)


def test_sampling_logprobs_and_penalties_in_a_padded_step(padded: Rig, files: Files, tmp_path: Path) -> None:
    """What a row draws is what it draws in an eager step of its own."""
    params = [
        SamplingParams(temperature=1.3, seed=5, max_tokens=32),
        SamplingParams(temperature=0.0, logprobs=3, max_tokens=32),
        SamplingParams(temperature=0.8, seed=6, top_p=0.9, top_k=20, max_tokens=32),
        SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.5, max_tokens=32),
    ]
    plain = Rig(files.model, tmp_path / "plain", num_pages=NUM_PAGES, page_bytes=3072)
    found = []
    for rig in (padded, plain):
        for sequence, chosen in enumerate(params, 1):
            if rig is plain:
                rig.serve(PROMPTS[sequence][0], files.adapters[PROMPTS[sequence][0]]) if (
                    PROMPTS[sequence][0] and PROMPTS[sequence][0] not in rig.worker._tables
                ) else None
            adapter, prompt = PROMPTS[sequence]
            rig.open(sequence, prompt, adapter, params=chosen)
        rig.decode(1, 1, 2, 3, 4)
        results = []
        for _ in range(4):
            if rig is padded:
                results.append(rig.step(*(rig.row(sequence) for sequence in (1, 2, 3, 4))).logprobs)
            else:
                results.append({k: v for s in (1, 2, 3, 4) for k, v in rig.step(rig.row(s)).logprobs.items()})
        found.append(([rig.sequences[s].generated for s in (1, 2, 3, 4)], results))
    plain.worker.close()
    (tokens, logprobs), (expected, expected_logprobs) = found
    assert tokens == expected
    for said, wanted in zip(logprobs, expected_logprobs):
        assert said.keys() == wanted.keys() == {(2, 0)}
        assert said[2, 0].logprob == pytest.approx(wanted[2, 0].logprob, abs=1e-4)


def test_steps_that_score_prompts_run_eagerly(padded: Rig, files: Files) -> None:
    """In chunks and whole, beside rows that decode and rows that draw nothing; of one adapter and of several."""
    asked = SamplingParams(temperature=0.0, prompt_logprobs=3, max_tokens=32)
    open_all(padded, 1, 2)
    known: dict[int, list[TokenLogprobs]] = {3: [], 5: [], 6: []}
    for sequence in known:
        adapter, prompt = PROMPTS[sequence]
        padded.open(sequence, prompt, adapter, params=asked)
    for sizes in ({3: 4, 1: None, 6: None}, {2: None, 5: 2}, {3: 6, 1: None, 5: None}, {3: None, 1: None}):
        result = padded.step(*(padded.row(sequence, size) for sequence, size in sizes.items()))
        assert (graphs_of(padded).ran is None) == bool(result.prompt_logprobs)
        for sequence, run in result.prompt_logprobs.items():
            begin = 1 + len(known[sequence])
            tokens = PROMPTS[sequence][1][begin : begin + len(run)]
            known[sequence] += [entry for entry, _ in run.entries(tokens)]
    padded.decode(2, 1, 2, 3, 5, 6)
    for sequence, entries in known.items():
        adapter, prompt = PROMPTS[sequence]
        expected = files.reference.logits(prompt, files.path(adapter)).log_softmax(-1)
        assert [entry.token for entry in entries] == prompt[1:]
        for entry, row in zip(entries, expected):
            assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
            assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    check(padded, files)
    check_untouched(padded)


# ---------------------------------------------------------------- two steps in flight


def test_tokens_that_have_not_arrived_are_computed_with(padded: Rig, files: Files) -> None:
    open_all(padded)
    padded.decode_overlapped(5, 1, 2, 3, 4, 5, 6)
    padded.decode_overlapped(2, 3, 1)
    check(padded, files)
    check_untouched(padded)


def test_overlapped_sampling_draws_what_steps_in_turn_draw(rig: Rig) -> None:
    params = [
        SamplingParams(temperature=1.3, seed=5, max_tokens=32),
        SamplingParams(temperature=0.0, repetition_penalty=2.0, presence_penalty=1.0, max_tokens=32),
        SamplingParams(temperature=1.0, seed=9, frequency_penalty=2.0, max_tokens=32),
    ]
    for turn, decode in ((0, rig.decode), (10, rig.decode_overlapped)):
        for number, chosen in enumerate(params, 1):
            rig.open(turn + number, [5, 6, 7], adapter=number % 3, params=chosen)
        decode(12, *(turn + number for number in (1, 2, 3)))
    for number in (1, 2, 3):
        assert rig.sequences[10 + number].tokens == rig.sequences[number].tokens


def test_a_sequence_that_ends_while_a_step_is_on_its_way(padded: Rig, files: Files) -> None:
    """What it drew is nobody's; its slot, pages and entries go to the next."""
    open_all(padded, 1, 2, 3)
    first = padded.issue(*(padded.row(sequence) for sequence in (1, 2, 3)))
    second = padded.issue(*(padded.row(sequence) for sequence in (1, 2, 3)))
    padded.arrive(first)
    padded.direct.end_sequence(2)
    ended = padded.sequences.pop(2)
    padded.open(5, PROMPTS[5][1], PROMPTS[5][0], pages=ended.pages)
    third = padded.issue(padded.row(5), padded.row(1))
    result = padded.direct.wait_step(second)
    assert result.done.ok
    assert {sequence for sequence, _ in result.done.tokens} == {1, 2, 3}
    for sequence, (token,) in result.done.tokens:
        if sequence != 2:
            held = padded.sequences[sequence]
            held.tokens[held.tokens.index(-1)] = token
    padded.arrive(third)
    padded.decode_overlapped(3, 1, 3, 5)
    check(padded, files)


def test_a_chunk_after_a_late_token(rig: Rig, files: Files) -> None:
    open_all(rig, 1, 3)
    rig.open(2, list(range(1, 12)), adapter=2)
    first = rig.issue(rig.row(1), rig.row(3), rig.row(2, 4))
    second = rig.issue(rig.row(2, 6), rig.row(3), rig.row(1))
    rig.arrive(first)
    third = rig.issue(rig.row(2), rig.row(1))
    rig.arrive(second)
    rig.arrive(third)
    rig.decode_overlapped(3, 1, 2, 3)
    check(rig, files)


def test_random_overlapped_steps(padded: Rig, files: Files) -> None:
    generator = random.Random(3)
    before = None
    number = 0
    running: list[int] = []
    for _ in range(14):
        if len(running) < 6 and generator.random() < 0.5:
            number += 1
            prompt = [generator.randrange(VOCAB) for _ in range(generator.randrange(1, 9))]
            padded.open(number, prompt, generator.randrange(4))
            running.append(number)
        if not running:
            continue
        chosen = generator.sample(running, generator.randrange(1, len(running) + 1))
        rows = []
        for sequence in chosen:
            held = padded.sequences[sequence]
            left = len(held.tokens) - held.num_computed
            rows.append(padded.row(sequence, left if left < 3 else generator.randrange(1, left + 1)))
        issued = padded.issue(*rows)
        if before is not None:
            padded.arrive(before)
        before = issued
    assert before is not None
    padded.arrive(before)
    check(padded, files)
    check_untouched(padded)


# ---------------------------------------------------------------- buckets and falling back


def test_buckets_are_few_and_pad_little() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    for most in (3, 100, 128, 256, 400):
        sizes = bucket_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        for rows in range(5, most + 1):
            padded = next(size for size in sizes if size >= rows)
            assert padded - rows <= max(7, rows // 4)


def test_steps_whose_adapters_change_the_head_run_eagerly(padded: Rig, files: Files, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "head", files.model, modules=("q_proj", "lm_head"))
    padded.serve(9, path)
    open_all(padded, 1, 2, 3)
    padded.open(9, PROMPTS[1][1], 9)
    for chosen in [(1, 9, 3), (1, 3), (9, 1), (9,), (2, 1)]:
        padded.decode(1, *chosen)
        assert (padded.worker.bucket is None) is (9 in chosen)
    check(padded, files, 1, 2, 3)
    files.reference.check_greedy(PROMPTS[1][1], padded.sequences[9].generated, path)


def test_steps_that_no_bucket_fits_run_eagerly(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MIXED_TOKENS", ())
    rig = made(files, tmp_path, max_num_seqs=2)
    large = write_adapter(tmp_path / "r300", files.model, rank=300, seed=7, modules=("q_proj",))
    rig.worker.inspections._max_rank = None
    rig.serve(9, large)
    open_all(rig, 1, 2, 3)
    rig.decode(1, 1, 2, 3)
    assert len(graphs_of(rig).captured) == 0, "three rows, where two may run"
    rig.open(9, [5, 6, 7, 8], 9)
    rig.decode(3, 9)
    assert len(graphs_of(rig).captured) == 0, "a rank that no class has"
    rig.decode(3, 2)
    assert len(graphs_of(rig).captured) == 1
    files.reference.check_greedy([5, 6, 7, 8], rig.sequences[9].generated, large)
    del rig.sequences[9]
    check(rig, files)
    rig.worker.close()


@pytest.mark.parametrize("room", [0, 3])
def test_a_device_that_refuses_to_capture(
    room: int, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captures: list[object] = []

    def capture(self: Device, run: Callable[[], object]) -> Callable[[], object]:
        if len(captures) == room:
            raise RuntimeError("no room left\nat length")
        captures.append(run)
        return run

    monkeypatch.setattr(CapturingDevice, "capture", capture)
    use_triton(monkeypatch)
    monkeypatch.setattr(graphs, "MIXED_TOKENS", ())
    told: list[tuple[int, int]] = []
    with caplog.at_level(logging.WARNING):
        rig = made(files, tmp_path, max_num_seqs=4)
        rig.worker._graphs.capture_all(lambda done, total: told.append((done, total)))  # type: ignore[union-attr]
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [f"steps other than the {room} captured ones run eagerly: no room left"]
    assert told[-1] == (9, 9), "buckets of 1, 2 and 4 rows, for no adapter and two classes of ranks"
    assert len(graphs_of(rig).captured) == room
    open_all(rig, 1, 3)
    rig.decode(1, 1, 3)
    check(rig, files)
    rig.worker.close()


def test_captures_end_where_they_hold_too_much(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Device, "captured_bytes", lambda _: graphs.MAX_BYTES)
    rig = made(files, tmp_path)
    open_all(rig, 1, 2)
    with caplog.at_level(logging.WARNING):
        rig.decode(3, 1, 2)
    assert len([r for r in caplog.records if "1024 MiB" in r.getMessage()]) == 1
    check(rig, files)
    rig.worker.close()


def test_captures_of_several_ranks_may_hold_more_by_the_model_s_layers() -> None:
    """A pool that a device's memory gives leaves as much."""
    assert graphs.graph_bytes(32, 1) == graphs.graph_bytes(80, 1) == graphs.MAX_BYTES
    assert graphs.graph_bytes(2, 2) == graphs.MAX_BYTES
    assert graphs.graph_bytes(32, 2) == graphs.graph_bytes(32, 4) == 1536 * 2**20
    assert graphs.graph_bytes(80, 2) == 3840 * 2**20


def test_prompts_are_padded_up_to_a_size(files: Files, tmp_path: Path) -> None:
    rig = made(files, tmp_path, max_num_seqs=6, max_batch_tokens=40)
    for page in rig.free:
        rig.worker._arena.page(page).fill_(SENTINEL)
    open_all(rig, 1, 3, 6)  # 23 tokens
    assert len(graphs_of(rig).captured) == 1
    rig.open(2, list(range(1, 41)), adapter=2)
    rig.decode_overlapped(1, 1, 6, 3)
    rig.step(rig.row(2, 30), rig.row(3), rig.row(1))
    rig.open(4, [44, 3], adapter=1)
    rig.step(rig.row(4), rig.row(2), rig.row(6))
    assert len(graphs_of(rig).captured) == 3, "32 tokens for two steps, 16 tokens, 4 decoding rows"
    rig.decode(2, 1, 2, 3, 4, 6)
    check(rig, files)
    check_untouched(rig)
    rig.worker.close()
