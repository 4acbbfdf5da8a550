"""Every mode of merging gives the unmerged engine's tokens, in this process, on the shipped model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manylora import LLM, SamplingParams
from manylora.policy.merging import state
from tests.e2e.process import MODEL
from tests.policy.switching import EveryFewSteps
from tests.sampled import sampled

FOLDER = Path(MODEL).parent / "adapters"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())[:3]
PROMPTS = [f"The {word} of the day" for word in ("first", "second", "third", "last")]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def answers(**settings: Any) -> tuple[list[str], dict[str, float]]:
    """Texts of all prompts under each adapter and the base, all at once; and the figures after them."""
    adapters = {name: str(FOLDER / name) for name in NAMES}
    with LLM(MODEL, adapters, dtype="float32", device="cpu", **settings) as llm:
        names = [name for name in (*NAMES, None) for _ in PROMPTS]
        outputs = llm.generate(PROMPTS * (len(NAMES) + 1), PARAMS, adapter=names)
        return [output.outputs[0].text for output in outputs], llm.metrics()


@pytest.fixture(scope="module")
def unmerged() -> list[str]:
    return answers()[0]


MODES: list[dict[str, Any]] = [
    {"merge": "merged", "merge_starve": 0.02}, {"merge": "dlora", "merge_starve": 0.05}, {"merge": "manylora"},
    {"merge": "manylora", "merge_minority": "wait"},
]  # fmt: skip


@pytest.mark.parametrize(  # tests/parity/test_merged.py asks more of each mode
    "mode",
    sampled(((mode,) for mode in MODES), len(MODES)),
    ids=lambda mode: "-".join(map(str, mode.values())),
)
def test_the_tokens_are_the_unmerged_ones(mode: dict[str, Any], unmerged: list[str]) -> None:
    texts, figures = answers(**mode)
    assert texts == unmerged
    if mode["merge"] == "merged":
        assert figures['manylora:merge_switches_total{to="merged"}'] > 0


def test_so_they_are_where_switches_are_forced(unmerged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "merge_policy", lambda config, times: EveryFewSteps())
    texts, figures = answers(merge="manylora")
    assert texts == unmerged
    assert figures['manylora:merge_switches_total{to="merged"}'] > 2
    steps = {name.split('"')[1]: value for name, value in figures.items() if "steps_total" in name}
    assert steps["merged"] > 0
    (paused_s,) = (value for name, value in figures.items() if "paused_seconds" in name)
    assert paused_s > 0
