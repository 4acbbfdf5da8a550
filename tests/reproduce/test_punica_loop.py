"""The closed loop: who may join, and the same steps in virtual time and on the real engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from manylora_lab.bench.closed_loop import (
    BatchGate,
    ClosedLoop,
    LoopGate,
    LoopRequest,
    StaticGate,
    dummy_loop,
)
from manylora_lab.bench.dummies import DEMO
from manylora_lab.pricing.costs import DeviceCosts
from manylora_lab.reproduce.punica_fig11 import static
from manylora_lab.reproduce.punica_loop import SimulatedLoop
from manylora_lab.reproduce.punica_workload import TextRequest, text_requests

from manylora.config.declaring import ConfigError
from manylora.config.policy import PolicyConfig
from manylora.protocol.commands import Command, RunStep
from manylora.types import BASE, AdapterId, SequenceId

CONFIG = PolicyConfig(
    num_pages=2000, page_tokens=16, max_model_len=512, max_num_seqs=32, max_batch_tokens=600,
    num_host_pages=2000, page_bytes=2**20,
)  # fmt: skip


def test_anybody_joins_a_mixed_batch_up_to_its_size() -> None:
    gate = BatchGate([7, 8, 9], at_once=2, is_mixed=True)
    assert [gate.join(), gate.join(), gate.join()] == [(0,), (1,), ()]
    gate.leave(1)
    assert [gate.join(), gate.join()] == [(2,), ()]
    assert not gate.is_done
    gate.leave(0)
    gate.leave(2)
    assert gate.is_done


def test_one_model_a_batch_first_come_first_served() -> None:
    gate = BatchGate([7, 7, 8, 7], at_once=4, is_mixed=False)
    assert [gate.join(), gate.join(), gate.join()] == [(0,), (1,), ()]
    gate.leave(0)
    assert not gate.join(), "the fourth does not pass the third"
    gate.leave(1)
    assert [gate.join(), gate.join()] == [(2,), ()]
    gate.leave(2)
    assert gate.join() == (3,)


def test_nothing_joins_a_static_batch() -> None:
    gate = StaticGate([[0, 1], [2]])
    assert [gate.join(), gate.join()] == [[0, 1], ()]
    gate.leave(0)
    assert not gate.join()
    gate.leave(1)
    assert gate.join() == [2]
    assert not gate.is_done
    gate.leave(2)
    assert gate.is_done
    assert not gate.join()


def test_a_static_batch_computes_every_row_until_its_longest_ends() -> None:
    asked = [TextRequest(*each) for each in ((5, 8, 3), (5, 2, 7), (6, 4, 2))]
    gate, requests = static(asked, is_backbone=False)
    assert [request.output_tokens for request in requests] == [7, 7, 2]
    loop = Watched(requests, gate)
    steps = loop.run().num_steps
    assert steps == 9
    assert [len(running) for running, _ in loop.steps[-steps:]] == [2] * 7 + [1] * 2
    assert [request.output_tokens for request in static(asked, True, most_tokens=9)[1]] == [3, 7, 2], (
        "a context ends"
    )
    assert {request.adapter for request in static(asked, is_backbone=True)[1]} == {None}
    assert [len(gate.join()) for gate, _ in [static([TextRequest(1, 2, 2)] * 33, False)]] == [32]


class Watched(SimulatedLoop):
    """Notes every step's adapters, and those of the sequences that start in it."""

    def __init__(self, requests: list[LoopRequest], gate: LoopGate) -> None:
        self.steps: list[tuple[list[AdapterId], list[AdapterId]]] = []
        self._adapters: dict[SequenceId, AdapterId] = {}
        super().__init__(requests, gate, CONFIG, DeviceCosts(), adapter_pages=4)

    def _obey(self, command: Command) -> None:
        if isinstance(command, RunStep):
            self._adapters.update({start.sequence: start.adapter for start in command.starts})
            running = [self._adapters[row.sequence] for row in command.rows]
            self.steps.append((running, [start.adapter for start in command.starts]))
        super()._obey(command)


@pytest.mark.parametrize("is_mixed", [True, False])
def test_a_step_has_one_new_prompt_and_the_batch_its_adapters(is_mixed: bool) -> None:
    asked = text_requests("skewed", 60, seed=3, divisor=16)
    requests = [LoopRequest(one.model, one.prompt_tokens, one.output_tokens) for one in asked]
    loop = Watched(requests, BatchGate([one.model for one in asked], 8, is_mixed))
    result = loop.run()
    assert result.output_tokens == sum(one.output_tokens for one in asked)
    steps = loop.steps[-result.num_steps :]
    assert [adapter for _, started in steps for adapter in started] == [one.model + 1 for one in asked]
    assert max(len(started) for _, started in steps) == 1
    assert max(len(running) for running, _ in steps) <= 8
    most_adapters = max(len(set(running)) for running, _ in steps)
    assert most_adapters > 2 if is_mixed else most_adapters == 1


def test_a_backbone_run_has_no_adapters() -> None:
    requests = [LoopRequest(None, 8, 4)] * 3
    loop = Watched(requests, BatchGate([1, 2, 1], 8, False))
    result = loop.run()
    assert result.num_steps == 12
    assert {adapter for running, _ in loop.steps for adapter in running} == {BASE}


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        Watched([LoopRequest(None, 600, 4)], BatchGate([0], 8, True)).run()


@pytest.fixture(scope="module")
def engine() -> Iterator[ClosedLoop]:
    with dummy_loop(DEMO, "cpu", rank=4, num_adapters=2, at_once=8, max_tokens=64) as loop:
        loop.warm_up([LoopRequest(adapter, 1, 1) for adapter in (0, 1)])
        yield loop


@pytest.mark.parametrize("device", ["sim", "cpu"])
@pytest.mark.parametrize(
    ("models", "is_mixed", "num_steps"),
    [
        ((0,), True, 5),
        # The second is handed over while step 2 runs, joins step 3 and ends with step 7.
        ((0, 1), True, 7),
        ((0, 0), False, 7),
        # The second is handed over when the first has ended.
        ((0, 1), False, 10),
        ((0, 1, 1), False, 12),
    ],
)
def test_steps_by_hand(
    device: str, models: tuple[int, ...], is_mixed: bool, num_steps: int, engine: ClosedLoop
) -> None:
    requests = [LoopRequest(model, 8, 5) for model in models]
    gate = BatchGate(models, 8, is_mixed)
    result = Watched(requests, gate).run() if device == "sim" else engine.run(requests, gate)
    assert result.num_steps == num_steps
    assert (result.prompt_tokens, result.output_tokens) == (8 * len(models), 5 * len(models))
    assert result.duration_s > 0


def test_an_engine_that_refuses_is_an_error(engine: ClosedLoop) -> None:
    with pytest.raises(ConfigError, match="the engine failed"):
        engine.run([LoopRequest(99, 8, 5)], BatchGate([0], 8, True))
