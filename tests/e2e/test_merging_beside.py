"""The table "Beside other features" of docs/merging.md: with each of these an engine that merges gives the tokens
of one that does not."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from manylora import LLM, AsyncLLM, SamplingParams
from manylora.cli import main
from manylora.config.cold_start import COLD_START_MODES
from manylora.config.declaring import ConfigError
from manylora.config.merging import MergeTimes
from manylora.engine.client import GenerationRequest
from manylora.engine.journal import fingerprint, read_answered
from manylora.executor import build
from manylora.policy.replica import Replica
from manylora.text.generate import TextStream, collect
from tests.e2e.process import MODEL
from tests.engine.moving import MovingEngines
from tests.internal import internal_llm

PAGE = Path(__file__).parents[2] / "docs" / "merging.md"
FOLDER = Path(MODEL).parent / "adapters"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())[:2]
PROMPTS = ("The first word of the day is", "The last one")
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "`--cache-policy`": [{"cache_policy": name} for name in ("manylora", "fastlibra-wom", "static-lru")],
    "one tier (`--host-pool 0`)": [{"host_pool": 0}],
    "two steps in flight": [{"pipeline_depth": 2}],
    "`--admission`": [{"admission": "lcfs"}, {"admission": "early-abort", "slo_ttft": 600.0}],
    "`--scheduling-policy priority`, `--priority-age`": [
        {"scheduling_policy": "priority"},
        {"scheduling_policy": "priority", "priority_age": 0.01},
    ],
    "`--fairness vtc`": [{"fairness": "vtc"}],
    "`--adapter-batch-limit`": [{"adapter_batch_limit": "1"}, {"adapter_batch_limit": "1:hard"}],
    "chunked prompts, `--max-prefills-per-step`": [
        {"max_batch_tokens": 4, "max_num_seqs": 4},
        {"max_prefills_per_step": 1},
    ],
    "preemption (a small pool)": [{"device_pool": "6MiB", "host_pool": "8MiB"}],
    "`--merge-copy host`": [{"merge_copy": "host"}],
}
PARAMS: dict[str, dict[str, Any]] = {
    "`n` > 1, sampling with a seed": {"n": 2, "temperature": 0.7, "seed": 5},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    "stop strings": {"stop": ["e"]},
}
HERE = {
    "`--journal`, `--trace`", "`--cold-start` other than `wait`", "`cache_salt` and keys",
    "streams, and requests that are aborted", "requests that move to another engine", "float16, bfloat16",
}  # fmt: skip
"""Rows that have a test of their own below."""
ELSEWHERE = {
    "log-probabilities": "executor/test_merging.py::test_the_base_answers_to_the_last_digit_as_before",
    "captured steps (`--cuda-graphs`)": "gpu/test_merging.py::test_captured_graphs_stay_valid",
    "adapters loaded and unloaded while others run": (
        "e2e/test_merging_served.py::test_a_merged_adapter_is_unloaded_and_loaded_anew"
    ),
    "`bench simulate`, also with `--replicas` and `--router`": (
        "bench/test_simulate_cluster.py::test_policies_modes_parameters_and_several_kinds"
    ),
    "`--tensor-parallel-size`": "parity/test_ranks_merged.py::test_engines_of_every_mode",
}
"""Rows that a test of another file runs. Merged log-probabilities differ from unmerged ones by rounding."""


def answers(params: dict[str, Any], **settings: Any) -> tuple[list[list[int]], dict[str, float]]:
    adapters = {name: str(FOLDER / name) for name in NAMES}
    names = [name for name in (*NAMES, None) for _ in PROMPTS]
    with internal_llm(MODEL, adapters, **{"dtype": "float32", "device": "cpu", **settings}) as llm:
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


def test_a_journal_replays_and_a_trace_tells_of_switches(tmp_path: Path) -> None:
    check({}, journal=str(tmp_path / "journal"), trace=str(tmp_path / "trace"))
    assert " s  merge  " in (tmp_path / "trace").read_text()
    config, entries = read_answered(tmp_path / "journal")
    replica = Replica(config)
    count = 0
    for now, event, there in entries:
        assert fingerprint(replica.handle(event, now)) == there
        count += 1
    assert count > 3 * len(PROMPTS)  # every request's arrival and the ends of their steps


@pytest.mark.parametrize("mode", [mode for mode in COLD_START_MODES if mode != "wait"])
def test_cold_starts_are_refused(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=f"--cold-start {mode} does not go with --merge dlora"):
        LLM(MODEL, cold_start=mode, merge="dlora")
    assert main(["serve", MODEL, "--cold-start", mode, "--merge", "merged"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--cold-start {mode} does not go with --merge merged" in line


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base's rows never see a merged adapter's rounding."""
    monkeypatch.setattr(build, "measure_merging", lambda *args, steps_wait: MergeTimes(steps_wait))
    expected = answers({}, dtype=dtype)[0]
    tokens, figures = answers({}, dtype=dtype, merge="merged", merge_starve=0.01)
    assert tokens[-len(PROMPTS) :] == expected[-len(PROMPTS) :]
    assert [len(each) for each in tokens] == [len(each) for each in expected]
    assert figures['manylora:merge_switches_total{to="merged"}'] > 1


