"""What tells an adapter's files from any others that have lain, or will lie, in their place.

Stricter than ``FileStamp``, by which the change of an adapter that is served is noticed: such a stamp may change
where the file does not, and then something is read again. No torch here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import time
from pathlib import Path

from manylora.adapters.faults import FilesChanged
from manylora.adapters.peft import AdapterSpec
from manylora.adapters.tensorfile import LARGEST_HEADER_BYTES
from manylora.adapters.weightsfile import unchanged_files

_FINE_S, _COARSE_S = 0.02, 2.0
"""Two changes so far apart surely differ in their times: where these tell parts of a second, and elsewhere."""

_HASHED_BYTES = 8 + LARGEST_HEADER_BYTES
"""All of a configuration, the whole header of weights, and mostly some of what follows it."""

_SECOND_NS = 10**9


@dataclasses.dataclass(frozen=True, slots=True)
class SourceStamp:
    """One file. ``digest``: of how it begins, where its file system tells no inodes or no times; else empty."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    digest: str = ""


def source_stamps(spec: AdapterSpec) -> tuple[SourceStamp, SourceStamp]:
    """Of the adapter's configuration and of its weights. Opens neither, unless there is nothing else to go by.

    Raises FilesChanged where they are not there any more, or differ from those that were inspected.
    """
    try:
        config, weights = (stamp_source(path) for path in unchanged_files(spec))
    except OSError as error:
        raise FilesChanged(f"the adapter cannot be looked at: {error.strerror or error}") from error
    unchanged_files(spec)  # nor replaced in between
    return config, weights


def stamp_source(path: Path) -> SourceStamp:
    """Of one file. Raises OSError."""
    status = os.stat(path)
    has_stamps = bool(status.st_ino and status.st_mtime_ns and status.st_ctime_ns)
    return SourceStamp(
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        "" if has_stamps else _digest(path),
    )


def unsettled_s(stamps: tuple[SourceStamp, SourceStamp]) -> float:
    """For how many seconds yet a change of these files might leave their stamps as they are; infinite where their
    clock is far ahead of ours."""
    left = 0.0
    for stamp in stamps:
        age_s = time.time() - max(stamp.ctime_ns, stamp.mtime_ns) / _SECOND_NS
        apart_s = _FINE_S if stamp.ctime_ns % _SECOND_NS else _COARSE_S
        left = max(left, apart_s - age_s)
    return left if left <= _COARSE_S else math.inf


def _digest(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.blake2b(file.read(_HASHED_BYTES), digest_size=16).hexdigest()
