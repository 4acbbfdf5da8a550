"""Which device an engine runs on."""

from __future__ import annotations

from manylora.config import ConfigError
from manylora.devices.cpu import CpuDevice
from manylora.devices.cuda import CudaDevice, cuda_is_available
from manylora.devices.device import Device


def open_device(name: str) -> Device:
    """The device called "cpu" or "cuda"; "auto" is CUDA where there is a GPU. Raises ConfigError."""
    if name == "auto":
        name = "cuda" if cuda_is_available() else "cpu"
    if name == "cpu":
        return CpuDevice()
    if name == "cuda":
        return CudaDevice()
    raise ConfigError(f"device {name!r} is not known: use auto, cpu or cuda")
