"""The worker's tokens against transformers + PEFT, whatever the batch, the chunks and the pages."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import pytest
import torch

from manylora.executor import forward
from manylora.models.layers import Attention, Step
from manylora.protocol.commands import CopyPages
from manylora.types import BASE, SamplingParams
from tests.executor.conftest import Files
from tests.executor.drive import Rig
from tests.executor.tiny import (
    ALL_MODULES,
    OPT_MODULES,
    VOCAB,
    Reference,
    write_adapter,
    write_model,
)

PROMPTS = {
    10: (BASE, [5, 6, 7, 8, 9]),
    11: (2, [1, 2, 3]),
    12: (1, [9, 8, 7, 6, 5, 4, 3, 2, 9, 8, 7]),
    13: (BASE, [44]),
    14: (1, [60, 61, 62, 63, 64, 65, 66]),
    15: (3, [17, 3, 17, 3, 17, 3, 17]),
}


def check(rig: Rig, files: Files, *sequences: int) -> None:
    for sequence in sequences or rig.sequences:
        held = rig.sequences[sequence]
        prompt = held.tokens[: held.num_prompt]
        files.reference.check_greedy(prompt, held.generated, files.path(held.adapter))


def test_whole_prompts_of_several_adapters_in_one_batch(rig: Rig, files: Files) -> None:
    for sequence, (adapter, prompt) in PROMPTS.items():
        rig.open(sequence, prompt, adapter)
    rig.decode(9, *PROMPTS)
    check(rig, files)


def test_the_last_layer_runs_the_drawing_rows_alone(
    rig: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps with and without rows that draw nothing, adapters among the drawing rows or not."""
    monkeypatch.setattr(forward, "NARROWED", 1)
    seen: list[int] = []
    out = Attention.__dict__["mixed"]

    def mixed(self: Attention, x: torch.Tensor, step: Step) -> torch.Tensor:
        seen.append(0 if step.batch.sampled is None else 1 + (step.batch.sampled.lora is not None))
        return torch.as_tensor(out(self, x, step))

    monkeypatch.setattr(Attention, "mixed", mixed)
    for sequence, (adapter, prompt) in PROMPTS.items():
        rig.open(sequence, prompt, adapter)
    rig.step(rig.row(10))
    rig.step(rig.row(11), rig.row(12, 4), rig.row(13))
    rig.step(rig.row(10), rig.row(12, 3), rig.row(14, 2), rig.row(15))
    rig.step(rig.row(12), rig.row(14))
    rig.decode(2, *PROMPTS)
    assert set(seen) == {0, 1, 2}
    check(rig, files)


def test_adapters_change_the_tokens(rig: Rig) -> None:
    for adapter in (BASE, 1, 2, 3):
        rig.open(adapter, [5, 6, 7, 8], adapter)
    rig.decode(8, BASE, 1, 2, 3)
    assert len({tuple(held.generated) for held in rig.sequences.values()}) == 4


def test_prompts_in_chunks_beside_decoding_sequences(rig: Rig, files: Files) -> None:
    for sequence, (adapter, prompt) in PROMPTS.items():
        rig.open(sequence, prompt, adapter)
    rig.decode(2, 10, 11)
    # 12 and 14 share an adapter and advance in chunks while 10 and 11 decode and 15 joins.
    for chunk in (3, 5, 2):
        rows = [rig.row(12, chunk), rig.row(10), rig.row(14, 2), rig.row(11)]
        result = rig.step(*rows)
        assert [sequence for sequence, _ in result.done.tokens] == [10, 11]
    rig.step(rig.row(14), rig.row(15), rig.row(12), rig.row(13))
    rig.decode(4, *PROMPTS)
    check(rig, files)


def test_a_replaced_page_is_the_one_that_is_read(rig: Rig, files: Files) -> None:
    held = rig.open(1, [3, 1, 4, 1, 5, 9, 2, 6, 5], adapter=1)
    rig.decode(1, 1)
    old, new = held.pages[1], rig.free.pop()
    rig.worker.obey(CopyPages(((old, new),)))
    rig.worker._arena.page(old).fill_(1e4)
    held.pages[1] = new
    row = rig.row(1)
    command = rig.command(row)
    command = type(command)(
        command.step, (), (type(row)(row.sequence, row.start, 1, 1, ((1, new), *row.pages)),)
    )
    assert rig.run(command).done.ok
    rig.decode(4, 1)
    check(rig, files)