def adapters_and_base() -> list[str | None]:
    return [*NAMES, None]


def test_a_salt_narrows_what_is_shared() -> None:
    """In each scope requests find what was computed there, merged or not, and nothing of the other."""
    adapters = {name: str(FOLDER / name) for name in NAMES}
    with LLM(MODEL, adapters, dtype="float32", device="cpu", merge="merged", merge_starve=0.01) as llm:
        prompts, params = [list(range(10, 60))] * len(adapters_and_base()), SamplingParams(**GREEDY)
        found, hits = [], []
        for salt in ("one", "two", "one", "two"):
            outputs = llm.generate(prompts, params, adapters_and_base(), cache_salt=salt)
            found.append([output.outputs[0].token_ids for output in outputs])
            hits.append(llm.stats().kv_hit_tokens_device)
        assert llm.metrics()['manylora:merge_switches_total{to="merged"}'] > 1
    assert hits == [0, 0, 3 * 48, 6 * 48], "three pages of sixteen tokens of each"
    assert all(tokens == found[0] for tokens in found)


def test_streams_and_what_is_aborted() -> None:
    """A third of all is given up after its first token; the others get what they get alone."""
    adapters = {name: str(FOLDER / name) for name in NAMES}
    names = adapters_and_base() * 3
    params = SamplingParams(**GREEDY)

    async def streamed(llm: AsyncLLM, number: int) -> list[int]:
        tokens: list[int] = []
        async for output in llm.stream(PROMPTS[0], params, names[number]):
            tokens += output.token_ids
            if number // 3 == 1:
                break
        return tokens

    async def all_of_them() -> list[list[int]]:
        settings: dict[str, Any] = {
            "dtype": "float32",
            "device": "cpu",
            "merge": "merged",
            "merge_starve": 0.01,
        }
        async with AsyncLLM(MODEL, adapters, **settings) as llm:
            found = await asyncio.gather(*(streamed(llm, number) for number in range(len(names))))
            assert (await llm.stats()).switches_merged > 1
            return found

    expected = answers({})[0][::2]
    for number, tokens in enumerate(asyncio.run(all_of_them())):
        assert tokens == expected[number % 3][: len(tokens)]
        assert number // 3 == 1 or len(tokens) == GREEDY["max_tokens"]


def test_requests_that_move() -> None:
    """Between two engines that merge, each as its own load says."""
    adapters = {name: str(FOLDER / name) for name in NAMES}
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "merge": "merged", "merge_starve": 0.01}
    prompt, params = tuple(range(10, 40)), SamplingParams(**GREEDY)
    requests = [
        GenerationRequest(f"r{number}", prompt, params, name, stream=True)
        for number, name in enumerate(adapters_and_base() * 6)
    ]

    async def moved() -> tuple[list[list[int]], int]:
        async with (
            AsyncLLM(MODEL, adapters, **settings) as first,
            AsyncLLM(MODEL, adapters, **settings) as second,
        ):
            engines = MovingEngines([first._connected(), second._connected()], seed=1, most_moves=2)
            streams = [TextStream(engines.as_client(), first.tokenizer, request) for request in requests]
            found = await asyncio.gather(*(collect(stream, 1) for stream in streams))
            switches = [(await llm.stats()).switches_merged for llm in (first, second)]
            assert min(switches) > 0
            return [list(outputs[0].token_ids) for outputs in found], engines.moves.total()

    tokens, num_moves = asyncio.run(moved())
    assert num_moves > 0
    with LLM(MODEL, adapters, dtype="float32", device="cpu") as llm:
        outputs = llm.generate([list(prompt)] * 3, params, adapters_and_base())
    expected = [list(output.outputs[0].token_ids) for output in outputs]
    assert tokens == expected * 6


def test_the_page_names_these() -> None:
    section = PAGE.read_text().split("## Beside other features")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)[1:]
    assert {row[0] for row in rows} == {*SETTINGS, *PARAMS, *HERE, *ELSEWHERE}
    for test in ELSEWHERE.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (PAGE.parents[1] / "tests" / file).read_text()
