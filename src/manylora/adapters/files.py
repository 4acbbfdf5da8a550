"""Reads an adapter's files. Defines how versions of a file are distinguished, and which errors are raised.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manylora.protocol.executor import AdapterError
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
"""The most tensors that an adapter may have. A 126-layer model with every projection adapted has 1,764."""

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SAMPLE_BYTES = 256

_log = logging.getLogger(__name__)


class FilesChanged(AdapterError):
    """An error for files that have changed since they were inspected. Neither the adapter nor the client is
    at fault.

    Its status is 409 where the adapter is being loaded: the request and the files contradict each other until
    the adapter is requested anew.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, status=409)


@contextmanager
def adapters_fault() -> Iterator[None]:
    """Raise whatever goes wrong inside as an AdapterError, because the adapter that is read there is at
    fault."""
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
    """The size and time that distinguish versions of a file. Remounts, chmod and copies that keep times do
    not change them."""

    size_bytes: int
    mtime_ns: int


@adapters_fault()
def stamp_of(path: Path) -> FileStamp:
    """Return the stamp of a regular file. Raises AdapterError when it is missing, unreadable or not a
    file."""
    status = status_of(path)
    return FileStamp(status.st_size, status.st_mtime_ns)


def adapter_files(path: Path) -> tuple[Path, Path]:
    """Return the paths of the adapter's configuration and weights. Raises AdapterError when either is
    missing, with status 404 where there is no such folder."""
    try:
        names = sorted(os.listdir(path))
    except (OSError, ValueError) as error:
        raise AdapterError(f"no adapter folder {os.path.basename(path)!r}", status=404) from error
    # Only the folder's own name: a client's message must not reveal paths on the server.
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


@adapters_fault()
def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Read the header of an adapter's weights. Raises AdapterError where it is unreadable, has too many
    tensors, or has an unsupported dtype."""
    tensors = read_header(path, "adapter")
    if len(tensors) > MOST_TENSORS:
        raise AdapterError(f"{path.name}: {len(tensors)} tensors are more than any adapter needs")
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise AdapterError(f"tensor {shown(name)} has dtype {shown(tensor.dtype)}; supported are {known}")
    return tensors


def sampled_digest(config: Path, weights: Path, tensors: dict[str, StoredTensor]) -> str:
    """Return a digest of the whole configuration, of the weights' header, and of some bytes of each tensor.

    It distinguishes files of the same size and time on every file system, for one short read per tensor.
    Raises AdapterError where a file cannot be read.
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