def test_forks_continue_from_copied_pages(rig: Rig, files: Files) -> None:
    prompt = [7, 7, 8, 9, 10, 11]
    parent = rig.open(1, prompt, adapter=2)
    result = rig.step(rig.row(1, num_samples=3))
    ((sequence, tokens),) = result.done.tokens
    assert sequence == 1
    assert len(tokens) == 3
    assert len(set(tokens)) == 1, "greedy samples agree"
    for child in (2, 3):
        own = rig.free.pop()
        rig.worker.obey(CopyPages(((parent.pages[1], own),)))
        rig.open(
            child,
            [*prompt, 20 + child],  # another token than was drawn: forks must go their own ways
            adapter=2,
            num_prompt=len(prompt),
            num_computed=len(prompt),
            pages=[parent.pages[0], own],
            sample=child - 1,
        )
    rig.decode(6, 1, 2, 3)
    check(rig, files, 1)
    for child in (2, 3):
        held = rig.sequences[child]
        first = held.num_prompt + 1
        files.reference.check_greedy(held.tokens[:first], held.tokens[first:], files.path(2))


@pytest.mark.parametrize("num_kept_pages", [0, 2])
def test_a_resumed_sequence_goes_on(rig: Rig, files: Files, num_kept_pages: int) -> None:
    held = rig.open(1, [2, 4, 6, 8, 10, 12], adapter=1)
    rig.decode(5, 1)
    rig.direct.end_sequence(1)
    rig.direct.end_sequence(1)
    for page in held.pages[num_kept_pages:]:
        rig.worker._arena.page(page).fill_(-1e4)
    size = rig.policy.page_tokens
    rig.open(
        1,
        held.tokens,
        adapter=1,
        num_prompt=held.num_prompt,
        num_computed=num_kept_pages * size,
        pages=held.pages[:num_kept_pages],
    )
    rig.step(rig.row(1, 2))
    rig.decode(5, 1)
    assert len(rig.sequences[1].generated) == 10
    check(rig, files)


def test_many_sequences_and_long_ones_make_the_arrays_grow(rig: Rig, files: Files) -> None:
    for sequence in range(40):
        rig.open(sequence, [sequence + 1, 5, sequence + 2], adapter=sequence % 4)
    rig.decode(3, *range(40))
    for sequence in range(39):
        rig.direct.end_sequence(sequence)
    rig.open(50, [(7 * i) % VOCAB for i in range(55)], adapter=3)
    rig.decode(6, 39, 50)
    check(rig, files)


def test_an_adapter_read_again_into_other_pages(rig: Rig, files: Files) -> None:
    rig.open(1, [5, 6, 7, 8], adapter=1)
    rig.open(2, [5, 6, 7, 8], adapter=2)
    rig.decode(3, 1, 2)
    rig.direct.evict_adapter(1)
    rig.direct.evict_adapter(1)
    assert not rig.step(rig.row(1)).done.ok, "it is not resident"
    num_pages = rig.direct.add_adapter(1, str(files.adapters[1])).num_pages
    assert rig.read(1, tuple(rig.take(num_pages))).ok
    rig.decode(4, 1, 2)
    check(rig, files)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral-window", "opt", "opt-350m"])
