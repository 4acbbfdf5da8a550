"""Every family and every kind of adapter merged in turn: its own rows, the base's and all other adapters' beside
it give the tokens of transformers and PEFT, and those of PEFT's own merge. So do engines under every mode.

Where a policy would not switch for so few requests a script does, by commands or as a merge policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from manylora.config.merging import MergeConfig, MergeTimes
from manylora.executor import build
from manylora.policy.merging import state
from manylora.protocol.commands import EndSequence
from manylora.types import BASE
from tests.executor.drive import Rig
from tests.parity.checkpoints import FAMILIES
from tests.parity.conftest import make_bench
from tests.parity.engines import Bench, greedy, random_tokens
from tests.parity.reference import assert_greedy
from tests.policy.switching import EveryFewSteps
from tests.sampled import sampled

PAGE_TOKENS = 4
NUM_TOKENS = 4


class MergedModel:
    """What PEFT's ``merge_and_unload`` makes of one adapter; an Oracle of that adapter alone."""

    def __init__(self, bench: Bench, adapter: str) -> None:
        base = transformers.AutoModelForCausalLM.from_pretrained(bench.checkpoint.folder, dtype=torch.float32)
        adapted = peft.PeftModel.from_pretrained(base, bench.checkpoint.adapters[adapter])
        self._model: Any = adapted.merge_and_unload().eval()

    def greedy(self, prompt: Any, adapter: str | None, num_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.next_logits(tokens, adapter).argmax()))
        return tokens[len(prompt) :]

    def next_logits(self, tokens: Any, adapter: str | None) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = self._model(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
        return found


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A family's models are let go of when its tests are done."""
    return make_bench(tmp_path_factory, request.param)


@pytest.fixture
def rig(family: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A worker with every adapter resident, by its place among ``names``."""
    monkeypatch.setattr(build, "measure_merging", lambda *args, steps_wait: MergeTimes(steps_wait))
    made = Rig(
        family.checkpoint.folder,
        tmp_path,
        num_pages=2000,
        page_bytes=PAGE_TOKENS * family.checkpoint.token_bytes,
        page_tokens=PAGE_TOKENS,
        merge=MergeConfig(mode="manylora"),
    )
    for adapter, name in enumerate(family.names):
        if name is not None:
            made.serve(adapter, family.checkpoint.adapters[name])
    yield made
    made.worker.close()


def prompt_of(family: Bench, adapter: int) -> list[int]:
    return random_tokens(adapter, 1 + 7 * (adapter % 4), family.checkpoint.vocab_size)


def answer(rig: Rig, family: Bench, adapters: list[int]) -> dict[int, list[int]]:
    """Tokens of each, computed in one batch: prompts, one of them in two chunks, then decoding."""
    for adapter in adapters:
        rig.open(adapter, prompt_of(family, adapter), adapter)
    longest = max(adapters, key=lambda adapter: len(rig.sequences[adapter].tokens))
    if len(rig.sequences[longest].tokens) > 2:
        rig.step(rig.row(longest, 2))
    rig.decode(NUM_TOKENS, *adapters)
    found = {adapter: rig.sequences[adapter].generated for adapter in adapters}
    for adapter in adapters:
        rig.worker.obey(EndSequence(adapter))
        rig.free += rig.sequences.pop(adapter).pages
    return found


def test_each_merged_in_turn(family: Bench, rig: Rig) -> None:
    """Straight from one adapter to the next, and by way of the base."""
    everything = list(range(len(family.names)))
    for merged in [*everything[1:], BASE, everything[1]]:
        done = rig.merge(merged)
        assert done.ok, done.error
        rows = everything if merged == BASE else [merged]
        for adapter, tokens in answer(rig, family, rows).items():
            name = family.names[adapter]
            assert_greedy(family.reference, prompt_of(family, adapter), name, tokens)


def test_merged_steps_are_as_peft_merges(family: Bench, rig: Rig) -> None:
    """Steps of the merged adapter's rows alone."""
    for adapter in (1, len(family.names) - 1):
        rig.merge(adapter)
        tokens = answer(rig, family, [adapter])[adapter]
        name = family.names[adapter]
        assert name is not None
        assert_greedy(MergedModel(family, name), prompt_of(family, adapter), name, tokens)


def test_a_sequence_goes_on_through_switches(family: Bench, rig: Rig) -> None:
    """Keys and values computed with one adapter merged serve the steps with another, and with none."""
    everything = list(range(len(family.names)))
    for adapter in everything:
        rig.open(adapter, prompt_of(family, adapter), adapter)
    rig.step(*map(rig.row, everything))
    for merged in [*everything[1:], BASE]:
        rig.merge(merged)
        rig.decode(2, *(everything if merged == BASE else [merged]))
    for adapter in everything:
        name, tokens = family.names[adapter], rig.sequences[adapter].generated
        assert len(tokens) == 3 + 2 * (adapter != BASE)
        assert_greedy(family.reference, prompt_of(family, adapter), name, tokens)


MODES: dict[str, dict[str, Any]] = {
    "merged": {"merge": "merged", "merge_starve": 0.005},
    "dlora": {"merge": "dlora", "merge_starve": 0.02, "merge_alpha": 0.3, "merge_beta": 0.1},
    "unmerge": {"merge": "manylora"},
    "wait": {"merge": "manylora", "merge_minority": "wait"},
}
CASES = [(family, mode) for family in sorted(FAMILIES) for mode in MODES]


@pytest.mark.parametrize(
    ("family", "mode"),
    sampled(CASES, 9),
    indirect=["family"],
)
def test_engines_of_every_mode(family: Bench, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_mode(family, mode, monkeypatch)


def check_mode(family: Bench, mode: str, monkeypatch: pytest.MonkeyPatch, **others: Any) -> None:
    """Four requests of an adapter for one of each other and two of the base, more than may run at once."""
    hot = family.names[1]
    adapters = [*family.names, None, hot, hot, hot]
    prompts = [
        random_tokens(number, 2 + number % 7, family.checkpoint.vocab_size) for number in range(len(adapters))
    ]
    monkeypatch.setattr(build, "measure_merging", lambda *args, steps_wait: MergeTimes(steps_wait))
    if MODES[mode]["merge"] == "manylora":
        monkeypatch.setattr(state, "merge_policy", lambda config, times: EveryFewSteps())
    with family.llm(max_num_seqs=6, **MODES[mode], **others) as llm:
        outputs = llm.generate(prompts, greedy(8), adapter=adapters)
        figures = llm.metrics()
    family.check(outputs, 8)
    assert figures['manylora:merge_switches_total{to="merged"}'] > 0
