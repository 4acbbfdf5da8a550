"""Servers that merge: skewed load in phases gives an unmerged engine's answers, metrics, trace and journal
tell of the same switches, and what ends or leaves while one is under way ends well."""

from __future__ import annotations

import concurrent.futures
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from manylora import LLM, SamplingParams
from manylora.engine.journal import read_journal
from manylora.protocol.events import StepDone, SwitchDone
from tests.e2e.process import MODEL, REPOSITORY, Json, Server, wait_until

NAMES = ("french", "german", "spanish", "finnish")
PROMPTS = ("The first word of the day is", "The last one", "Once upon a time", "What comes next")
MERGED = 'manylora:merge_switches_total{to="merged"}'
KINDS = ("unmerged", "merged")
TO_BASE = 'manylora:merge_switches_total{to="base"}'
SMALL = ("--device-pool", "48MiB", "--max-num-seqs", "8", "--dtype", "float32")
CLIENTS = 12
PHASE_S = 0.6
MODES = {
    "dlora": ("--merge", "dlora", "--merge-starve", "0.5"),
    "manylora": ("--merge", "manylora", "--merge-minority", "wait", "--merge-starve", "0.5"),
}
Asked = tuple[str | None, str]


def body(asked: Asked, max_tokens: int = 24) -> Json:
    adapter, prompt = asked
    return {"model": adapter or "demo", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}


def asked_in(phase: int) -> list[Asked]:
    """All of the phase's adapter; in every other phase one of ten is of another or of the base."""
    hot, others = NAMES[phase % len(NAMES)], [None, *NAMES]
    names = [
        hot if place % 10 or phase % 2 == 0 else others[(phase + place // 10) % 5] for place in range(40)
    ]
    return [(name, PROMPTS[place % 4]) for place, name in enumerate(names)]


def phases(server: Server, seconds: float) -> dict[Asked, set[str]]:
    """All answers by what was asked; each client has one request under way."""
    began_s, answers = time.monotonic(), dict[Asked, set[str]]()

    def client(number: int) -> None:
        turn = number
        while (passed_s := time.monotonic() - began_s) < seconds or len(answers) < 10:
            asked = asked_in(int(passed_s / PHASE_S))[turn % 40]
            answers.setdefault(asked, set()).add(server.text(**body(asked)))
            turn += 7

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as threads:
        for done in [threads.submit(client, number) for number in range(CLIENTS)]:
            done.result()
    return answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("merging") / "adapters"
    for name in NAMES:
        shutil.copytree(REPOSITORY / "demo" / "adapters" / name, root / name)
    return root


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[Asked, str]:
    """What an engine answers that does not merge."""
    every: list[Asked] = [(name, prompt) for name in (*NAMES, None) for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    paths = {name: str(folder / name) for name in NAMES}
    with LLM(MODEL, paths, dtype="float32", device="cpu", device_pool="48MiB") as llm:
        outputs = llm.generate([prompt for _, prompt in every], params, adapter=[name for name, _ in every])
    return {asked: output.outputs[0].text for asked, output in zip(every, outputs, strict=True)}


def check_phases(mode: str, seconds: float, folder: Path, expected: dict[Asked, str]) -> None:
    trace, journal = folder.parent / f"{mode}.trace", folder.parent / f"{mode}.journal"
    args = (
        "--adapter-dir",
        str(folder),
        *SMALL,
        *MODES[mode],
        "--trace",
        str(trace),
        "--journal",
        str(journal),
    )
    with Server(*args) as server:
        server.wait_ready()
        answers = phases(server, seconds)
        while not server.gauge(MERGED):  # on a machine that has done little in so short a time
            answers |= phases(server, seconds)
        figures = server.wait_quiet()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        server.assert_all_gone()
        assert "Traceback" not in server.log
    assert {asked: {expected[asked]} for asked in answers} == answers
    assert len(answers) >= 10
    lines = re.findall(r" s  (merge|unmerge) ", trace.read_text())
    assert figures[MERGED] == lines.count("merge")
    assert figures[TO_BASE] == lines.count("unmerge")
    events = [event for _, event in read_journal(journal)[1]]
    assert figures[MERGED] + figures[TO_BASE] == sum(isinstance(event, SwitchDone) for event in events)
    steps = [figures[f'manylora:steps_total{{mode="{kind}",model_name="demo"}}'] for kind in KINDS]
    assert sum(steps) == sum(isinstance(event, StepDone) for event in events)
    assert figures[MERGED] > 0
    assert steps[KINDS.index("merged")] > 0


@pytest.mark.parametrize("mode", ["dlora", pytest.param("manylora", marks=pytest.mark.long)])
def test_phases_of_skewed_load(mode: str, folder: Path, expected: dict[Asked, str]) -> None:
    check_phases(mode, 2.4, folder, expected)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_two_minutes_of_them(mode: str, folder: Path, expected: dict[Asked, str]) -> None:
    check_phases(mode, 120.0, folder, expected)


def test_a_merged_adapter_is_unloaded_and_loaded_anew(folder: Path, expected: dict[Asked, str]) -> None:
    """Its requests run to their end, others are untouched, and its name answers with the new weights. Then the
    server is told to end while switches go on."""
    first, second = NAMES[:2]
    merging = ("--merge", "merged", "--merge-starve", "0.1", "--drain-timeout", "60")
    with Server("--adapter-dir", str(folder), *SMALL, *merging) as server:
        server.wait_ready()
        with concurrent.futures.ThreadPoolExecutor(20) as threads:
            long = [threads.submit(server.text, **body((name, PROMPTS[0]), 120)) for name in (first, second)]
            gauge = f'manylora:merged_adapter{{adapter_name="{first}"}}'

            def is_merged() -> bool:
                if all(each.done() for each in long):  # too soon to be seen
                    server.text(**body((first, PROMPTS[0])))
                return server.metrics().get(gauge) == 1

            wait_until(is_merged, "a merged adapter")
            others = [threads.submit(server.text, **body((second, prompt))) for prompt in PROMPTS]
            with server.held():
                removing = threads.submit(server.unload, first)
            assert removing.result().status_code == 200
            texts = [each.result() for each in long]
            assert texts[0].startswith(expected[first, PROMPTS[0]])
            assert texts[1].startswith(expected[second, PROMPTS[0]])
            assert [each.result() for each in others] == [expected[second, prompt] for prompt in PROMPTS]
            assert server.complete(**body((first, PROMPTS[0]))).status_code == 404
            assert server.load(first, folder / NAMES[2]).status_code == 200
            again = [threads.submit(server.text, **body((first, prompt))) for prompt in PROMPTS]
            assert [each.result() for each in again] == [expected[NAMES[2], prompt] for prompt in PROMPTS]
            before = server.gauge(MERGED)
            assert before > 1
            last = [body((name, PROMPTS[1]), 300) for name in (first, second)]
            running = [threads.submit(server.complete, **each) for each in last]
            wait_until(lambda: server.gauge(MERGED) > before + 1, "switches that go on")
            server.process.send_signal(signal.SIGTERM)
            ended = [each.result() for each in running]
        assert [answer.status_code for answer in ended] == [200, 200]
        assert ended[1].json()["choices"][0]["text"].startswith(expected[second, PROMPTS[1]])
        assert server.wait_exit() == 0
        server.assert_all_gone()
        assert "Traceback" not in server.log
