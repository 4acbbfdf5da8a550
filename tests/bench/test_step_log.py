"""The log of an executor on loan, on the shipped demo model: what every step was; the executor stays open."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from manylora_lab.bench.profile import projections_of
from manylora_lab.bench.step_log import StepLogger
from manylora_lab.bench.targets import EngineTarget, TargetRequest

from manylora.config.policy import PolicyConfig
from manylora.engine.driver import Driver
from manylora.executor.build import build_worker
from manylora.executor.worker import Worker
from manylora.flags import build_settings
from manylora.models.config import read_model_config
from manylora.types import EngineInfo
from manylora.warmup import write_random_adapters
from tests.e2e.process import MODEL

PROMPT = tuple(range(3, 43))
Built = tuple[Worker, PolicyConfig, EngineInfo]


@pytest.fixture(scope="module")
def built() -> Iterator[Built]:
    settings = build_settings(
        {
            "model": MODEL, "device": "cpu", "max_num_seqs": 4, "max_batch_tokens": 64, "max_model_len": 128,
            "device_pool": "4MiB", "host_pool": "4MiB",
        }
    )[0]  # fmt: skip
    worker, policy, info = build_worker(settings)
    yield worker, policy, info
    worker.close()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    config = read_model_config(Path(MODEL))
    (path,) = write_random_adapters(folder, config, "float32", [8], 1, projections_of(config, "attention"))
    return path


def served(built: Built, adapter: Path, calls: list[list[TargetRequest]]) -> tuple[StepLogger, int]:
    """Each list of calls at once, one list after another; the adapter's bytes too."""
    worker, policy, info = built
    lent = StepLogger(worker, policy.page_bytes)

    async def scenario() -> int:
        driver = Driver(policy, lent, info)
        card = driver.add_adapter("a", str(adapter), verify=False)
        target = EngineTarget(driver)
        try:
            for together in calls:
                for answer in await asyncio.gather(*(target.generate(call) for call in together)):
                    assert answer.error is None
        finally:
            await target.close()
        return card.num_pages * policy.page_bytes

    return lent, asyncio.run(scenario())


def test_a_step_is_noted_as_what_it_was(built: Built, adapter: Path) -> None:
    lent, adapter_bytes = served(
        built, adapter, [[TargetRequest(PROMPT, 4, None)], [TargetRequest(PROMPT[::-1], 3, "a")]]
    )
    log = lent.log()
    first, second = log.steps[:4], log.steps[4:]
    assert (len(second), lent.num_steps) == (3, 7)
    assert [step.work.num_prefill_tokens for step in log.steps] == [40, 0, 0, 0, 40, 0, 0]
    assert [step.work.num_decodes for step in log.steps] == [0, 1, 1, 1, 0, 1, 1]
    assert [step.work.num_kv_tokens for step in log.steps] == [40, 41, 42, 43, 40, 41, 42]
    assert [step.num_new for step in log.steps] == [1, 0, 0, 0, 1, 0, 0]
    assert {step.work.adapter_bytes for step in first} == {0}
    assert {(step.work.adapter_bytes, step.work.num_adapters) for step in second} == {(adapter_bytes, 1)}
    assert [step.work.adapter_token_bytes // adapter_bytes for step in second] == [40, 1, 1]
    # A new sequence may have come after any wait; a row that went on did not wait for anybody.
    assert [step.gap_s is None for step in log.steps] == [True, False, False, False, True, False, False]
    assert all(step.took_s > 0 and step.cpu_s > 0 for step in log.steps)
    ends_s = [step.began_s + step.took_s for step in log.steps]
    assert all(end_s <= step.began_s + 1e-9 for end_s, step in zip(ends_s, log.steps[1:]))
    assert [(read.to_device, read.num_bytes) for read in log.reads] == [(False, adapter_bytes)]
    assert all(0 < read.took_s <= read.waited_s for read in log.reads)
    assert sum(copy.num_bytes for copy in log.copies if copy.to_device) == adapter_bytes


def test_rows_of_one_step_are_counted_together(built: Built, adapter: Path) -> None:
    calls = [
        TargetRequest(PROMPT[:10], 12, "a"),
        TargetRequest(PROMPT[10:20], 12, "a"),
        TargetRequest(PROMPT[20:30], 12, None),
    ]
    lent, adapter_bytes = served(built, adapter, [[TargetRequest(PROMPT, 1, "a")], calls])
    full = [step for step in lent.log().steps if step.num_rows == 3 and not step.work.num_prefill_tokens]
    assert full
    for step in full:
        assert (step.work.num_decodes, step.work.num_adapters) == (3, 1)
        assert step.work.adapter_bytes == adapter_bytes
        assert step.work.adapter_token_bytes == 2 * adapter_bytes


def test_the_executor_is_as_before_for_the_next_driver(built: Built, adapter: Path) -> None:
    call = [[TargetRequest(PROMPT, 4, "a")]]
    works = [[step.work for step in served(built, adapter, call)[0].log().steps] for _ in range(2)]
    assert works[0] == works[1]
    assert len(served(built, adapter, call)[0].log().reads) == 1
