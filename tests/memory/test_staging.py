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
    can_map,
    copy_by_kernel,
    moves_by_kernel,
    upload_buffers,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("by_kernel", [False, True])
def test_what_is_sent_arrives(by_kernel: bool) -> None:
    """More messages than buffers, of changing lengths and types, into the fronts of longer tensors."""
    rng = random.Random(1)
    box = UploadBuffers(CPU, by_kernel)
    for number in range(100):
        dtype = rng.choice([torch.int32, torch.int64])
        length = rng.choice([0, 1, 5, 3000, 40000])
        target = torch.full((length + 3,), -7, dtype=dtype)
        stage = box.stage(length + 9, dtype)
        stage.numbers[:] = np.arange(number, number + length + 9)
        stage.send(target[:length])
        assert target.tolist() == [*range(number, number + length), -7, -7, -7]


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_what_is_read_is_what_was_there(by_kernel: bool, dtype: torch.dtype) -> None:
    """Later changes of the tensor do not show, nor do other reads that are still open."""
    box = DownloadBuffers(CPU, by_kernel)
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
    stage = StagingBuffer(CPU, by_kernel=True).hold(4, torch.int32)
    assert stage.numbers.shape == (4,)
    assert stage.hold(100_000, torch.int64).numbers.shape == (100_000,)


def test_numbers_move_by_kernel_only_where_asked() -> None:
    assert can_map(CPU), "what is asked of a GPU holds of plain memory"
    assert not moves_by_kernel(CPU)
    assert upload_buffers(CPU) is upload_buffers(CPU)
