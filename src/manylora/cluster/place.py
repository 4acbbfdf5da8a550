"""Where one process of a cluster runs after the other: its start, whether it lives, and the pause before the next.

Does not know what the processes do, nor what their ends mean.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from manylora.cluster import messages
from manylora.cluster.children import Launch
from manylora.cluster.local import Launcher, NotStarted, Started
from manylora.engine.wire import Failed

log = logging.getLogger(__name__)

LEAST_WAIT_S, MOST_WAIT_S = 0.2, 10.0
"""Before the next start: twice as long each time, until a process settles."""


class ProcessPlace:
    """``process``: what runs here; ``was_silent``: the last one was ended because it said nothing."""

    def __init__(self, name: str, launcher: Launcher, silence_s: float, settled_s: float = 0.0) -> None:
        """``name``: for people; ``silence_s``: after which a process is ended; ``settled_s``: how long one has to
        live that has come up, so that the next is started soon."""
        self.process: Started | None = None
        self.was_silent = False
        self._name = name
        self._launcher = launcher
        self._silence_s = silence_s
        self._settled_s = settled_s
        self._is_up = False
        self._began_s = 0.0
        self._wait_s = LEAST_WAIT_S

    async def start(self, launch: Launch, descriptors: Sequence[int] = ()) -> None:
        """Start a process. Raises NotStarted."""
        self._is_up = False
        self._began_s = time.monotonic()
        try:
            self.process = await self._launcher.start(launch, descriptors)
        except (OSError, RuntimeError, MemoryError) as error:  # the second where no thread can be had
            raise self._not_started(NotStarted(getattr(error, "strerror", None) or str(error))) from error

    async def begun(self) -> messages.ChildReady | Failed | None:
        """See Started. Raises NotStarted."""
        assert self.process is not None
        try:
            said = await self.process.begun()
        except NotStarted as error:
            self.process = None
            raise self._not_started(error) from error
        self._is_up = isinstance(said, messages.ChildReady)
        return said

    def _not_started(self, error: NotStarted) -> NotStarted:
        log.error("%s cannot be started: %s", self._name, error)
        return NotStarted(f"{self._name} cannot be started: {error}")

    async def ended(self) -> int:
        """Wait for the end of the process; its exit code."""
        process = self.process
        assert process is not None
        self.was_silent = not await process.live(self._silence_s)
        if self.was_silent:
            log.error("%s has said nothing for %.1f s: it is ended", self._name, self._silence_s)
            process.kill()
        code = await process.wait()
        self.process = None
        return code

    async def pause(self) -> None:
        """Wait until the next start."""
        if self._is_up and time.monotonic() - self._began_s >= self._settled_s:
            self._wait_s = LEAST_WAIT_S
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, MOST_WAIT_S)
        await asyncio.sleep(wait_s)
