"""Servers and programs whose engine has several ranks: what they say of themselves, and what becomes of them in
trouble."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from manylora import LLM, SamplingParams
from manylora.engine.client import EngineDead, EngineStats
from manylora.text.generate import GenerationFailed
from tests.e2e.process import (
    MODEL,
    REPOSITORY,
    TIMEOUT_S,
    Json,
    Server,
    assert_error,
    children_of,
    completion,
    environment,
    events,
    get,
    is_running,
    shared_files,
    wait_until,
)

GERMAN = str(Path(MODEL).parent / "adapters" / "german")
LONG = {"max_tokens": 900, "ignore_eos": True, "n": 8}
"""Runs for seconds."""
RANKS = ("--device", "cpu", "--dtype", "float32", "--device-pool", "32MiB", "--tensor-parallel-size", "2")
TICKS_A_S = os.sysconf("SC_CLK_TCK")
NO_MULTICAST = {"NCCL_NVLS_ENABLE=0", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1", "NVSHMEM_DISABLE_NVLS=1"}


def ranks_of(pid: int) -> list[int]:
    """The ranks that this process has started."""
    ranks = []
    for child in children_of(pid):
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        if b"manylora.executor.ranks.process" in words:
            ranks.append(child)
    return ranks


def ticks_of(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def error_of(event: Json | str) -> Json:
    assert isinstance(event, dict), event
    error: Json = event["error"]
    return error


def test_a_server_of_two_ranks(tmp_path: Path) -> None:
    args = ("--lora-sharding", "sharded", "--adapter", f"german={GERMAN}")
    with Server(*RANKS, *args, env={"TMPDIR": str(tmp_path)}) as server:
        server.wait_ready()
        ranks = ranks_of(server.engine_pid)
        assert len(ranks) == 2
        shared = shared_files([server.process.pid, server.engine_pid, *ranks])
        for rank in ranks:
            variables = Path(f"/proc/{rank}/environ").read_bytes().decode().split("\0")
            assert set(variables) >= NO_MULTICAST
        server.text(model="german", max_tokens=8)
        found: dict[str, float] = {}

        def have_told() -> bool:
            """Ranks do so some times a second."""
            found.update(server.metrics())
            counts = [
                tuple(
                    found[f'manylora:collectives_total{{kind="{kind}",rank="{number}"}}'] for number in "01"
                )
                for kind in ("base", "lora", "sampling")
            ]
            base, lora, steps = counts
            # One for each of four groups, in each of four layers, in each step that has the adapter.
            return min(base) > 0 and min(steps) > 0 and lora == tuple(16 * each for each in steps)

        wait_until(have_told, "what ranks have exchanged")
        for number in ("0", "1"):
            assert found[f'manylora:collective_bytes_total{{kind="lora",rank="{number}"}}'] > 0
            assert found[f'manylora:rank_pool_bytes{{rank="{number}",tier="device"}}'] == 2**24
            assert 0 < found[f'manylora:rank_adapter_bytes{{rank="{number}",tier="device"}}'] < 2**24
        one = found['manylora:rank_weight_bytes{rank="0"}']
        assert one == found['manylora:rank_weight_bytes{rank="1"}']

        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        server.assert_all_gone()
        wait_until(lambda: not any(map(is_running, ranks)), "ranks gone")
        assert "Traceback" not in server.log
    assert not [path for path in shared if path.exists()]
    assert not list(tmp_path.glob("*manylora*"))


@pytest.mark.long
def test_an_idle_server_takes_next_to_no_time() -> None:
    """All ranks and the engine together less than 2 % of one processor, in ten seconds."""
    with Server(*RANKS, "--adapter", f"german={GERMAN}") as server:
        server.wait_ready()
        server.text(model="german", max_tokens=8)
        server.wait_quiet()
        processes = ranks_of(server.engine_pid)
        began_s, began = time.monotonic(), sum(map(ticks_of, processes))
        time.sleep(10)
        spent = sum(map(ticks_of, processes)) - began
        assert spent / TICKS_A_S < 0.02 * (time.monotonic() - began_s)


def dies_with_a_rank(*args: str, **env: str) -> None:
    """A server whose rank is killed beside a stream: every request ends with an error, then the server."""
    with Server(*args, env=env) as server:
        server.wait_ready()
        ranks = ranks_of(server.engine_pid)
        with server.http.stream("POST", "/v1/completions", json=completion(stream=True, **LONG)) as stream:
            chunks = events(stream)
            next(chunks)
            os.kill(ranks[1], signal.SIGKILL)
            *_, error, last = chunks
        assert last == "[DONE]"
        assert error_of(error)["code"] == 503
        try:
            assert get(f"{server.url}/health").status_code == 503
            assert_error(server.complete(), 503)
        except httpx.TransportError:
            pass  # it has ended by now
        assert server.wait_exit() == 1
        server.assert_all_gone()
        wait_until(lambda: not any(map(is_running, ranks)), "ranks gone")
        assert "rank 1 has died" in server.log


def test_a_rank_that_is_killed_ends_the_server() -> None:
    dies_with_a_rank(*RANKS)


@pytest.mark.parametrize("process", ["engine", pytest.param("server", marks=pytest.mark.long)])
def test_ranks_end_with_what_started_them(process: str) -> None:
    with Server(*RANKS) as server:
        server.wait_ready()
        ranks = ranks_of(server.engine_pid)
        with server.http.stream("POST", "/v1/completions", json=completion(stream=True, **LONG)) as stream:
            next(events(stream))
            os.kill(server.engine_pid if process == "engine" else server.process.pid, signal.SIGKILL)
            wait_until(lambda: not any(map(is_running, ranks)), "ranks gone")
        assert server.wait_exit() == (1 if process == "engine" else -signal.SIGKILL)
        server.assert_all_gone()


PLAIN = f"""
import os, signal, threading
from manylora import LLM, SamplingParams
from manylora.engine.client import EngineDead, EngineStats
from tests.e2e.process import wait_until
from tests.e2e.test_ranks import events_of_this_process, ranks_of

