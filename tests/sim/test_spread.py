"""What varies about a device's means is drawn anew each time, alike in every run; copies slow steps down."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
from manylora_lab.pricing.costs import DeviceCosts, Spread
from manylora_lab.sim.device import SimulatedDevice

from manylora.config.declaring import ConfigError
from manylora.protocol.commands import Command, ReadAdapter, RunStep, SequenceStart, StepRow, SwapPages
from manylora.types import BASE, SamplingParams

PAGE_BYTES = 1000
COSTS = DeviceCosts(
    1.0, 0.0, 0.0, 0.0, copy_bytes_s=1e4, copy_base_s=0.0, read_bytes_s=1e3, read_base_s=0.0, reads_at_once=1
)


def device_of(copy_drag: float = 0.0, **values: tuple[float, ...]) -> SimulatedDevice:
    costs = dataclasses.replace(COSTS, copy_drag=copy_drag, spread=Spread(**values))
    return SimulatedDevice(costs, PAGE_BYTES, {7: 2})


def step(number: int, num_tokens: int = 1) -> RunStep:
    start = SequenceStart(1, 0, BASE, (1, 2, 3), 3, 2, (), SamplingParams(max_tokens=1, seed=0), ())
    return RunStep(number, (start,), (StepRow(1, 0, num_tokens, 1),))


def copy(number: int, to_device: bool, num_pages: int) -> SwapPages:
    return SwapPages(number, to_device, tuple((page, page) for page in range(num_pages)))


def ended(device: SimulatedDevice, command: Command, now: float) -> float:
    answer = device.obey(command, now)
    assert answer is not None
    return answer[0]


def test_each_step_draws_its_own_factor_and_every_run_the_same() -> None:
    def lengths(num_tokens: int) -> list[float]:
        device, now, found = device_of(decodes=(0.5, 1.5), prefills=(0.9, 1.0, 1.1)), 0.0, []
        for number in range(300):
            end = ended(device, step(number, num_tokens), now)
            found.append(round(end - now, 6))
            now = end
        return found

    decodes, prefills = lengths(1), lengths(2)
    assert set(decodes) == {0.5, 1.5}
    assert set(prefills) == {0.9, 1.0, 1.1}
    assert statistics.fmean(decodes) == pytest.approx(1.0, abs=0.1)
    assert decodes == lengths(1)


def test_reads_vary_and_queue() -> None:
    device = device_of(reads=(0.5, 1.5))
    ends = [ended(device, ReadAdapter(7, (1, 2), "host"), 0.0) for _ in range(50)]
    assert {round(end - begin, 6) for begin, end in zip([0.0, *ends], ends)} == {1.0, 3.0}


def test_the_engine_is_told_of_copies_later_and_in_order() -> None:
    device = device_of(landings=(0.0, 5.0))
    told = [ended(device, copy(number, True, 1), 0.0) for number in range(50)]
    assert told == sorted(told)
    assert min(told) >= 0.1
    lane_ends = [0.1 * (number + 1) for number in range(50)]
    assert any(at == pytest.approx(end + 5.0) for at, end in zip(told, lane_ends))
    assert all(at <= end + 5.0 + 1e-9 for at, end in zip(told, lane_ends)), "the lane itself was not held up"


def test_copies_slow_the_steps_beside_them_and_no_others() -> None:
    device = device_of(copy_drag=0.5)
    assert ended(device, step(1), 0.0) == pytest.approx(1.0), "no copy"
    assert ended(device, copy(1, True, 4), 1.0) == pytest.approx(1.4), "copies do not wait for steps"
    assert ended(device, step(2), 1.0) == pytest.approx(1.0 + 1.0 + 0.5 * 0.4), "one beside all of the copy"
    assert ended(device, copy(2, False, 20), 2.2) == pytest.approx(4.2)
    assert ended(device, copy(3, True, 3), 2.2) == pytest.approx(2.5)
    end = ended(device, step(3), 2.2)
    assert end == pytest.approx(2.2 + 1.0 + 0.5 * (1.0 + 0.3)), "two copies"
    left = 4.2 - end
    assert ended(device, step(4), end) == pytest.approx(end + 1.0 + 0.5 * left), (
        "what is left of the longer one"
    )
    assert ended(device, step(5), 10.0) == pytest.approx(11.0), "long after"


def test_a_spread_has_no_negative_times() -> None:
    with pytest.raises(ConfigError, match="each of landings must be a number from 0"):
        Spread(landings=(0.1, -0.1))
    with pytest.raises(ConfigError, match="each of decodes must be a number from 0"):
        Spread(decodes=(float("nan"),))
    with pytest.raises(ConfigError, match="copy_drag must be a number from 0"):
        DeviceCosts(copy_drag=-1.0)
