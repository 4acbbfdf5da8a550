"""The copy of the base's weights: its place in the memory plan, and its way back beside copies of pages."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from manylora.config.declaring import ConfigError
from manylora.devices.device import CopyLane, Device
from manylora.executor.merging import DevicePristine, HostPristine, WeightRows, pristine_bytes
from manylora.kernels.ops import Weight
from manylora.kernels.shapes import PageShape
from manylora.memory.budget import host_pool_pages, pool_bytes, pristine_place
from manylora.memory.copier import Copier
from manylora.memory.pool import Arena, HostPool
from manylora.protocol.commands import SwapPages
from manylora.protocol.events import CopyDone
from tests.memory.test_arena import FakeDevice

GIB = 2**30


PAGE = PageShape(layers=2, page_tokens=16, kv_heads=2, head_dim=16, itemsize=4)


class NotingLane(CopyLane):
    """Waits for ``gate`` before each transfer; ``targets``: where they went."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.targets: list[int] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        self.targets.append(target.data_ptr())
        super().copy(target, source)


class NotingDevice(Device):
    """Its lanes in the order they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes: list[NotingLane] = []

    def copy_lane(self) -> CopyLane:
        self.lanes.append(NotingLane())
        return self.lanes[-1]


def small_copier(device: Device) -> Copier:
    return Copier(Arena(2, PAGE, torch.float32, device), HostPool(2, PAGE, torch.float32, device), device)


def copier_page(copier: Copier) -> int:
    """Where its first page begins."""
    return copier._arena.run(0, 1).data_ptr()


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = small_copier(Device())
    yield made
    made.close()


def weights_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Weight]:
    generator = torch.Generator().manual_seed(seed)
    return [Weight(torch.randn(shape, generator=generator).to(dtype)) for shape in ((6, 5), (4, 8), (10, 3))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_bytes", [7, 64, 10**6])
def test_rows_come_back_to_the_bit_and_others_stay(
    dtype: torch.dtype, chunk_bytes: int, copier: Copier
) -> None:
    weights = weights_of(dtype)
    loaded = [weight.data.clone() for weight in weights]
    pristine = HostPristine(weights, Device(), chunk_bytes)
    for weight in weights:
        weight.data.fill_(7.0)
    pristine.restore([WeightRows(0, 1, 3), WeightRows(2, 0, 10)], None, copier)
    assert torch.equal(weights[0].data[1:3], loaded[0][1:3])
    assert (weights[0].data[0] == 7).all()
    assert (weights[0].data[3:] == 7).all()
    assert (weights[1].data == 7).all()
    assert torch.equal(weights[2].data, loaded[2])
    assert [weight.version for weight in weights] == [1, 0, 1]
    pristine.close()
    pristine.close()
    with pytest.raises(RuntimeError):
        pristine.restore([WeightRows(0, 0, 1)], None, copier)


def test_a_copy_on_the_device_is_of_its_own_memory() -> None:
    weights = weights_of()
    loaded = [weight.data.clone() for weight in weights]
    pristine = DevicePristine(weights)
    for weight in weights:
        weight.data.zero_()
    assert all(torch.equal(pristine[number], data) for number, data in enumerate(loaded))
    assert pristine_bytes(weights) == 4 * (30 + 32 + 30)


def test_memory_that_the_system_refuses_to_pin_is_said_so() -> None:
    class Refusing(Device):
        def pin(self, memory: torch.Tensor) -> None:
            raise RuntimeError("CUDA error: out of memory\nand more")

    with pytest.raises(
        ConfigError, match=r"refuses to pin .* for a copy of the base's weights: CUDA error: out"
    ):
        HostPristine(weights_of(), Refusing())


def test_closing_breaks_a_restore_off() -> None:
    device = NotingDevice()
    copier = small_copier(device)
    lane = device.lanes[0]
    lane.gate.clear()
    pristine = HostPristine(weights_of(), Device(), 8)
    raised: queue.SimpleQueue[str] = queue.SimpleQueue()

    def restore() -> None:
        try:
            pristine.restore([WeightRows(0, 0, 6)], None, copier)
        except RuntimeError as error:
            raised.put(str(error))

    restoring = threading.Thread(target=restore)
    restoring.start()
    assert lane.entered.wait(30)
    closing = threading.Thread(target=pristine.close)
    closing.start()
    while not pristine._closing.is_set():
        time.sleep(0.001)
    lane.gate.set()
    restoring.join(30)
    closing.join(30)
    copier.close()
    assert raised.get(timeout=1) == "the engine is closing"


# ---------------------------------------------------------------- beside copies of pages


def test_a_restore_goes_on_in_turn_with_copies_of_pages() -> None:
    """Pages that are asked for meanwhile wait for a few chunks, and not for all of the restore."""
    device = NotingDevice()
    copier = small_copier(device)
    lane, weights = device.lanes[0], [Weight(torch.randn(64, 64))]
    loaded = weights[0].data.clone()
    pristine = HostPristine(weights, device, 512)
    weights[0].data.zero_()
    done: queue.SimpleQueue[CopyDone] = queue.SimpleQueue()
    args = [WeightRows(0, 0, 64)], None, copier
    lane.gate.clear()
    restoring = threading.Thread(target=pristine.restore, args=args)
    restoring.start()
    assert lane.entered.wait(30)
    copier.start(SwapPages(1, True, ((0, 0),)), lambda: None, done.put)
    lane.gate.set()
    assert done.get(timeout=30).ok
    restoring.join(30)
    copier.close()
    pristine.close()
    assert torch.equal(weights[0].data, loaded)
    (place,) = [place for place, target in enumerate(lane.targets) if target == copier_page(copier)]
    assert place <= 6, "one chunk is on its way, and some wait"
    assert len(lane.targets) > 10


# ---------------------------------------------------------------- the memory plan


def test_a_default_pool_on_a_gpu_is_smaller_by_the_copy() -> None:
    assert pool_bytes(FakeDevice("cuda", 100 * GIB), None, 3 * GIB, 13 * GIB) == 74 * GIB
    assert pool_bytes(FakeDevice("cuda", 10 * GIB), None, GIB, 13 * GIB) == 0
    assert pool_bytes(FakeDevice("cuda", 100 * GIB), 60 * GIB, 3 * GIB, 13 * GIB) == 60 * GIB
    assert pool_bytes(FakeDevice("cpu", 8 * GIB), None, GIB, GIB) == 2 * GIB


def test_a_copy_that_does_not_fit_beside_the_asked_pool_is_refused_with_both_sizes() -> None:
    words = (
        "a copy of the base's weights of 1.331e+04 MiB beside a pool of 9.216e+04 MiB does not fit: 1.024e+05"
    )
    with pytest.raises(ConfigError, match=re.escape(words)):
        pool_bytes(FakeDevice("cuda", 100 * GIB), 90 * GIB, 3 * GIB, 13 * GIB)


@pytest.mark.parametrize(
    ("wanted", "kind", "asked", "size", "place"),
    [
        ("auto", "cuda", None, 13, "device"),
        ("auto", "cuda", None, 14, "host"),
        ("auto", "cuda", 90, 13, "host"),  # it would not fit beside
        ("auto", "cuda", 80, 12, "device"),
        ("auto", "cuda", 80, 13, "host"),
        ("device", "cuda", 80, 30, "device"),
        ("host", "cuda", None, 1, "host"),
        ("auto", "cpu", None, 50, "device"),
        ("host", "cpu", None, 1, "host"),
    ],
)
def test_the_place_of_a_copy(wanted: str, kind: str, asked: int | None, size: int, place: str) -> None:
    """87 GiB would be the default pool's, of which 13.05 are 15 %."""
    asked_bytes = None if asked is None else asked * GIB
    assert pristine_place(wanted, FakeDevice(kind, 100 * GIB), asked_bytes, 3 * GIB, size * GIB) == place


def test_the_host_pool_and_a_copy_there() -> None:
    machine, pages = FakeDevice("cpu", 100 * GIB), 2**20

    def host(asked: int | None, kind: Any, promised: int, size: int) -> int:
        num_pages = host_pool_pages(
            machine, None if asked is None else asked * GIB, kind, promised * GIB, pages, size * GIB
        )
        return num_pages * pages // GIB

    assert host(None, "cuda", 0, 0) == 50
    assert host(None, "cuda", 0, 13) == 37
    assert host(None, "cpu", 0, 13) == 4
    assert host(80, "cuda", 0, 13) == 80
    with pytest.raises(ConfigError, match="beside a copy of the base's weights of"):
        host(90, "cuda", 0, 13)
    with pytest.raises(ConfigError, match=r"a copy of the base's weights of .* does not fit"):
        host(None, "cuda", 0, 101)
