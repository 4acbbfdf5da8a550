"""The policy knows nothing of ranks: two ranks are commanded what one is."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from manylora import LLM, SamplingParams
from manylora.config.sections import EngineSettings
from manylora.engine.journal import read_answered
from manylora.executor.ranks.executor import RankedExecutor
from manylora.executor.worker import Worker
from manylora.kernels.shapes import AdapterGeometry, RankPlace
from manylora.models.share import ModelShare
from manylora.protocol.commands import Ask, DeviceCommand, ReadAdapter, RunStep, SwapPages, ask_of
from manylora.protocol.events import AdapterRead, CopyDone, StepDone
from manylora.protocol.executor import DeviceEvent, StepResult
from tests.e2e.process import MODEL

FOLDER = Path(MODEL).parent / "adapters"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
COMMANDS = (RunStep, SwapPages, ReadAdapter)
SMALL = {"device_pool": "7MiB", "host_pool": "9MiB", "max_batch_tokens": 16, "max_num_seqs": 4}
"""Not room for all adapters on the device, nor for all and the prompts on the host."""

Commands = list[DeviceCommand]


def commanded(
    policy: str, monkeypatch: pytest.MonkeyPatch, forced: Iterable[StepDone] | None = None, **settings: Any
) -> tuple[Commands, list[Any]]:
    """While requests come one at a time; and the tokens. ``forced``: of several ranks, what their steps are said
    to have drawn, one after another. Copies and reads are answered before anything else is commanded: how long
    they take decides which page is free first."""
    said: Commands = []
    landed: queue.SimpleQueue[Ask] = queue.SimpleQueue()
    with monkeypatch.context() as patch:
        if forced is not None:
            ended, result = iter(forced), RankedExecutor._result

            def drawn(self: Any, step: Any) -> StepResult:
                found = result(self, step)
                return StepResult(dataclasses.replace(found.done, tokens=next(ended).tokens), found.logprobs)

            patch.setattr(RankedExecutor, "_result", drawn)
        for executor in (Worker, RankedExecutor):
            obey: Any = executor.obey
            connect: Any = executor.connect

            def noted(self: Any, command: DeviceCommand, obey: Any = obey) -> None:
                if isinstance(command, COMMANDS):
                    said.append(command)
                obey(self, command)
                if isinstance(command, SwapPages | ReadAdapter):
                    assert landed.get(timeout=60) == ask_of(command)

            def connected(self: Any, tell: Callable[[DeviceEvent], None], connect: Any = connect) -> None:
                def told(event: DeviceEvent) -> None:
                    tell(event)
                    if isinstance(event, CopyDone | AdapterRead):
                        landed.put(ask_of(event))

                connect(self, told)

            patch.setattr(executor, "obey", noted)
            patch.setattr(executor, "connect", connected)
        adapters = {name: str(FOLDER / name) for name in NAMES}
        fixed: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cache_policy": policy, **SMALL}
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, seed=1)
        tokens = []
        with LLM(MODEL, adapters, **fixed, **settings) as llm:
            for turn in range(2):
                for i, name in enumerate((*NAMES, None)):
                    prompt = [1 + (7 * i + 3 * k) % 500 for k in range(20 + 9 * (i % 4) + 30 * turn)]
                    (output,) = llm.generate([prompt], params, name)
                    tokens.append(output.outputs[0].token_ids)
    return said, tokens


@pytest.mark.parametrize("policy", ["lru", pytest.param("s-lora", marks=pytest.mark.long)])
def test_sharded_adapters(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are forced from one rank's journal, so that a draw of equals could not make them differ."""
    one, expected = commanded(policy, monkeypatch, journal=str(tmp_path / "journal"))
    _, entries = read_answered(tmp_path / "journal")
    steps = [event for _, event, _ in entries if isinstance(event, StepDone)]
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "lora_sharding": "sharded"}
    two, tokens = commanded(policy, monkeypatch, steps, **ranks)
    assert tokens == expected
    assert two == one
    assert any(isinstance(command, SwapPages) for command in one) or policy == "s-lora"
    assert sum(isinstance(command, ReadAdapter) for command in one) > len(NAMES)


@pytest.mark.parametrize("policy", ["lru"])
def test_replicated_adapters_differ_by_their_pages_alone(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank whose adapters are told to take as many."""
    geometry = ModelShare.geometry

    def with_counts(share: ModelShare, *lies: int) -> AdapterGeometry:
        wide = geometry(ModelShare(share.whole, RankPlace(0, 2), is_sharded=False), *lies)
        return dataclasses.replace(geometry(share, *lies), widest=wide)

    plain, _ = commanded(policy, monkeypatch)
    two, tokens = commanded(policy, monkeypatch, tensor_parallel_size=2, lora_sharding="replicated")
    monkeypatch.setattr(ModelShare, "geometry", with_counts)
    monkeypatch.setattr(EngineSettings, "head_fixed_by", "ranks")  # whose tables have no place for the head
    one, expected = commanded(policy, monkeypatch)
    assert tokens == expected
    assert two == one
    assert two != plain
