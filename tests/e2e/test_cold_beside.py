"""The table "Beside other features" of docs/cold-start.md: with each of these, requests that begin before their
adapter is there, the CPU's help included, get the tokens of those that wait."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from manylora import SamplingParams
from manylora.config.declaring import ConfigError
from manylora.engine.journal import fingerprint, read_answered
from manylora.policy.replica import Replica
from tests.e2e.process import MODEL
from tests.internal import internal_llm

PAGE = Path(__file__).parents[2] / "docs" / "cold-start.md"
FOLDER = Path(MODEL).parent / "adapters"
NAMES = ("finnish", "shakespeare", "german")
PROMPTS = ("The first word of the day is", "The last one")
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
CPU: dict[str, Any] = {"cold_start": "cpu", "cpu_lora_workers": 1}
LAYERWISE: dict[str, Any] = {"cold_start": "layerwise", "cold_start_stall": 1.0}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "`--cache-policy`": [{"cache_policy": name} for name in ("fastlibra-wom", "lru")],
    "two steps in flight": [{"pipeline_depth": 2}],
    "`--admission`": [{"admission": "lcfs"}],
    "`--scheduling-policy priority`": [{"scheduling_policy": "priority"}],
    "`--fairness vtc`": [{"fairness": "vtc"}],
    "`--adapter-batch-limit`": [{"adapter_batch_limit": "1"}],
    "chunked prompts": [{"max_batch_tokens": 4, "max_num_seqs": 4}],
}
PARAMS: dict[str, dict[str, Any]] = {
    "`n` > 1, sampling with a seed": {"n": 2, "temperature": 0.7, "seed": 5},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    "stop strings": {"stop": ["e"]},
}
WITH_A_FOLDER = {"`--journal`"}
REFUSED: dict[str, dict[str, Any]] = {
    "`--merge`": {"merge": "manylora"},
    "`--tensor-parallel-size` above 1": {"tensor_parallel_size": 2},
    "one tier (`--host-pool 0`)": {"host_pool": 0},
}
ELSEWHERE = {"preemption (a small pool)"}
"""tests/engine/test_cold_rows.py."""


def answers(params: dict[str, Any], **settings: Any) -> tuple[list[list[int]], dict[str, int]]:
    """Of each adapter's requests in turn, in a pool that holds about one adapter."""
    adapters = {name: str(FOLDER / name) for name in NAMES}
    pools = {"device_pool": "4MiB", "host_pool": "16MiB"}
    with internal_llm(MODEL, adapters, dtype="float32", device="cpu", **{**pools, **settings}) as llm:
        found = []
        for name in (*NAMES, NAMES[0]):
            outputs = llm.generate(list(PROMPTS), SamplingParams(**GREEDY | params), [name] * len(PROMPTS))
            found += [list(sample.token_ids) for output in outputs for sample in output.outputs]
        return found, llm.stats().cold_starts


_WAITED: dict[str, list[list[int]]] = {}


def check(params: dict[str, Any], mode: dict[str, Any], **settings: Any) -> None:
    expected = _WAITED.get(str(params)) or answers(params)[0]
    _WAITED[str(params)] = expected
    tokens, begun = answers(params, **mode, **settings)
    assert tokens == expected
    assert any(kind.startswith(mode["cold_start"]) for kind in begun), begun


@pytest.mark.parametrize("settings", [each for cells in SETTINGS.values() for each in cells], ids=str)
def test_a_setting(settings: dict[str, Any]) -> None:
    check({}, CPU, **settings)


@pytest.mark.long
@pytest.mark.parametrize("settings", [each for cells in SETTINGS.values() for each in cells], ids=str)
def test_a_setting_layer_by_layer(settings: dict[str, Any]) -> None:
    check({}, LAYERWISE, **settings)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_what_a_request_asks_for(params: dict[str, Any]) -> None:
    check(params, CPU)


def test_a_journal_replays(tmp_path: Path) -> None:
    check({}, CPU, journal=str(tmp_path / "journal"))
    config, entries = read_answered(tmp_path / "journal")
    replica = Replica(config)
    count = 0
    for now, event, there in entries:
        assert fingerprint(replica.handle(event, now)) == there
        count += 1
    assert count > 6  # every request draws six tokens


@pytest.mark.parametrize("settings", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cold-start cpu"):
        answers({}, **CPU, **settings)


def test_the_page_names_these() -> None:
    section = PAGE.read_text().split("## Beside other features")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)[1:]
    assert {row[0] for row in rows} == {*SETTINGS, *PARAMS, *WITH_A_FOLDER, *ELSEWHERE, *REFUSED}
    assert {name for name, said in rows if said.startswith("refused")} == set(REFUSED)
