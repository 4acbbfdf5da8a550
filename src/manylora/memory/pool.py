"""Holds the pages of both tiers, the device's pool and the host's, of one shape, for KV and for adapters
alike.

Owns the memory, its views and its pinning (docs/architecture.md, "Memory"). Does not know the contents of a
page or the request that owns it: the policy does.
"""

from __future__ import annotations

import logging
import math
import mmap
import threading
import time
from collections.abc import Iterable

import torch

from manylora.config.declaring import ConfigError
from manylora.devices.device import Device
from manylora.kernels.shapes import PageShape
from manylora.memory.budget import in_mib
from manylora.types import PageId, first_line


class Pages:
    """The pages of one tier, in adjacent bytes. ``what``: the tier's name in error messages."""

    def __init__(self, what: str, num_pages: int, page: PageShape, dtype: torch.dtype) -> None:
        if dtype.itemsize != page.itemsize:
            raise ValueError(f"pages of {page.itemsize}-byte elements cannot hold {dtype}")
        self._what = what
        self.num_pages = num_pages
        self.shape = page
        self.dtype = dtype
        self._bytes: torch.Tensor | None = None

    def page(self, page: PageId) -> torch.Tensor:
        """Return one page as ``[layers, slab_elements]``: a view, contiguous. Raises like ``run``."""
        return self.run(page, 1).view(self.dtype).view(self.shape.layers, self.shape.slab_elements)

    def run(self, first: PageId, count: int) -> torch.Tensor:
        """Return the bytes of ``count`` adjacent pages, uint8: a view. Raises RuntimeError after ``close``,
        IndexError where there is no such page."""
        if self._bytes is None:
            raise RuntimeError(f"the {self._what} is closed")
        if not 0 <= first <= first + count <= self.num_pages:
            raise IndexError(f"page {first + count - 1} is not one of the {self._what}'s {self.num_pages}")
        size = self.shape.page_bytes
        return self._bytes[first * size : (first + count) * size]


class Arena(Pages):
    """The device's pool: ``pool`` ``[num_pages, layers, 2, page_tokens, kv_heads, head_dim]``, zero at first.

    A kernel may multiply a stale value by zero, so everything in a page must be finite; zeros are.
    """

    def __init__(self, num_pages: int, page: PageShape, dtype: torch.dtype, device: Device) -> None:
        super().__init__("pool", num_pages, page, dtype)
        sizes = (num_pages, page.layers, 2, page.page_tokens, page.kv_heads, page.head_dim)
        self._pool: torch.Tensor | None = device.zeros(sizes, dtype)
        self._bytes = self._pool.view(-1).view(torch.uint8)

    @property
    def pool(self) -> torch.Tensor:
        """The pages. Raises RuntimeError after ``close``."""
        if self._pool is None:
            raise RuntimeError("the pool is closed")
        return self._pool

    def copy_pages(self, pairs: Iterable[tuple[PageId, PageId]]) -> None:
        """Copy (source, destination) pages one after another, ordered with the device's other work."""
        for source, destination in pairs:
            self.page(destination).copy_(self.page(source))

    def close(self) -> None:
        """Free the pool. Idempotent; views that others still hold keep it alive."""
        self._pool = self._bytes = None


CHUNK_BYTES = 256 * 2**20
"""The bytes that are pinned at a time: the driver may block steps while it pins them."""

_log = logging.getLogger(__name__)


class HostPool(Pages):
    """The host's pool: ``num_pages`` pages, zero at first.

    Memory is taken as pages are first written. Where pinned memory makes copies faster, a thread takes and
    pins all of it in the background, chunk by chunk. No copy may cross the border between two chunks.
    """

    def __init__(
        self,
        num_pages: int,
        page: PageShape,
        dtype: torch.dtype,
        device: Device,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Reserve the memory and start to pin it. Raises ConfigError when the system does not give the
        memory."""
        super().__init__("host pool", num_pages, page, dtype)
        # Chunks begin at the system's page boundaries too.
        step = mmap.PAGESIZE // math.gcd(page.page_bytes, mmap.PAGESIZE)
        self.chunk_pages = step * max(1, chunk_bytes // (step * page.page_bytes))
        self._bytes = pages = shared_memory(num_pages * page.page_bytes, "a host pool")
        self._device = device
        self._pinned: list[torch.Tensor] = []
        self._closing = threading.Event()
        self._pinner: threading.Thread | None = None
        if num_pages and device.copies_from_pinned:
            size = self.chunk_pages * page.page_bytes
            chunks = [pages[at : at + size] for at in range(0, len(pages), size)]
            self._pinner = threading.Thread(
                target=self._pin, args=(chunks,), name="manylora-host-pin", daemon=True
            )
            self._pinner.start()

    @property
    def pinned_bytes(self) -> int:
        """The number of bytes pinned so far."""
        return sum(chunk.nbytes for chunk in self._pinned)

    @property
    def pages_pinned(self) -> int:
        """The number of pages with the fastest copies: the pinned pages, or all pages where the device gains
        nothing by pinning."""
        if not self._device.copies_from_pinned:
            return self.num_pages
        # The last chunk ends where the memory ends, perhaps past the last page.
        return min(self.pinned_bytes // self.shape.page_bytes, self.num_pages)

    def close(self) -> None:
        """Free the memory. Idempotent; no copy may be under way. Views that others hold keep the memory
        alive."""
        self._closing.set()
        if self._pinner is not None:
            self._pinner.join()
        while self._pinned:
            self._device.release(self._pinned.pop(), "a part of the host pool")
        self._bytes = None

    def _pin(self, chunks: list[torch.Tensor]) -> None:
        began = time.perf_counter()
        for chunk in chunks:
            if self._closing.is_set():
                return
            try:
                self._device.pin(chunk)
            except RuntimeError as error:
                # The next chunks would be refused too; CUDA keeps the error for this thread alone.
                _log.warning(
                    "the host pool is pinned up to %s only, its copies are slower past that: %s",
                    in_mib(self.pinned_bytes),
                    first_line(error),
                )
                return
            self._pinned.append(chunk)
        _log.info("pinned the host pool in %.1f s", time.perf_counter() - began)


def shared_memory(num_bytes: int, purpose: str) -> torch.Tensor:
    """Return zeros, uint8, a whole number of the system's pages, unmapped with the last view. ``purpose``:
    the memory's name in an error message. Raises ConfigError when the system does not give the memory."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    rounded = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        return torch.frombuffer(mmap.mmap(-1, rounded), dtype=torch.uint8)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"no memory for {purpose} of {in_mib(num_bytes)}: {error}") from error
