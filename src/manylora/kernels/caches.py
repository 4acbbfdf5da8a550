"""What compilers of kernels keep on the disk: where it lies, and on which machines it is of use.

Knows the folders of Triton and FlashInfer. Compiles nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path

import torch


def cache_folders() -> dict[str, Path]:
    """By compiler, whether the folder is there or not. Of those that are installed."""
    found = {}
    if _version("triton") is not None:
        from triton import knobs

        if knobs.cache.dir:
            found["triton"] = Path(knobs.cache.dir)
    if _version("flashinfer-python") is not None:
        base = os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()
        found["flashinfer"] = Path(base) / ".cache" / "flashinfer"
    return found


def machine_kind() -> dict[str, str | None]:
    """Machines of one kind use each other's caches: the processor's and the GPU's kind, and versions."""
    device = "cpu"
    if torch.version.cuda is not None and torch.get_device_module("cuda").is_available():
        properties = torch.get_device_module("cuda").get_device_properties(0)
        device = f"{properties.name}, {properties.major}.{properties.minor}"
    return {
        "device": device,
        "machine": platform.machine(),
        "python": platform.python_version().rpartition(".")[0],
        "torch": torch.__version__,
        "triton": _version("triton"),
        "flashinfer": _version("flashinfer-python"),
    }


def moved(name: str, data: bytes, folder: Path) -> bytes:
    """A file of Triton's cache, as it has to be in another folder: lists of a kernel's files name them by whole
    paths. Raises ValueError where it is not what Triton writes."""
    if not name.startswith("__grp__"):
        return data
    listed = json.loads(data)
    paths = listed.get("child_paths") if isinstance(listed, dict) else None
    if not isinstance(paths, dict):
        raise ValueError(f"{name} does not list a kernel's files")
    return json.dumps({"child_paths": {child: str(folder / Path(child).name) for child in paths}}).encode()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
