"""Measures the time that this process spends on preparing steps rather than on running them: compiling,
capturing.

There is one meter for each process, since compilers belong to the process. Compilers and devices report to
it. The watchdog, which judges how long a step takes, reads it. Does not know what is compiled.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class PreparationMeter:
    """A meter of the seconds in which at least one thread prepares something. Used from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._depths: dict[int, int] = {}  # preparations that have begun and not ended, by thread
        self._began_s = 0.0
        self._ended_s = 0.0

    def begin(self) -> None:
        """Note that this thread begins to prepare something, perhaps as part of a larger preparation."""
        thread = threading.get_ident()
        with self._lock:
            if not self._depths:
                self._began_s = self._clock()
            self._depths[thread] = self._depths.get(thread, 0) + 1

    def end(self) -> None:
        """Note that the thread's newest preparation has ended."""
        self._leave(max(self._depth() - 1, 0))

    def give_up(self) -> None:
        """End all preparations of this thread. Needed because a compiler does not report that it has
        failed."""
        self._leave(0)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the block as a preparation. On leaving, preparations that began in the block and did not end
        are ended."""
        depth = self._depth()
        self.begin()
        try:
            yield
        finally:
            self._leave(depth)

    def seconds(self) -> float:
        """Return all seconds spent so far, including those of a preparation that still goes on."""
        with self._lock:
            return self._ended_s + (self._clock() - self._began_s if self._depths else 0.0)

    def _depth(self) -> int:
        return self._depths.get(threading.get_ident(), 0)

    def _leave(self, depth: int) -> None:
        thread = threading.get_ident()
        with self._lock:
            was_preparing = bool(self._depths)
            self._depths.pop(thread, None)
            if depth:
                self._depths[thread] = depth
            if was_preparing and not self._depths:
                self._ended_s += self._clock() - self._began_s


PREPARATION = PreparationMeter()
"""The meter of this process."""
