"""The table "Beside other features" of docs/tensor-parallelism.md: with each of these an engine of two ranks gives
the tokens of one of one, or refuses."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import pytest

from manylora import SamplingParams
from manylora.config.declaring import ConfigError
from manylora.config.policy import CACHE_POLICIES
from manylora.engine.journal import fingerprint, read_answered
from manylora.outputs import RequestOutput
from manylora.policy.replica import Replica
from tests.e2e.process import MODEL, run_cli
from tests.internal import internal_llm

PAGE = Path(__file__).parents[2] / "docs" / "tensor-parallelism.md"
FOLDER = Path(MODEL).parent / "adapters"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())[:2]
PROMPTS = ("The first word of the day is", "The last one")
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PARAMS: dict[str, SamplingParams] = {
    "": GREEDY,
    "`n` > 1, sampling with a seed": dataclasses.replace(GREEDY, n=2, temperature=0.7, seed=5),
    "penalties": dataclasses.replace(GREEDY, frequency_penalty=0.5, presence_penalty=0.5),
    "stop strings": dataclasses.replace(GREEDY, stop=("e",)),
    "log-probabilities": dataclasses.replace(GREEDY, logprobs=3),
}
"""What requests ask for; all of them in every engine."""

TOGETHER: list[dict[str, dict[str, Any]]] = [
    {
        "`--cache-policy`": {"cache_policy": "static-lru"},
        "one tier (`--host-pool 0`)": {"host_pool": 0},
        "two steps in flight": {"pipeline_depth": 2},
        "`--admission`": {"admission": "lcfs"},
    },
    {
        "`--cache-policy`": {"cache_policy": "fastlibra-wom"},
        "chunked prompts": {"max_batch_tokens": 4, "max_num_seqs": 4},
        "preemption (a small pool)": {"device_pool": "6MiB", "host_pool": "8MiB"},
        "`--scheduling-policy priority`": {"scheduling_policy": "priority"},
        "`--cold-start block`, `layerwise`, `auto`": {"cold_start": "layerwise", "cold_start_stall": 1.0},
    },
    {"`--merge`": {"merge": "manylora"}},
    {
        "`--fairness vtc`": {"fairness": "vtc"},
        "`--adapter-batch-limit`": {"adapter_batch_limit": "1:hard"},
    },
]
"""Rows of the table that one engine has together."""
ELSEWHERE = {
    "`--journal`, `--trace`",
    "`--load-format dummy`",
    "`--replicas`",
    "`--cuda-graphs`",
}
"""Replicas: ``tests/cluster/test_ranks.py``. The last needs GPUs."""
REFUSED: dict[str, list[dict[str, Any]]] = {
    "`--cold-start cpu`, `--cpu-lora-workers`": [
        {"cold_start": "cpu", "cpu_lora_workers": 1},
    ],
}


def run(**settings: Any) -> list[RequestOutput]:
    adapters = {name: str(FOLDER / name) for name in NAMES}
    asked = [
        (prompt, params, name) for params in PARAMS.values() for name in (*NAMES, None) for prompt in PROMPTS
    ]
    prompts, params, names = (list(column) for column in zip(*asked, strict=True))
    with internal_llm(MODEL, adapters, **{"dtype": "float32", "device": "cpu"} | settings) as llm:
        return llm.generate(prompts, params, adapter=names)


@functools.cache
def expected(load_format: str = "auto") -> list[RequestOutput]:
    return run(load_format=load_format)


def check(outputs: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for output, other in zip(outputs, wanted, strict=True):
        for mine, theirs in zip(output.outputs, other.outputs, strict=True):
            assert (mine.token_ids, mine.text) == (theirs.token_ids, theirs.text)
            for ours, others in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
                assert ours.keys() == others.keys()
                for token, found in ours.items():
                    assert found.logprob == pytest.approx(others[token].logprob, abs=1e-4)


@pytest.mark.parametrize("cells", TOGETHER, ids=lambda cells: ", ".join(cells))
def test_settings(cells: dict[str, dict[str, Any]]) -> None:
    settings = {name: value for each in cells.values() for name, value in each.items()}
    check(run(tensor_parallel_size=2, **settings), expected())


@pytest.mark.long
@pytest.mark.parametrize("policy", CACHE_POLICIES)
@pytest.mark.parametrize("sharding", ["sharded", "replicated"])
def test_every_cache_policy(policy: str, sharding: str) -> None:
    # Of what static-lru has, adapters may take a fifth, and a replicated one takes 25 pages.
    small = {"device_pool": "8MiB" if policy == "static-lru" else "6MiB", "host_pool": "8MiB"}
    check(run(tensor_parallel_size=2, lora_sharding=sharding, cache_policy=policy, **small), expected())


def test_a_journal_replays(tmp_path: Path) -> None:
    files = {"journal": str(tmp_path / "journal"), "trace": str(tmp_path / "trace")}
    check(run(tensor_parallel_size=2, lora_sharding="sharded", device_pool="4MiB", **files), expected())
    config, entries = read_answered(tmp_path / "journal")
    replica = Replica(config)
    count = 0
    for now, event, there in entries:
        assert fingerprint(replica.handle(event, now)) == there
        count += 1
    assert count > 10  # every request draws ten tokens
    assert (tmp_path / "trace").read_text()


def test_random_weights_are_those_of_one_process() -> None:
    check(run(tensor_parallel_size=2, load_format="dummy"), expected("dummy"))


@pytest.mark.parametrize(
    "settings", [each for cells in REFUSED.values() for each in cells], ids=lambda each: str(each)
)
def test_what_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        run(tensor_parallel_size=2, **settings)
    assert "\n" not in str(refused.value)


def test_a_refusal_is_one_line_and_exit_code_2() -> None:
    ended = run_cli("serve", MODEL, "--device", "cpu", "-tp", "2", "--cold-start", "cpu")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "--cold-start cpu does not work with --tensor-parallel-size" in line


def test_the_page_names_these() -> None:
    section = PAGE.read_text().split("## Beside other features")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)[1:]
    refused = {name for name, says in rows if says == "refused"}
    assert refused == set(REFUSED)
    works = {row for cells in TOGETHER for row in cells} | {name for name in PARAMS if name} | ELSEWHERE
    assert {name for name, _ in rows} == works | refused
