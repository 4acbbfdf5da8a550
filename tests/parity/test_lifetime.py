"""Engines in one process: several at once and one after another; what is over leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from manylora import LLM, AsyncLLM
from manylora.config.declaring import ConfigError
from manylora.engine.client import EngineDead
from manylora.executor.worker import Worker
from manylora.protocol.commands import DeviceCommand, RunStep
from tests.e2e.process import children_of
from tests.parity.conftest import make_bench
from tests.parity.engines import Bench, greedy, random_tokens

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks into Linux's /proc")

POOL_BYTES = 256 * 2**20
NUM_TOKENS = 8


def thread_names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


def num_native_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def address_space_bytes() -> int:
    """Pages of a pool that were never written count here, and not in the resident size."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


def soon(condition: Callable[[], bool]) -> bool:
    """Threads that were told to end need a moment to be gone."""
    ends = time.monotonic() + 60
    while not condition() and time.monotonic() < ends:
        time.sleep(0.01)
    return condition()


def open_llm(bench: Bench, pool_bytes: int = POOL_BYTES) -> LLM:
    adapters = {name: str(path) for name, path in bench.checkpoint.adapters.items()}
    return LLM(str(bench.checkpoint.folder), adapters, device="cpu", device_pool=pool_bytes)


def use(llm: LLM, bench: Bench) -> None:
    prompt = random_tokens(1, 9, bench.checkpoint.vocab_size)
    bench.check(llm.generate([prompt, prompt], greedy(NUM_TOKENS), [None, "everything"]), NUM_TOKENS)


def close(llm: LLM) -> None:
    llm.close()
    llm.close()
    with pytest.raises(EngineDead):
        llm.generate([[1]], greedy(1))


def drop(llm: LLM) -> None:
    """Nothing: the caller forgets its LLM without closing it."""


@pytest.mark.parametrize("end", [close, drop])
@pytest.mark.parametrize("is_used", [True, False])
def test_nothing_is_left(bench: Bench, end: Callable[[LLM], None], is_used: bool) -> None:
    with open_llm(bench) as llm:  # torch and the reference start their own threads at first use
        use(llm, bench)
    del llm
    gc.collect()
    children = children_of(os.getpid())  # of other tests: a server that a session shares
    names, natives = thread_names(), num_native_threads()
    for _ in range(3):
        llm = open_llm(bench)
        if is_used:
            use(llm, bench)
        assert set(children_of(os.getpid())) <= set(children)
        while_open = address_space_bytes()
        gone = weakref.ref(llm)
        end(llm)
        del llm
        gc.collect()
        assert gone() is None
        assert soon(lambda: thread_names() == names), thread_names()
        assert soon(lambda: num_native_threads() <= natives)
        assert soon(lambda: address_space_bytes() < while_open - POOL_BYTES // 2)  # noqa: B023


def test_closing_waits_for_the_threads_that_adapters_were_added_on(bench: Bench) -> None:
    names = thread_names()
    with LLM(str(bench.checkpoint.folder), device="cpu", device_pool="4MiB") as llm:
        for name in ("everything", "rslora"):
            llm.add_adapter(name, str(bench.checkpoint.adapters[name]))
    assert thread_names() == names


def test_nothing_is_left_of_one_that_could_not_start(bench: Bench, tmp_path: Path) -> None:
    gc.collect()
    names, before = thread_names(), address_space_bytes()
    for _ in range(4):
        with pytest.raises(ConfigError):
            LLM(str(bench.checkpoint.folder), {"bad": str(tmp_path)}, device="cpu", device_pool=POOL_BYTES)
    gc.collect()
    assert soon(lambda: thread_names() == names), thread_names()
    assert soon(lambda: address_space_bytes() < before + POOL_BYTES)


def test_an_adapter_is_not_named_with_an_equals_sign(tmp_path: Path) -> None:
    """Settings write NAME=PATH: the name would end there, and the path begin."""
    with pytest.raises(ConfigError, match="name must hold no '=', got 'a=b'"):
        LLM("no-model", {"good": str(tmp_path), "a=b": str(tmp_path)})


def test_an_async_engine_that_is_dropped(bench: Bench) -> None:
    names = thread_names()

    async def run() -> weakref.ref[AsyncLLM]:
        llm = AsyncLLM(str(bench.checkpoint.folder), device="cpu", device_pool=POOL_BYTES)
        bench.check(await llm.generate([[1, 2, 3]], greedy(NUM_TOKENS)), NUM_TOKENS)
        return weakref.ref(llm)

    gone = asyncio.run(run())
    gc.collect()
    assert gone() is None
    assert soon(lambda: thread_names() == names), thread_names()


def test_an_async_engine_in_one_event_loop_after_another(bench: Bench) -> None:
    llm = AsyncLLM(str(bench.checkpoint.folder), device="cpu", device_pool="4MiB")

    async def run() -> None:
        generation = asyncio.ensure_future(llm.generate([[1, 2, 3]], greedy(NUM_TOKENS))._all())
        bench.check(await asyncio.wait_for(generation, 60), NUM_TOKENS)

    for _ in range(2):
        asyncio.run(run())
    other = asyncio.new_event_loop()
    other.run_until_complete(run())
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(run())
    other.run_until_complete(llm.close())
    other.run_until_complete(other.shutdown_default_executor())
    other.close()


def test_two_models_at_once(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each used by its own thread, over and over; one ends earlier."""
    other = make_bench(tmp_path_factory, "opt")
    failures: list[BaseException] = []

    def work(one: Bench, llm: LLM, rounds: int) -> None:
        try:
            for _ in range(rounds):
                use(llm, one)
            llm.close()
        except BaseException as error:
            failures.append(error)

    engines = [(bench, open_llm(bench), 6), (other, open_llm(other), 2), (bench, open_llm(bench), 4)]
    threads = [threading.Thread(target=work, args=engine) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_closing_while_another_thread_waits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    obey = Worker.obey

    def slow(worker: Worker, command: DeviceCommand) -> None:
        if isinstance(command, RunStep):
            time.sleep(0.1)  # so that the call below takes far longer than closing
        obey(worker, command)

    monkeypatch.setattr(Worker, "obey", slow)
    llm = open_llm(bench)
    ended: list[BaseException] = []

    def call() -> None:
        try:
            llm.generate([[1, 2, 3]] * 8, greedy(150))
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert soon(lambda: llm.stats().num_running > 0)
    llm.close()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert [type(error) for error in ended] == [EngineDead]
