"""A limit on the rate of copies, for experiments with slower links. Owns when the next piece may go."""

from __future__ import annotations

import threading
import time

PIECE_S = 0.0005
"""What is moved at a time takes so long at the limit."""


class Pace:
    """Keeps one lane at ``bytes_s`` bytes a second. Sleeps on its thread; ``stop`` may come from any."""

    def __init__(self, bytes_s: int) -> None:
        self.piece_bytes = max(1, int(bytes_s * PIECE_S))
        self._bytes_s = bytes_s
        self._free_at = 0.0
        self._stopped = threading.Event()

    def moved(self, num_bytes: int) -> None:
        """So many bytes were moved: return when a link of this rate would have moved them.

        A sleep that lasted too long is made up for by the next ones, as long as pieces follow each other.
        """
        now = time.monotonic()
        if now - self._free_at > 20 * PIECE_S:  # it had nothing to do
            self._free_at = now
        self._free_at += num_bytes / self._bytes_s
        if self._free_at > now:
            self._stopped.wait(self._free_at - now)

    def stop(self) -> None:
        """Wait no more."""
        self._stopped.set()