settings = dict(device="cpu", dtype="float32", device_pool="32MiB", tensor_parallel_size=2)
greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
llms, answers = [], []

def ask(llm):
    answers.append(llm.generate("Guten", greedy, adapter="german")[0].outputs[0].token_ids)

def make():
    llms.append(LLM({MODEL!r}, {{"german": {GERMAN!r}}}, **settings))
    ask(llms[-1])

events = events_of_this_process()
threads = [threading.Thread(target=make) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(ranks_of(os.getpid())) == 4
os.kill(ranks_of(os.getpid())[1], signal.SIGKILL)
alive = []
for llm in llms:
    try:
        for _ in range(20): llm.generate("Guten", greedy)
        alive.append(llm)
    except EngineDead as error:
        print("dead:", error)
assert len(alive) == 1
wait_until(lambda: len(ranks_of(os.getpid())) == 2, "the end of the dead engine's other rank")
for llm in llms: llm.close()
assert ranks_of(os.getpid()) == []
assert events_of_this_process() == events
make()
assert len(answers) == 3 and answers[0] == answers[1] == answers[2] and len(answers[0]) == 8
print("ranks", *ranks_of(os.getpid()))  # of one that is never closed
"""


def test_a_plain_program(tmp_path: Path) -> None:
    """Without a guard: two engines made at the same time by threads, of which one loses a rank; another after
    them, which is never closed."""
    program = tmp_path / "program.py"
    program.write_text(PLAIN)
    path = f"{environment()['PYTHONPATH']}:{REPOSITORY}"
    ended = subprocess.run(
        [sys.executable, str(program)],
        env=environment(PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stderr
    dead, ranks = ended.stdout.splitlines()
    assert "rank" in dead
    assert "has died" in dead
    assert len(ranks.split()) == 3
    wait_until(lambda: not any(is_running(int(rank)) for rank in ranks.split()[1:]), "ranks gone")


HANGS = """
def inject(rank):
    peers, since = rank._peers, []
    exchange = type(peers).add_up
    class Hanging(type(peers)):
        def add_up(self, tensor, purpose):
            since.append(1)
            while len(since) > 60: pass
            exchange(self, tensor, purpose)
    peers.__class__ = Hanging
"""
UNLIKE = """
def inject(rank):
    peers = rank._peers
    class Unlike(type(peers)):
        def note(self, tensor, purpose):
            super().note(tensor, purpose)
            self.digest ^= self.num_exchanges > 60
    peers.__class__ = Unlike
"""
FAILS = """
def inject(rank):
    peers = rank._peers
    class Failing(type(peers)):
        def add_up(self, tensor, purpose):
            if self.num_exchanges > 60: raise MemoryError("no room")
            super().add_up(tensor, purpose)
    peers.__class__ = Failing
"""
FAILS_TO_COPY = """
def inject(rank):
    from manylora.memory.gates import CopyGate
    copier, number_of = rank._worker._copier, {}
    start, transfer, whole = copier.start, copier._transfer, CopyGate.pass_whole
    def started(command, landed, done, gate=None):
        if gate is not None:
            number_of[command.copy] = gate.turn = len(number_of) + 1
        start(command, landed, done, gate)
    def transferred(lane, command):
        if number_of.get(command.copy) in (1, 3, 5):
            raise RuntimeError("the bus of one rank")
        return transfer(lane, command)
    def passed(gate, until):
        return whole(gate, until) and gate.turn != 7
    copier.start, copier._transfer, CopyGate.pass_whole = started, transferred, passed
"""
"""Of the copies with gates the first, third and fifth fail; the seventh counts as late."""
FAILS_TO_READ = """
def inject(rank):
    from manylora.protocol.events import AdapterRead
    reader = rank._worker._reader
    start, failed = reader.start, []
    def started(spec, command, tell, *following):
        if failed:
            return start(spec, command, tell, *following)
        failed.append(command)
        tell(AdapterRead(command.adapter, False, "a disk of one rank"))
    reader.start = started
"""


@pytest.fixture
def injecting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the second rank of every engine do something before it obeys."""

    def inject(code: str) -> None:
        (tmp_path / "injected.py").write_text(code)
        (tmp_path / "sitecustomize.py").write_text(HOOK)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return inject


HOOK = """
import sys
if "manylora.executor.ranks.process" in sys.orig_argv:
    import manylora.executor.worker as worker
    connect = worker.Worker.connect
    def connected(self, tell):
        connect(self, tell)
        rank = tell.__self__
        if rank._number == 1:
            import injected
            injected.inject(rank)
    worker.Worker.connect = connected
"""


def asked(trouble: Callable[[int], None] | None = None, **settings: Any) -> list[str]:
    """What an engine in this process says as it dies. ``trouble`` is told of the second rank before that works."""
    fixed: dict[str, Any] = {"device": "cpu", "dtype": "float32", "device_pool": "32MiB"}
    with LLM(MODEL, tensor_parallel_size=2, **fixed | settings) as llm:
        if trouble is not None:
            trouble(ranks_of(os.getpid())[1])
        with pytest.raises(EngineDead) as dead:
            llm.generate("Once upon a time", SamplingParams(max_tokens=900, ignore_eos=True))
    wait_until(lambda: not ranks_of(os.getpid()), "ranks gone")
    return str(dead.value).splitlines()


@pytest.mark.timeout(120)
def test_a_rank_that_is_stopped() -> None:
    (line,) = asked(lambda rank: os.kill(rank, signal.SIGSTOP))
    assert "rank 1 has been stopped" in line


STOPS = """
import os, signal, sys
if "manylora.executor.ranks.process" in sys.orig_argv:
    import manylora.executor.worker as worker
    worker.Worker.__init__ = lambda *args, **settings: os.kill(os.getpid(), signal.SIGSTOP)
"""


def events_of_this_process() -> int:
    """Descriptors by which one process wakes another."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing
            found += "eventfd" in os.readlink(f"/proc/self/fd/{name}")
    return found


@pytest.mark.timeout(120)
def test_ranks_that_are_stopped_while_they_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(STOPS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = events_of_this_process()
    with pytest.raises(RuntimeError, match=r"^rank 0 has been stopped$"):
        LLM(MODEL, device="cpu", device_pool="32MiB", tensor_parallel_size=2)
    assert not ranks_of(os.getpid())
    assert events_of_this_process() == before


@pytest.mark.timeout(120)
def test_a_rank_that_hangs(injecting: Callable[[str], None]) -> None:
    injecting(HANGS)
    (line,) = asked(step_timeout=1.0)
    assert "1 s" in line


def test_ranks_that_disagree(injecting: Callable[[str], None]) -> None:
    injecting(UNLIKE)
    (line,) = asked()
    assert "the ranks disagree about step" in line


def test_a_step_that_fails_on_one_rank(injecting: Callable[[str], None]) -> None:
    injecting(FAILS)
    (line,) = asked()
    assert "failed on rank 1 after exchanges had begun: MemoryError: no room" in line


@pytest.mark.parametrize("host_pool", ["0", pytest.param("32MiB", marks=pytest.mark.long)])
def test_a_read_that_fails_on_one_rank_is_undone_on_all(
    injecting: Callable[[str], None], host_pool: str
) -> None:
    """Its request fails and no other; the adapter is read again for the next."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    fixed: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "device_pool": "32MiB",
        "host_pool": host_pool,
    }
    adapters = {"german": GERMAN}
    with LLM(MODEL, adapters, **fixed) as llm:
        wanted = llm.generate("Guten", params, adapter="german")[0].outputs[0].token_ids
    injecting(FAILS_TO_READ)
    with LLM(MODEL, adapters, tensor_parallel_size=2, **fixed) as llm:
        with pytest.raises(GenerationFailed, match="a disk of one rank"):
            llm.generate("Guten", params, adapter="german")
        assert len(llm.generate("Guten", params)[0].outputs[0].token_ids) == 8
        (output,) = llm.generate("Guten", params, adapter="german")
        assert output.outputs[0].token_ids == wanted


