"""Servers whose CPU workers serve cold requests: the same answers, what metrics tell, and how workers end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manylora import LLM, SamplingParams
from manylora.config.cold_start import num_cores
from tests.e2e.process import BASE, MODEL, Server, is_running, run_cli, shared_files, wait_until

NAMES = ("finnish", "shakespeare", "german")
PROMPT = "The first word of the day is"
POOLS = ("--device", "cpu", "--dtype", "float32", "--device-pool", "3MiB", "--host-pool", "16MiB")
CPU = ("--cold-start", "cpu", "--cpu-lora-workers", "2")
LABEL = f'model_name="{BASE}"'
SECONDS = f"manylora:cpu_lora_seconds_total{{{LABEL}}}"
OFF = "CPU workers have died 3 times"


def of_group(leader: int) -> Iterator[tuple[int, bytes]]:
    """Processes of a group that still run, with their command lines."""
    for name in os.listdir("/proc"):
        if name.isdigit() and is_running(int(name)):
            try:
                if os.getpgid(int(name)) == leader:
                    yield int(name), Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue


def workers(server: Server) -> list[int]:
    return sorted(pid for pid, line in of_group(server.process.pid) if b"manylora.assist" in line)


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


def test_workers_serve_die_and_end_with_their_server(adapters: Path, expected: list[str]) -> None:
    with Server(*POOLS, *CPU, *named(adapters)) as server:
        server.wait_ready()
        assert len(workers(server)) == 2
        assert kinds(server.metrics()) == {
            f'manylora:cold_starts_total{{mode="{mode}",source="{source}"}}': 0
            for mode in ("cpu", "wait")
            for source in ("files", "host")
        }
        for _ in range(2):
            assert answers(server) == expected
        assert begun(server.metrics(), "cpu") > len(NAMES)
        wait_until(lambda: server.metrics()[SECONDS] > 0, "workers' seconds")
        for _ in range(3):
            killed = workers(server)[0]
            os.kill(killed, signal.SIGKILL)
            while killed in workers(server) or (OFF not in server.log and len(workers(server)) < 2):
                assert answers(server) == expected
        assert answers(server) == expected
        wait_until(lambda: not workers(server), "no workers")
        assert server.log.count(OFF) == 1
        before = begun(server.metrics(), "cpu")
        assert answers(server) == expected
        assert begun(server.metrics(), "cpu") == before
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        wait_until(lambda: not list(of_group(server.process.pid)), "processes gone")


@pytest.mark.parametrize(
    "end", ["SIGTERM", "SIGINT to the group", "a crash of the engine", "a crash of both"]
)
def test_no_worker_and_no_shared_memory_is_left(end: str, adapters: Path) -> None:
    with Server(*POOLS, *CPU, *named(adapters)) as server:
        server.wait_ready()
        assert len(workers(server)) == 2
        answers(server)
        # What they share lies in files without a name, which the system frees with the last process.
        assert not shared_files(pid for pid, _ in of_group(server.process.pid))
        match end:
            case "SIGTERM":
                server.process.send_signal(signal.SIGTERM)
            case "SIGINT to the group":
                os.killpg(server.process.pid, signal.SIGINT)
            case "a crash of the engine":
                os.kill(server.engine_pid, signal.SIGKILL)
            case _:
                os.kill(server.engine_pid, signal.SIGKILL)
                server.process.kill()
        server.process.wait()
        wait_until(lambda: not list(of_group(server.process.pid)), "processes gone")


def test_auto_from_a_file(adapters: Path, expected: list[str], tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("cold-start: auto\ncold-start-stall: 1.0\n")
    with Server("--config", str(config), *POOLS, *named(adapters)) as server:
        server.wait_ready()
        assert not workers(server)
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
        (("--cold-start", "cpu", "--replicas", str(num_cores())), "auto is 0 on 1 cores"),
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
