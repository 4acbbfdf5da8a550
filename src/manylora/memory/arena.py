"""The device's pool of pages, for KV and for adapters alike (docs/architecture.md, "Memory").

Owns the allocation and its views. Does not know what a page holds or which request owns it: that is the policy's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from manylora.devices.device import Device
from manylora.kernels.shapes import PageShape
from manylora.types import PageId


class Arena:
    """``pool`` ``[num_pages, layers, 2, page_tokens, kv_heads, head_dim]``, zero at first.

    Zeros, because a kernel may multiply a stale value by zero: whatever lies in a page must be finite.
    """

    def __init__(self, num_pages: int, page: PageShape, dtype: torch.dtype, device: Device) -> None:
        if dtype.itemsize != page.itemsize:
            raise ValueError(f"pages of {page.itemsize}-byte elements cannot hold {dtype}")
        self.num_pages = num_pages
        self.shape = page
        self.dtype = dtype
        sizes = (num_pages, page.layers, 2, page.page_tokens, page.kv_heads, page.head_dim)
        self._pool: torch.Tensor | None = device.zeros(sizes, dtype)
        self._bytes: torch.Tensor | None = self._pool.view(-1).view(torch.uint8)

    @property
    def pool(self) -> torch.Tensor:
        """The pages. Raises RuntimeError after ``close``."""
        if self._pool is None:
            raise RuntimeError("the pool is closed")
        return self._pool

    def page(self, page: PageId) -> torch.Tensor:
        """One page as ``[layers, slab_elements]``: a view, contiguous."""
        if not 0 <= page < self.num_pages:
            raise IndexError(f"page {page} is not one of the pool's {self.num_pages}")
        return self.pool[page].view(self.shape.layers, self.shape.slab_elements)

    def run(self, first: PageId, count: int) -> torch.Tensor:
        """The bytes of ``count`` pages that lie side by side, uint8: a view."""
        if self._bytes is None:
            raise RuntimeError("the pool is closed")
        if not 0 <= first <= first + count <= self.num_pages:
            raise IndexError(f"page {first + count - 1} is not one of the pool's {self.num_pages}")
        size = self.shape.page_bytes
        return self._bytes[first * size : (first + count) * size]

    def copy_pages(self, pairs: Iterable[tuple[PageId, PageId]]) -> None:
        """Copy (source, destination) pages one after another, ordered with the device's other work."""
        for source, destination in pairs:
            self.page(destination).copy_(self.page(source))

    def close(self) -> None:
        """Free the pool. Idempotent; views that others still hold keep it alive."""
        self._pool = self._bytes = None
