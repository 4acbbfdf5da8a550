"""Time that this process spends on preparing steps rather than on running them: compiling and capturing.

One meter a process, since compilers are the process's. Compilers and devices report to it; the watchdog, which
judges how long a step takes, reads it. Does not know what is compiled.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class PreparationMeter:
    """Counts the seconds in which at least one thread prepares. Used from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._depths: dict[int, int] = {}  # preparations that have begun and not ended, by thread
        self._began_s = 0.0
        self._ended_s = 0.0

    def begin(self) -> None:
        """This thread prepares something, perhaps as part of a larger preparation."""
        thread = threading.get_ident()
        with self._lock:
            if not self._depths:
                self._began_s = self._clock()
            self._depths[thread] = self._depths.get(thread, 0) + 1

    def end(self) -> None:
        """What this thread began last is ready."""
        self._leave(max(self._depth() - 1, 0))

    def give_up(self) -> None:
        """Nothing that this thread has begun goes on: a compiler does not say that it has failed."""
        self._leave(0)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The block prepares something."""
        depth = self._depth()
        self.begin()
        try:
            yield
        finally:
            self._leave(depth)

    def seconds(self) -> float:
        """All that was spent so far, up to this moment where a preparation goes on."""
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
