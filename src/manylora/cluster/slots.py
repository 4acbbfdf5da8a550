"""Keeps the places of a cluster in which processes run one after another: starts, signs of life, and pauses.

A replica's place starts a replica, and starts the next one when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from manylora.cluster import children, messages
from manylora.cluster.blame import read_step
from manylora.cluster.children import Launch
from manylora.cluster.folder import step_file
from manylora.cluster.local import Launcher, NotStarted, Started
from manylora.cluster.recording import journal_name
from manylora.config.sections import AdapterSettings
from manylora.engine.wire import Failed
from manylora.protocol.routing import ReplicaId
from manylora.types import EngineInfo

log = logging.getLogger(__name__)

LEAST_WAIT_S, MOST_WAIT_S = 0.2, 10.0
"""The shortest and the longest wait before the next start, in seconds. It doubles each time, until a process
settles."""

SETTLED_S = 30.0
"""A replica that has run for this many seconds is started again at once when it ends."""
STOP_S = 2.0
KILLED_S = 1.0
"""How long the end of a killed process is waited for, where the system is slow to end it."""


class ProcessPlace:
    """A place for one process at a time. ``name``: for people; ``process``: the present one; ``was_silent``:
    whether the last one was killed because it was silent."""

    def __init__(self, name: str, launcher: Launcher, silence_s: float, settled_s: float = 0.0) -> None:
        """Start without a process. ``silence_s``: the silence after which a process is killed; ``settled_s``: the
        time that a started process must live so that the next start comes soon."""
        self.process: Started | None = None
        self.was_silent = False
        self.name = name
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
        except (OSError, RuntimeError, MemoryError) as error:  # RuntimeError: no thread can be started
            raise self._not_started(NotStarted(getattr(error, "strerror", None) or str(error))) from error

    async def begun(self) -> messages.ChildReady | Failed | None:
        """Wait for the process's report of its start (see Started). Raises NotStarted."""
        assert self.process is not None
        try:
            said = await self.process.begun()
        except NotStarted as error:
            self.process = None
            raise self._not_started(error) from error
        self._is_up = isinstance(said, messages.ChildReady)
        return said

    def _not_started(self, error: NotStarted) -> NotStarted:
        log.error("%s cannot be started: %s", self.name, error)
        return NotStarted(f"{self.name} cannot be started: {error}")

    async def ended(self) -> int:
        """Wait for the end of the process, and return its exit code. A silent process is killed."""
        process = self.process
        assert process is not None
        self.was_silent = not await process.live(self._silence_s)
        if self.was_silent:
            log.error("%s has said nothing for %.1f s: it is ended", self.name, self._silence_s)
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


class ReplicaPlace:
    """A place in which ``run`` keeps a replica until ``end``. ``folder``: the cluster's folder, for the next
    start."""

    def __init__(
        self,
        replica: ReplicaId,
        epoch: int,
        launch: children.Launch,
        launcher: Launcher,
        changed: Callable[[], None],
        exited: Callable[[messages.Exited], None],
    ) -> None:
        """Start without a replica. ``epoch``: the last epoch of this place so far. ``changed``, ``exited``:
        called on the event loop's thread when the state changes, and when a process has ended."""
        self.id = replica
        self.epoch = epoch
        self.state = "starting"
        self.drains_to = ""
        self.info: EngineInfo | None = None
        self.failed: Failed | None = None
        self.why = ""
        self.folder = launch.folder
        self._launch = launch
        self._place = ProcessPlace(f"replica {replica}", launcher, launch.cluster.silence_s, SETTLED_S)
        self._changed = changed
        self._exited = exited
        self._is_wanted = True
        self._is_ended = False  # this process ended the present one

    def as_slot(self) -> messages.Slot:
        """Describe the place for the router."""
        process = self._place.process
        pid = 0 if process is None else process.pid
        return messages.Slot(self.id, self.epoch, pid, self.state, self.drains_to, self.why)

    async def run(self) -> None:
        """Run replicas, one after another, until ``end``."""
        while self._is_wanted:
            self.epoch += 1
            await self._live()
            self.drains_to = ""
            if self._is_wanted and not self._is_ended:
                self._set("waiting")
                await self._place.pause()
        self._set("gone")

    async def _live(self) -> None:
        """Run one epoch: from a start to the end of its process."""
        self._is_ended = False
        folder = Path(self.folder)
        try:
            await self._place.start(self._launch_of_epoch())
            self._set("starting")
            said = await self._place.begun()
        except NotStarted as error:
            self.why = str(error)
            return
        if isinstance(said, messages.ChildReady):
            self.info, self.failed, self.why = said.info, None, ""
            self._set("running")
        else:
            ended = Failed(f"replica {self.id} ended while it was starting")
            self.failed = said if isinstance(said, Failed) else ended
            self.why = self.failed.message
        code = await self._place.ended()
        self._is_ended |= self._place.was_silent
        note = step_file(folder, self.id, self.epoch)
        blamed = read_step(note)
        with contextlib.suppress(OSError):
            note.unlink()
        is_crash = not self._is_ended and code not in (0, children.REFUSED, children.FENCED)
        why = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        self._exited(messages.Exited(self.id, self.epoch, why, is_crash, blamed))

    def _launch_of_epoch(self) -> children.Launch:
        settings = self._launch.engine
        role = f"r{self.id}"
        trace = journal_name(settings.cache.trace, role, self.epoch)
        engine = dataclasses.replace(
            settings,
            journal=journal_name(settings.journal, role, self.epoch),
            cache=dataclasses.replace(settings.cache, trace=trace),
            # Adapters come from the registry, not from the settings.
            adapters=AdapterSettings(max_adapter_rank=settings.adapters.max_adapter_rank),
        )
        return msgspec.structs.replace(
            self._launch, id=self.id, epoch=self.epoch, engine=engine, folder=self.folder
        )

    def _set(self, state: str) -> None:
        self.state = state
        self._changed()

    def kill(self, epoch: int) -> None:
        """Kill the replica of this epoch: it must not serve any more."""
        if epoch == self.epoch and self._place.process is not None:
            self._is_ended = True
            self._place.process.kill()

    async def end(self) -> None:
        """End the present replica, and start no further one."""
        self._is_wanted = False
        process = self._place.process
        if process is None:
            return
        self._is_ended = True
        self._set("stopping")
        await end_soon(process, STOP_S)


async def end_soon(process: Started, seconds: float) -> None:
    """Ask a process to end in order, and kill it where it takes longer."""
    process.stop()
    try:
        await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        process.kill()
        with contextlib.suppress(TimeoutError):  # asyncio warns of a process that ends after the loop
            await asyncio.wait_for(process.wait(), KILLED_S)