def test_other_families(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", name)
    modules = OPT_MODULES if name.startswith("opt") else ALL_MODULES
    adapter = write_adapter(tmp_path / "adapter", model, rank=3, modules=modules)
    rig = Rig(model, tmp_path, num_pages=100, page_bytes=8192)
    try:
        rig.serve(1, adapter)
        prompt = [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
        rig.open(1, prompt, 1)
        rig.open(2, prompt)
        rig.step(rig.row(1, 6), rig.row(2))
        rig.decode(6, 1, 2)
        reference = Reference(model)
        reference.check_greedy(prompt, rig.sequences[1].generated, adapter)
        reference.check_greedy(prompt, rig.sequences[2].generated)
    finally:
        rig.worker.close()


# ---------------------------------------------------------------- sampling


def test_noise_depends_on_seed_sample_and_position_alone(rig: Rig) -> None:
    params = SamplingParams(temperature=1.5, seed=77, n=4, max_tokens=8)
    prompt = [5, 6, 7, 8, 9]
    rig.open(1, prompt, adapter=1, params=params)
    ((_, drawn),) = rig.step(rig.row(1, num_samples=4)).done.tokens
    assert len(set(drawn)) > 1
    for sample, token in enumerate(drawn):
        # Alone, elsewhere, in chunks, as that sample from the start: the same token.
        rig.open(20 + sample, prompt, adapter=1, params=params, sample=sample)
        rig.open(30 + sample, [9, 9, 9], adapter=2, params=params)
        rig.step(rig.row(20 + sample, 2), rig.row(30 + sample))
        rig.decode(1, 30 + sample, 20 + sample)
        assert rig.sequences[20 + sample].generated == [token]


def test_a_resumed_sample_draws_what_it_would_have_drawn(rig: Rig) -> None:
    params = SamplingParams(temperature=1.2, seed=5, max_tokens=12, presence_penalty=0.5)
    whole = rig.open(1, [5, 6, 7], adapter=1, params=params)
    rig.decode(9, 1)
    rig.open(2, whole.tokens[:7], num_prompt=3, adapter=1, params=params)
    rig.decode(5, 2)
    assert rig.sequences[2].tokens == whole.tokens


def test_logprobs_by_sequence_and_index(rig: Rig, files: Files) -> None:
    asked = SamplingParams(temperature=0.0, logprobs=2, max_tokens=4)
    rig.open(1, [5, 6, 7], adapter=1, params=asked)
    rig.open(2, [5, 6, 7])
    result = rig.step(rig.row(1, num_samples=2), rig.row(2))
    assert set(result.logprobs) == {(1, 0), (1, 1)}
    found = result.logprobs[1, 0]
    expected = files.reference.logits([5, 6, 7], files.path(1))[-1].log_softmax(-1)
    assert found.token == rig.sequences[1].generated[0]
    assert found.logprob == pytest.approx(float(expected.max()), abs=1e-4)
    assert [token for token, _ in found.top] == expected.topk(2).indices.tolist()


# ---------------------------------------------------------------- failure


def test_a_failed_step_leaves_no_trace(rig: Rig, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.open(1, [5, 6, 7, 8, 9, 10, 11], adapter=1)
    rig.decode(2, 1)
    rig.open(2, [1, 2, 3, 4, 5])
    command = rig.command(rig.row(1), rig.row(2))
    assert command.rows[1].pages, "the page tables change in this step"
    pages_before = rig.worker._sequences.pages.copy()

    def fail(*_: object) -> None:
        raise RuntimeError("made to fail\nat length")

    with monkeypatch.context() as patch:
        patch.setattr("manylora.executor.worker.most_likely", fail)
        rig.direct.issue_step(command)
        assert rig.direct.has_ended(command), "known before it is waited for"
        result = rig.finish(command)
    assert not result.done.ok
    assert result.done.step == command.step
    assert result.done.error == "RuntimeError: made to fail"
    assert result.done.tokens == ()
    assert result.logprobs == {}
    assert 2 not in rig.worker._sequences
    assert (rig.worker._sequences.pages[0] == pages_before[0]).all()
    rig.direct.issue_step(command)
    assert not rig.direct.has_ended(command)
    assert rig.finish(command).done.ok, "the very same step works afterwards"
    rig.decode(4, 1, 2)
    check(rig, files)


def test_impossible_steps_fail_without_raising(rig: Rig, files: Files) -> None:
    rig.open(1, [5, 6, 7])
    rig.decode(1, 1)
    rig.open(1, [5, 6, 7])
    again = rig.step(rig.row(1))
    assert not again.done.ok
    assert "running already" in again.done.error
    assert 1 in rig.worker._sequences, "the one that ran before still does"
    rig.open(2, [5, 6, 7], adapter=99)
    assert not rig.step(rig.row(2)).done.ok
    rig.open(3, [5, 6, 10**6])
    assert not rig.step(rig.row(3)).done.ok, "no such token"
    rig.open(4, [5, 6, 7])
    rig.decode(4, 4)
    check(rig, files, 4)


def test_a_step_whose_end_raised_is_waited_for_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.open(1, [5, 6, 7])
    command = rig.issue(rig.row(1))

    def fail(*_: object) -> None:
        raise RuntimeError("made to fail")

    with monkeypatch.context() as patch:
        patch.setattr(rig.worker._sequences, "settle", fail)
        with pytest.raises(RuntimeError, match="made to fail"):
            rig.direct.wait_step(command)
    # On a thread of its own: one that waited for ever would keep this one.
    found: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def wait() -> None:
        try:
            rig.direct.wait_step(command)
        except Exception as error:
            found.put(error)

    threading.Thread(target=wait, daemon=True).start()
    assert str(found.get(timeout=60)) == f"step {command.step} is not on its way"
