"""A step's numbers: what is sent arrives, whatever the buffers held before."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from manylora.devices.staging import (
    DownloadBuffers,
    StagingBuffer,
    UploadBuffers,
    copy_by_kernel,
    upload_buffers,
)

CPU = torch.device("cpu")


def test_what_is_sent_arrives() -> None:
    """More messages than buffers, of changing lengths and types, into the fronts of longer tensors."""
    rng = random.Random(1)
    box = UploadBuffers(CPU)
    for number in range(100):
        dtype = rng.choice([torch.int32, torch.int64])
        length = rng.choice([0, 1, 5, 3000, 40000])
        target = torch.full((length + 3,), -7, dtype=dtype)
        stage = box.stage(length + 9, dtype)
        stage.numbers[:] = np.arange(number, number + length + 9)
        stage.send(target[:length])
        assert target.tolist() == [*range(number, number + length), -7, -7, -7]


def test_what_is_sent_together_arrives() -> None:
    """Of changing lengths and types, some too many for what is sent at a time, some in parts, some not at all."""
    rng = random.Random(2)
    box = UploadBuffers(CPU)
    for _ in range(60):
        sent: list[tuple[torch.Tensor, np.ndarray]] = []
        with box.together():
            for _ in range(rng.randrange(6)):
                dtype = rng.choice([torch.int32, torch.int64, torch.float32, torch.uint8])
                length, more = rng.choice([0, 1, 5, 3000, 40000]), rng.choice([0, 1, 9])
                target = torch.full((length + 3,), 7, dtype=dtype)
                stage = box.stage(length + more, dtype)
                assert stage.numbers.shape == (length + more,)
                values = np.array([rng.randrange(100) for _ in range(length + more)])
                stage.numbers[:] = values
                if rng.random() < 0.9:
                    stage.send(target[:length])
                    sent.append((target, values[:length]))
        for target, values in sent:
            assert target.tolist() == [*values.tolist(), 7, 7, 7]


def test_what_is_sent_together_takes_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    copy = torch._foreach_copy_

    def noted(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        launches.append(len(targets))
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    box = UploadBuffers(CPU)
    target = torch.zeros(4, dtype=torch.int64)
    with box.together():
        for place in range(4):
            stage = box.stage(1, torch.int64)
            stage.numbers[:] = place + 1
            stage.send(target[place : place + 1])
        assert not target.any()
    assert target.tolist() == [1, 2, 3, 4]
    assert launches == [4]
    with box.together():
        pass
    assert launches == [4], "nothing is nothing"


def test_what_was_sent_before_an_error_arrives() -> None:
    box = UploadBuffers(CPU)
    target = torch.zeros(2, dtype=torch.int32)

    def send(number: int) -> None:
        stage = box.stage(2)
        stage.numbers[:] = number
        stage.send(target)

    def fail() -> None:
        with box.together():
            send(3)
            raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        fail()
    assert target.tolist() == [3, 3]
    send(4)
    assert target.tolist() == [4, 4], "what comes later goes by itself"


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_what_is_read_is_what_was_there(dtype: torch.dtype) -> None:
    """Later changes of the tensor do not show, nor do other reads that are still open."""
    box = DownloadBuffers(CPU)
    first, second = torch.arange(6, dtype=dtype).view(2, 3), torch.full((70000,), 5, dtype=dtype)
    read_first, read_second = box.start(first), box.start(second)
    first.fill_(-1)
    second.fill_(-1)
    assert read_second().tolist() == [5] * 70000
    assert read_first().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert box.start(torch.zeros(0, dtype=dtype))().shape == (0,)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_kernels_copy_bit_by_bit(dtype: torch.dtype) -> None:
    """Also what is no number, and zeros with a sign."""
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8))
    bits[:16] = torch.tensor([0, 0, 0, 0, 0, 0, 0, 128] * 2, dtype=torch.uint8)
    target = torch.zeros_like(bits)
    copy_by_kernel(target.view(dtype), bits.view(dtype))
    assert torch.equal(target, bits)


def test_a_stage_of_another_length_is_not_what_was_held() -> None:
    stage = StagingBuffer(CPU).hold(4, torch.int32)
    assert stage.numbers.shape == (4,)
    assert stage.hold(100_000, torch.int64).numbers.shape == (100_000,)


def test_a_thread_has_one_box_for_a_device() -> None:
    assert upload_buffers(CPU) is upload_buffers(CPU)
