"""The places for replicas: starts what is to run there, and starts it again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from manylora.cluster import children, messages
from manylora.cluster.folder import step_file
from manylora.cluster.last_step import read_step
from manylora.cluster.local import Launcher, Started
from manylora.cluster.names import journal_name
from manylora.cluster.node_share import NodeShare
from manylora.config import AdapterSettings, ConfigError
from manylora.engine.wire import Failed
from manylora.protocol.routing import ReplicaId
from manylora.types import EngineInfo

log = logging.getLogger(__name__)

SETTLED_S = 30.0
"""A replica that has run for so long is started again at once when it ends."""
LEAST_WAIT_S, MOST_WAIT_S = 0.5, 10.0
"""Before one that ended sooner is started again: twice as long each time."""
STOP_S = 2.0


class ReplicaPlace:
    """One place. ``run`` keeps a replica there until ``end``."""

    def __init__(
        self,
        replica: ReplicaId,
        epoch: int,
        launch: children.Launch,
        launcher: Launcher,
        node: NodeShare,
        changed: Callable[[], None],
        exited: Callable[[messages.Exited], None],
    ) -> None:
        """``epoch``: the last that was there before. ``changed``, ``exited``: called on the event loop's thread
        when the state is another, and when a process has ended."""
        self.id = replica
        self.epoch = epoch
        self.state = "starting"
        self.drains_to = ""
        self.info: EngineInfo | None = None
        self.failed: Failed | None = None
        self._launch = launch
        self._launcher = launcher
        self._node = node
        self._changed = changed
        self._exited = exited
        self._process: Started | None = None
        self._is_wanted = True
        self._is_ended = False  # the present process, by this one

    def as_told(self) -> messages.Slot:
        """What the router is to know."""
        pid = 0 if self._process is None else self._process.pid
        return messages.Slot(self.id, self.epoch, pid, self.state, self.drains_to)

    async def run(self) -> None:
        """Until ``end``."""
        wait_s = LEAST_WAIT_S
        while self._is_wanted:
            self.epoch += 1
            began_s = time.monotonic()
            await self._live()
            if time.monotonic() - began_s > SETTLED_S:
                wait_s = LEAST_WAIT_S
            self.drains_to = ""
            if self._is_wanted and not self._is_ended:
                self._set("waiting")
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, MOST_WAIT_S)
        self._set("gone")

    async def _live(self) -> None:
        """One epoch."""
        self._is_ended = False
        folder = Path(self._launch.folder)
        try:
            process = await self._launcher.start(self._launch_of_epoch(), self._node.environment(self.id))
        except OSError as error:
            log.error("replica %d cannot be started: %s", self.id, error.strerror)
            return
        self._process = process
        self._set("starting")
        said = await process.receive()
        if isinstance(said, messages.ChildReady):
            self.info, self.failed = said.info, None
            self._set("running")
        elif isinstance(said, Failed):
            self.failed = said
        else:
            self.failed = Failed(f"replica {self.id} ended while it was starting")
        code = await process.wait()
        self._process = None
        note = step_file(folder, self.id, self.epoch)
        blamed = read_step(note)
        with contextlib.suppress(OSError):
            note.unlink()
        is_crash = not self._is_ended and code not in (0, children.REFUSED, children.FENCED)
        self._exited(messages.Exited(self.id, self.epoch, _why(code), is_crash, blamed))

    def _launch_of_epoch(self) -> children.Launch:
        settings = self._node.settings(self.id)
        role = f"r{self.id}"
        journal, trace = settings.journal, settings.cache.trace
        if journal is not None:
            journal = journal_name(journal, role, self.epoch)
        if trace is not None:
            trace = journal_name(trace, role, self.epoch)
        engine = dataclasses.replace(
            settings,
            journal=journal,
            cache=dataclasses.replace(settings.cache, trace=trace),
            # The registry says which adapters there are.
            adapters=AdapterSettings(
                max_adapter_rank=settings.adapters.max_adapter_rank,
                store=settings.adapters.store,
                store_bytes=settings.adapters.store_bytes,
            ),
        )
        return msgspec.structs.replace(self._launch, id=self.id, epoch=self.epoch, engine=engine)

    def _set(self, state: str) -> None:
        self.state = state
        self._changed()

    def kill(self, epoch: int) -> None:
        """The replica of this epoch must not serve any more."""
        if epoch == self.epoch and self._process is not None:
            self._is_ended = True
            self._process.kill()

    async def end(self) -> None:
        """Nothing is to run here any more."""
        self._is_wanted = False
        process = self._process
        if process is None:
            return
        self._is_ended = True
        self._set("stopping")
        process.stop()
        try:
            await asyncio.wait_for(asyncio.shield(process.wait()), STOP_S)
        except TimeoutError:
            process.kill()


def raise_if_failed(failed: Failed) -> None:
    """A start that has failed by the user's settings. Raises ConfigError."""
    if failed.is_user_error:
        raise ConfigError(failed.message)


def _why(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"
