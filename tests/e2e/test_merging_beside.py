"""The table "Beside other features" of docs/merging.md: with each of these an engine that merges gives the tokens
of one that does not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from manylora import LLM, SamplingParams
from manylora.engine.fingerprint import fingerprint
from manylora.engine.journal import read_answered
from manylora.policy.replica import Replica
from tests.e2e.process import MODEL

PAGE = Path(__file__).parents[2] / "docs" / "merging.md"
FOLDER = Path(MODEL).parent / "adapters"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())[:2]
PROMPTS = ("The first word of the day is", "The last one")
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "`--cache-policy`": [{"cache_policy": name} for name in ("manylora", "fastlibra-wom", "static-lru")],
    "one tier (`--host-pool 0`)": [{"host_pool": 0}],
    "`--pipeline-depth 2`": [{"pipeline_depth": 2}],
    "`--admission`": [{"admission": "lcfs"}, {"admission": "early-abort", "slo_ttft": 600.0}],
    "`--scheduling-policy priority`": [{"scheduling_policy": "priority"}],
    "`--fairness vtc`": [{"fairness": "vtc"}],
    "`--adapter-batch-limit`": [{"adapter_batch_limit": "1"}, {"adapter_batch_limit": "1:hard"}],
    "chunked prompts": [{"max_batch_tokens": 4, "max_num_seqs": 4}],
    "preemption (a small pool)": [{"device_pool": "6MiB", "host_pool": "8MiB"}],
    "`--merge-copy host`": [{"merge_copy": "host"}],
}
PARAMS: dict[str, dict[str, Any]] = {
    "`n` > 1, sampling with a seed": {"n": 2, "temperature": 0.7, "seed": 5},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    "stop strings": {"stop": ["e"]},
}
WITH_A_FOLDER = {"`--adapter-store`", "`--journal`"}
ELSEWHERE = {"log-probabilities"}
"""tests/executor/test_merging.py: to the last digit for the base; merged ones differ by rounding."""


def answers(params: dict[str, Any], **settings: Any) -> tuple[list[list[int]], dict[str, float]]:
    adapters = {name: str(FOLDER / name) for name in NAMES}
    names = [name for name in (*NAMES, None) for _ in PROMPTS]
    with LLM(MODEL, adapters, dtype="float32", device="cpu", **settings) as llm:
        outputs = llm.generate(list(PROMPTS) * 3, SamplingParams(**GREEDY | params), adapter=names)
        return [list(sample.token_ids) for output in outputs for sample in output.outputs], llm.metrics()


_UNMERGED: dict[str, list[list[int]]] = {}


def check(params: dict[str, Any], **settings: Any) -> None:
    expected = _UNMERGED.get(str(params)) or answers(params)[0]
    _UNMERGED[str(params)] = expected
    tokens, figures = answers(params, merge="merged", merge_starve=0.01, **settings)
    assert tokens == expected
    assert figures['manylora:merge_switches_total{to="merged"}'] > 1


@pytest.mark.parametrize(
    "settings", [each for cells in SETTINGS.values() for each in cells], ids=lambda each: str(each)
)
def test_a_setting(settings: dict[str, Any]) -> None:
    check({}, **settings)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_what_a_request_asks_for(params: dict[str, Any]) -> None:
    check(params)


def test_an_adapter_store(tmp_path: Path) -> None:
    for _ in range(2):
        check({}, adapter_store=str(tmp_path / "store"))


def test_a_journal_replays(tmp_path: Path) -> None:
    check({}, journal=str(tmp_path / "journal"))
    config, entries = read_answered(tmp_path / "journal")
    replica = Replica(config)
    count = 0
    for now, event, there in entries:
        assert fingerprint(replica.handle(event, now)) == there
        count += 1
    assert count > 50


def test_the_page_names_these() -> None:
    section = PAGE.read_text().split("## Beside other features")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)[1:]
    assert {row[0] for row in rows} == {*SETTINGS, *PARAMS, *WITH_A_FOLDER, *ELSEWHERE}
