"""The client in processes of its own, against a real server that computes nothing: whole, fast, and cut short."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.bench.http_target import HttpTarget
from manylora_lab.bench.processes import _dealt, _interrupts_held, processes_for
from manylora_lab.bench.replay import ReplaySettings
from manylora_lab.bench.serve import MeasuredReplay, measure
from manylora_lab.bench.targets import TargetRequest
from manylora_lab.workloads.named import named
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest, in_order

from tests.bench.fakes import stream_of, turn
from tests.bench.trivial_server import FATAL
from tests.e2e.process import REPOSITORY, Server, children_of, command, environment, is_running, wait_until

ADAPTER = REPOSITORY / "demo" / "adapters" / "german"


@contextmanager
def trivial_server(delay_s: float) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.trivial_server", str(delay_s)],
        env=environment(), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def replayed(url: str, stream: Stream, processes: int) -> MeasuredReplay:
    async def run() -> MeasuredReplay:
        needs_ids = any(request.turn for request in stream.requests)
        target = await HttpTarget.connect(url, needs_ids=needs_ids)
        try:
            return await measure(target, stream, ReplaySettings(), client_processes=processes)
        finally:
            await target.close()

    return asyncio.run(run())


def test_500_requests_a_second() -> None:
    """All are made, at their times, and answered whole; how late the client was is shown, not judged."""
    stream = named("synthetic:prompt=100,output=10", rate=500, num_adapters=8, duration_s=3, seed=1)
    with trivial_server(0.005) as url:
        found = replayed(url, stream, processes_for(stream))
    assert found.error is None
    assert [result.error for result in found.results] == [None] * len(stream.requests)
    assert len(stream.requests) > 1300
    assert [result.arrival_s for result in found.results] == [
        request.arrival_s for request in stream.requests
    ]
    assert {result.reply_tokens for result in found.results} == {10}
    # A loop's clock counts milliseconds.
    assert all(result.handed_s > result.arrival_s - 0.005 for result in found.results)
    assert sum(len(result.itls_s) for result in found.results) == 9 * len(stream.requests)
    lag = found.summary["client_lag_ms"]
    print(f"lag ms: mean {lag['mean']:.1f} p50 {lag['p50']:.1f} p99 {lag['p99']:.1f} max {lag['max']:.1f}")


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_conversations_stay_whole_whoever_sends_them(processes: int) -> None:
    requests = [turn(number, index, 0.02 * index) for number in range(5) for index in range(3)]
    with trivial_server(0.001) as url:
        found = replayed(url, stream_of(*requests), processes)
    assert [result.error for result in found.results] == [None] * 15
    for number in range(5):
        mine = [result for result in found.results if result.conversation == number]
        assert [result.prompt_tokens for result in mine] == [4, 11, 18]
        assert [result.adapter for result in mine] == [f"adapter-{number % 3}"] * 3
        # The server's words name their place: a history was sent whole.
        assert [result.text for result in mine] == ["w4 w5 w6 ", "w11 w12 w13 ", "w18 w19 w20 "]
        assert all(a.end_s <= b.handed_s for a, b in itertools.pairwise(mine))


def test_parts_are_dealt_by_conversation() -> None:
    stream = stream_of(*(turn(number, index, 0.1 * index) for number in range(5) for index in range(2)))
    parts = _dealt(stream, 2)
    assert [{request.conversation for request in part.requests} for part in parts] == [{0, 2, 4}, {1, 3}]
    assert sum(len(part.requests) for part in parts) == 10
    assert len(_dealt(stream, 8)) == 5


def test_as_many_processes_as_the_rate_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)

    def of(count: int, output: int) -> int:
        requests = (
            StreamRequest(10 * i / count, None, i, 0, (Piece(i, 1),), output) for i in range(count + 1)
        )
        return processes_for(in_order("even", requests, (), ()))

    assert [of(10, 1), of(2400, 1), of(5000, 1), of(100, 2500), of(10**5, 1)] == [1, 1, 3, 3, 8]


# ---------------------------------------------------------------- cut short


def trace(folder: Path, seconds: float) -> str:
    """Ten requests a second."""
    rows = [
        {
            "arrival_s": i / 10, "conversation": i, "turn": 0, "adapter": 0, "rank": 8, "history_tokens": 0,
            "user_tokens": 5, "reply_tokens": 4,
        }
        for i in range(int(10 * seconds))
    ]  # fmt: skip
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@contextmanager
def bench(folder: Path, url: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a process group of its own."""
    args = ["--trace-file", trace(folder, 600), "--url", url, "--out", str(folder / "out.json"), *more]
    process = subprocess.Popen(
        command("bench", "serve", *args, "--progress"),
        env=environment(), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for_progress(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    line = process.stderr.readline()
    while " done" not in line or " 0 of" in line:
        assert line, "it ended"
        line = process.stderr.readline()


def kept(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert report["is_complete"] is False
    assert report["num_prompts"] == 6000
    assert 0 < report["completed"] <= len(report["requests"]) < 6000
    assert report["completed"] + report["failed"] == len(report["requests"]) == len(report["ttfts"])
    return report


def test_a_server_that_dies_leaves_what_came(tmp_path: Path) -> None:
    with trivial_server(0.001) as url, bench(tmp_path, url) as process:
        wait_for_progress(process)
        fatal = asyncio.run(_send_fatal(url))
        out, err = process.communicate(timeout=120)
    assert fatal is not None
    assert process.returncode == 1
    report = kept(tmp_path)
    assert "is gone" in report["error"]
    assert "is gone" in err
    assert "not made" in out
    assert "Traceback" not in err


async def _send_fatal(url: str) -> str | None:
    """What the request that ends the server is answered."""
    target = await HttpTarget.connect(url, needs_ids=False)
    return (await target.generate(TargetRequest((FATAL,), 5, None))).error


@pytest.mark.parametrize("processes", ["0", "2"])
def test_an_interrupt_leaves_what_came(tmp_path: Path, processes: str) -> None:
    with trivial_server(0.001) as url, bench(tmp_path, url, "--client-processes", processes) as process:
        wait_for_progress(process)
        os.killpg(process.pid, signal.SIGINT)  # As a terminal does: all processes of the command.
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert kept(tmp_path)["error"] == "interrupted"
    assert "Traceback" not in err


def test_an_interrupt_while_clients_start(tmp_path: Path) -> None:
    """They ignore it from the beginning, and none of them fills the screen."""
    with trivial_server(0.001) as url, bench(tmp_path, url, "--client-processes", "2") as process:
        wait_until(lambda: len(children_of(process.pid)) >= 2, "a client")
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    *progress, last = err.splitlines()  # there is progress where they were up before the interrupt came
    assert last == "not complete: interrupted"
    assert all(line.endswith(" failed") for line in progress)
    assert json.loads((tmp_path / "out.json").read_text())["error"] == "interrupted"


def test_an_interrupt_is_held_back_while_a_process_starts_not_lost() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        for _ in range(2):  # the first starts the processes' tracker too
            with _interrupts_held():
                os.kill(os.getpid(), signal.SIGINT)
                assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
                blocked = subprocess.run(
                    [sys.executable, "-c", "import signal; print(*map(int, signal.pthread_sigmask(0, ())))"],
                    stdout=subprocess.PIPE, text=True, check=True,
                )  # fmt: skip
            assert str(int(signal.SIGINT)) in blocked.stdout.split()
            assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == [signal.SIGINT] * 2


def test_clients_end_with_the_command(tmp_path: Path) -> None:
    with trivial_server(0.001) as url, bench(tmp_path, url, "--client-processes", "2") as process:
        wait_for_progress(process)
        clients = children_of(process.pid)
        assert len(clients) >= 2
        process.kill()
        wait_until(lambda: not any(map(is_running, clients)), "the clients gone")


def test_a_client_that_dies_is_told_of(tmp_path: Path) -> None:
    with trivial_server(0.001) as url, bench(tmp_path, url, "--client-processes", "2") as process:
        wait_for_progress(process)
        *_, client = children_of(process.pid)
        os.kill(client, signal.SIGKILL)
        process.communicate(timeout=120)
    assert process.returncode == 1
    assert "a client process ended with -9" in kept(tmp_path)["error"]


def test_a_manylora_server_that_dies(tmp_path: Path) -> None:
    with Server("--device-pool", "16MiB", "--adapter", f"adapter-0={ADAPTER}") as server:
        server.wait_ready()
        with bench(tmp_path, server.url) as process:
            wait_for_progress(process)
            os.kill(server.engine_pid, signal.SIGKILL)
            process.communicate(timeout=120)
    assert process.returncode == 1
    report = kept(tmp_path)
    assert report["error"] is not None
    assert report["summary"]["requests"] < 6000
