"""What of a file the system has in memory. No torch here."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np


def cached_pages(file: int) -> np.ndarray | None:
    """bool, one for each of the system's pages that the open file has: whether reading it would ask no disk.

    None where the system does not tell. Not by reads that do not wait (``RWF_NOWAIT``): kernels begin to read on
    behind these, and what is then read directly comes from the disk twice.
    """
    size = os.fstat(file).st_size
    held = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    if not size:
        return held.astype(bool)
    try:
        # Nothing is read through the mapping: where a file is cut short, that would kill the process.
        data = np.frombuffer(mmap.mmap(file, size, prot=mmap.PROT_READ), np.uint8)
        mincore = ctypes.CDLL(None).mincore
    except (OSError, ValueError, AttributeError):
        return None
    places = (ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(held.ctypes.data))
    return None if mincore(*places) else (held & 1).astype(bool)
