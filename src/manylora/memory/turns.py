"""Turns of a long transfer to the device, beside copies of pages.

Owns the share of either, and the lane on which the transfer's copies follow those of pages. Does not copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from manylora.devices.device import CopyLane

_BYTES_OF_PAGES = 4
"""Copies of pages move so many bytes for each byte of the long transfer, so they keep 80 % of their rate."""

_LOOK_S = 0.1
"""How often a transfer that waits for its turn looks whether it is still wanted."""


class Turns:
    """Shared by the threads that copy pages and by the one of the long transfer."""

    def __init__(self, lane: CopyLane) -> None:
        """``lane``: behind the one that copies pages, for the thread of the long transfer."""
        self.lane = lane
        self._changed = threading.Condition()
        self._num_copies = 0
        self._copied_bytes = 0

    def begin_transfer(self) -> None:
        """A long transfer begins: pages that have landed before count for none of its turns."""
        with self._changed:
            self._copied_bytes = 0

    def begin_copy(self) -> None:
        """A copy of pages is on its way, or waits for those before it."""
        with self._changed:
            self._num_copies += 1

    def end_copy(self, num_bytes: int) -> None:
        """A copy of pages has ended; so many bytes of it have landed."""
        with self._changed:
            self._num_copies -= 1
            self._copied_bytes += num_bytes
            self._changed.notify_all()

    def take(self, num_bytes: int, is_wanted: Callable[[], bool]) -> bool:
        """Wait until the long transfer may move so many bytes: no copy of pages is on its way, or enough of them
        have landed for it since the transfer began. False once it is not wanted."""
        with self._changed:
            while self._num_copies and self._copied_bytes < _BYTES_OF_PAGES * num_bytes:
                if not is_wanted():
                    return False
                self._changed.wait(_LOOK_S)
            # What is left of a large copy counts for the next turn.
            self._copied_bytes = max(0, self._copied_bytes - _BYTES_OF_PAGES * num_bytes)
        return is_wanted()
