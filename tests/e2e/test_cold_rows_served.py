"""Servers whose CPU serves cold requests: the same answers, and what metrics tell."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from manylora import LLM, SamplingParams
from tests.e2e.process import BASE, MODEL, Server, run_cli, wait_until

NAMES = ("finnish", "shakespeare", "german")
PROMPT = "The first word of the day is"
POOLS = ("--device", "cpu", "--dtype", "float32", "--device-pool", "3MiB", "--host-pool", "16MiB")
CPU = ("--cold-start", "cpu", "--cpu-lora-workers", "2")
LABEL = f'model_name="{BASE}"'
SECONDS = f"manylora:cpu_lora_seconds_total{{{LABEL}}}"


def begun(metrics: dict[str, float], mode: str) -> float:
    """Of adapters that were in the host's pool or in their files."""
    start, label = "manylora:cold_starts_total{", f'mode="{mode}"'
    return sum(value for name, value in metrics.items() if name.startswith(start) and label in name)


def kinds(metrics: dict[str, float]) -> dict[str, float]:
    return {name: count for name, count in metrics.items() if name.startswith("manylora:cold_starts_total")}


def named(adapters: Path) -> list[str]:
    return [word for name in NAMES for word in ("--adapter", f"{name}={adapters / name}")]


def answers(server: Server) -> list[str]:
    return [server.text(model=name, prompt=PROMPT, max_tokens=6, ignore_eos=True) for name in NAMES]


@pytest.fixture(scope="module")
def expected(adapters: Path) -> list[str]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    paths = {name: str(adapters / name) for name in NAMES}
    with LLM(MODEL, paths, dtype="float32", device="cpu", device_pool="3MiB", host_pool="16MiB") as llm:
        return [out.outputs[0].text for out in llm.generate([PROMPT] * len(NAMES), params, list(NAMES))]


def test_the_cpu_serves_and_ends_with_its_server(adapters: Path, expected: list[str]) -> None:
    with Server(*POOLS, *CPU, *named(adapters)) as server:
        server.wait_ready()
        assert kinds(server.metrics()) == {
            f'manylora:cold_starts_total{{mode="{mode}",source="{source}"}}': 0
            for mode in ("cpu", "wait")
            for source in ("files", "host")
        }
        for _ in range(2):
            assert answers(server) == expected
        assert begun(server.metrics(), "cpu") > len(NAMES)
        wait_until(lambda: server.metrics()[SECONDS] > 0, "the threads' seconds")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0


def test_auto_from_a_file(adapters: Path, expected: list[str], tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("cold-start: auto\ncold-start-stall: 1.0\n")
    with Server("--config", str(config), *POOLS, *named(adapters)) as server:
        server.wait_ready()
        for _ in range(2):
            assert answers(server) == expected
        assert sum(begun(server.metrics(), mode) for mode in ("wait", "layerwise")) > len(NAMES)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--cold-start", "soon"), "invalid choice"),
        (("--cold-start", "cpu", "--cpu-lora-workers", "0"), "--cpu-lora-workers of at least 1"),
        (("--cold-start", "cpu", "--cpu-lora-workers", "1.5"), "auto or a whole number"),
        ((*CPU, "--host-pool", "0"), "needs a host pool"),
        (("--cpu-lora-workers", "2"), "--cpu-lora-workers 2 needs --cold-start cpu"),
        ((*CPU, "--merge", "merged"), "does not go with --merge merged"),
    ],
)
def test_what_cannot_work_is_one_line(flags: tuple[str, ...], says: str) -> None:
    ended = run_cli("serve", MODEL, "--port", "0", *flags)
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1
    assert says in ended.stderr


def test_in_process_too(adapters: Path, expected: list[str]) -> None:
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "device_pool": "3MiB",
        "host_pool": "16MiB",
    }
    settings |= {"cold_start": "cpu", "cpu_lora_workers": 2}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    paths = {name: str(adapters / name) for name in NAMES}
    with LLM(MODEL, paths, served_model_name=BASE, **settings) as llm:
        for _ in range(2):
            for name, text in zip(NAMES, expected):
                assert llm.generate([PROMPT], params, [name])[0].outputs[0].text == text
        metrics = llm.metrics()
    assert metrics[SECONDS] > 0
    assert begun(metrics, "cpu") > len(NAMES)
