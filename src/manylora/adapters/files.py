"""An adapter's files: what tells one version of them from the next, and whose fault it is when one cannot be read.

No torch here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manylora.protocol import AdapterError
from manylora.tensorfile import (
    DTYPE_BYTES,
    StoredTensor,
    TensorFileError,
    read_header,
    reason,
    shown,
    status_of,
)

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

MOST_TENSORS = 16384
"""A 126-layer model with every projection adapted has 1,764."""

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SAMPLE_BYTES = 256

_log = logging.getLogger(__name__)


class FilesChanged(AdapterError):
    """The files differ from those that were inspected: the fault of neither the adapter nor the client.

    409 where it is being loaded: what was asked for and what lies there contradict each other, until it is asked
    for again.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, status=409)


@contextmanager
def adapters_fault() -> Iterator[None]:
    """Whatever goes wrong inside is the fault of the adapter that is read there: an AdapterError."""
    try:
        yield
    except AdapterError:
        raise
    except TensorFileError as error:
        raise AdapterError(str(error)) from error
    except Exception as error:
        _log.warning("reading an adapter failed in an unexpected way", exc_info=True)
        raise AdapterError(f"the adapter cannot be read: {type(error).__name__}: {error}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells one version of a file from the next. Remounts, chmod and copies that keep times leave it."""

    size_bytes: int
    mtime_ns: int


def stamp_of(path: Path) -> FileStamp:
    """The stamp of a regular file. Raises AdapterError when it is missing, unreadable or not a file."""
    try:
        status = status_of(path)
    except TensorFileError as error:
        raise AdapterError(str(error)) from error
    return FileStamp(status.st_size, status.st_mtime_ns)


def adapter_files(path: Path) -> tuple[Path, Path]:
    """The adapter's configuration and weights. Raises AdapterError when either is not there."""
    try:
        names = sorted(os.listdir(path))
    except (OSError, ValueError) as error:
        raise AdapterError(f"no adapter folder {os.path.basename(path)!r}", status=404) from error
    # Only the folder's own name: what a client is told must not say where on the server it lies.
    folder = shown(os.path.basename(os.path.abspath(path)))
    if CONFIG_NAME not in names:
        raise AdapterError(f"{folder} holds no {CONFIG_NAME}")
    if WEIGHTS_NAME not in names:
        pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
        if pickles:
            raise AdapterError(
                f"{folder} holds {shown(pickles[0])} but no {WEIGHTS_NAME}: "
                "pickle files are refused, convert to safetensors"
            )
        raise AdapterError(f"{folder} holds no {WEIGHTS_NAME}")
    return path / CONFIG_NAME, path / WEIGHTS_NAME


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """The header of an adapter's weights. Raises AdapterError."""
    try:
        tensors = read_header(path, "adapter")
    except TensorFileError as error:
        raise AdapterError(str(error)) from error
    if len(tensors) > MOST_TENSORS:
        raise AdapterError(f"{path.name}: {len(tensors)} tensors are more than any adapter needs")
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise AdapterError(f"tensor {shown(name)} has dtype {shown(tensor.dtype)}; supported are {known}")
    return tensors


def sampled_digest(config: Path, weights: Path, tensors: dict[str, StoredTensor]) -> str:
    """Of all of a configuration, and of the header and some bytes of each tensor of the weights.

    It tells files of one size and time apart on every file system, and takes a short read a tensor. Raises
    AdapterError.
    """
    state = hashlib.blake2b(digest_size=16)
    header_bytes = min((each.begin for each in tensors.values()), default=0)
    try:
        state.update(config.read_bytes())
        with open(weights, "rb", buffering=0) as file:
            state.update(os.pread(file.fileno(), header_bytes, 0))
            for each in tensors.values():
                count = min(_SAMPLE_BYTES, each.size_bytes)
                state.update(os.pread(file.fileno(), count, each.begin + (each.size_bytes - count) // 2))
    except OSError as error:
        raise AdapterError(f"cannot read the adapter's files: {reason(error)}") from error
    return state.hexdigest()
