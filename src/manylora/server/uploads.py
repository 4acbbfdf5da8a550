"""The bodies of requests on their way to one server, which have one bound together.

Does not know what a connection is, but for how its body is refused.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from manylora.server.errors import ApiError, try_later


class Uploader(Protocol):
    """A connection on which a body comes."""

    def refuse(self, error: ApiError) -> None:
        """Read no more of the body."""


@dataclasses.dataclass(slots=True)
class _Upload:
    start_s: float
    num_bytes: int = 0


class Uploads:
    """Bodies that are not whole yet. A whole one is its request's."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._open: dict[Uploader, _Upload] = {}

    def add(self, uploader: Uploader, num_bytes: int, now_s: float) -> None:
        """Count a piece. Past the bound the slowest bodies are refused, since fast ones are soon whole."""
        self._open.setdefault(uploader, _Upload(now_s)).num_bytes += num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            slowest = min(self._open, key=lambda each: self._bytes_per_s(each, now_s))
            self.end(slowest)
            slowest.refuse(
                try_later(503, f"bodies of {self._max_bytes} bytes are on their way; this one is the slowest")
            )

    def _bytes_per_s(self, uploader: Uploader, now_s: float) -> float:
        upload = self._open[uploader]
        return upload.num_bytes / max(now_s - upload.start_s, 1e-3)

    def end(self, uploader: Uploader) -> None:
        """Forget a body that is whole or is read no more. Idempotent."""
        if (upload := self._open.pop(uploader, None)) is not None:
            self._num_bytes -= upload.num_bytes
