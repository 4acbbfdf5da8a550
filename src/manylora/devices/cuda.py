"""A CUDA device. The only place where ``torch.cuda`` is named.

Steps run on the thread's current stream (torch's default one); pages are written on streams of their own.
"""

# mypy: disallow-untyped-calls=False
# torch's streams and events have no annotations.

from __future__ import annotations

import numpy as np
import torch

from manylora.config import ConfigError
from manylora.devices.device import PageWriter, copy_bytes

_STAGED_PAGES = 4
"""Pinned pages of one writer: while one is filled the others are on their way."""


def cuda_is_available() -> bool:
    return torch.cuda.is_available()


class CudaDevice:
    """The Device protocol on the current CUDA device. Raises ConfigError when there is none."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            built = "finds no GPU" if torch.version.cuda else "is built without CUDA"
            raise ConfigError(f"device cuda was asked for, but this torch ({torch.__version__}) {built}")
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.name = f"cuda ({torch.cuda.get_device_name(self.torch_device)})"

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        held = torch.cuda.memory_reserved(self.torch_device)
        return free + held - torch.cuda.memory_allocated(self.torch_device)

    def zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype, device=self.torch_device)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        # torch keeps the pinned copy until the transfer has ended.
        return torch.from_numpy(array).pin_memory().to(self.torch_device, non_blocking=True)

    def page_writer(self) -> PageWriter:
        return _CudaPageWriter(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def release_memory(self) -> None:
        torch.cuda.empty_cache()


class _CudaPageWriter:
    """Pinned pages taken in turn, each with the event that tells when it may be filled again."""

    def __init__(self, device: torch.device) -> None:
        self._issued = torch.cuda.Event()
        self._issued.record(torch.cuda.current_stream(device))
        self._stream = torch.cuda.Stream(device)
        self._stages: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._num_writes = 0

    def write(self, target: torch.Tensor, image: torch.Tensor) -> None:
        turn = self._num_writes % _STAGED_PAGES
        if self._num_writes == 0:
            self._stream.wait_event(self._issued)
        if turn == len(self._stages):
            self._stages.append((torch.empty_like(image, pin_memory=True), torch.cuda.Event()))
        staged, landed = self._stages[turn]
        landed.synchronize()
        copy_bytes(staged, image)
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)
            landed.record(self._stream)
        self._num_writes += 1

    def close(self) -> None:
        self._stream.synchronize()
        self._stages.clear()