@pytest.mark.parametrize("sharding", ["sharded", pytest.param("replicated", marks=pytest.mark.long)])
def test_a_copy_that_fails_on_one_rank_invalidates_its_rows_on_all(
    injecting: Callable[[str], None], sharding: str
) -> None:
    """Steps await copies that do not come on one rank, or late: the request begins again."""
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    names = sorted(path.name for path in Path(GERMAN).parent.iterdir() if path.is_dir())[:4]
    adapters = {name: str(Path(GERMAN).parent / name) for name in names}
    fixed: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "device_pool": "32MiB",
        "host_pool": "32MiB",
    }

    def answers(**settings: Any) -> tuple[list[list[int]], EngineStats]:
        with LLM(MODEL, adapters, **fixed, **settings) as llm:
            found = []
            for name in names * 2:  # one at a time: each begins at once, whatever copies take
                (output,) = llm.generate("Guten", params, name)
                found.append(output.outputs[0].token_ids)
            return found, llm.stats()

    wanted, _ = answers()
    injecting(FAILS_TO_COPY)
    cold = {"cold_start": "layerwise", "cold_start_stall": 1.0}
    found, stats = answers(tensor_parallel_size=2, lora_sharding=sharding, **cold)
    assert found == wanted
    assert (stats.spoilt_rows, stats.swaps_failed) == (4, 3)
