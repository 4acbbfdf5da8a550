"""The places for replicas: starts what is to run there, and starts it again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from manylora.cluster import children, messages
from manylora.cluster.blame import read_step
from manylora.cluster.folder import step_file
from manylora.cluster.local import Launcher, NotStarted
from manylora.cluster.place import ProcessPlace
from manylora.cluster.recording import journal_name
from manylora.config import AdapterSettings, ConfigError
from manylora.engine.wire import Failed
from manylora.protocol.routing import ReplicaId
from manylora.types import EngineInfo

log = logging.getLogger(__name__)

SETTLED_S = 30.0
"""A replica that has run for so long is started again at once when it ends."""
STOP_S = 2.0


class ReplicaPlace:
    """One place. ``run`` keeps a replica there until ``end``. ``folder``: the cluster's, for the next start."""

    def __init__(
        self,
        replica: ReplicaId,
        epoch: int,
        launch: children.Launch,
        launcher: Launcher,
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
        self.why = ""
        self.folder = launch.folder
        self._launch = launch
        self._place = ProcessPlace(f"replica {replica}", launcher, launch.cluster.silence_s, SETTLED_S)
        self._changed = changed
        self._exited = exited
        self._is_wanted = True
        self._is_ended = False  # the present process, by this one

    def as_told(self) -> messages.Slot:
        """What the router is to know."""
        process = self._place.process
        pid = 0 if process is None else process.pid
        return messages.Slot(self.id, self.epoch, pid, self.state, self.drains_to, self.why)

    async def run(self) -> None:
        """Until ``end``."""
        while self._is_wanted:
            self.epoch += 1
            await self._live()
            self.drains_to = ""
            if self._is_wanted and not self._is_ended:
                self._set("waiting")
                await self._place.pause()
        self._set("gone")

    async def _live(self) -> None:
        """One epoch."""
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
        self._exited(messages.Exited(self.id, self.epoch, _why(code), is_crash, blamed))

    def _launch_of_epoch(self) -> children.Launch:
        settings = self._launch.engine
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
        return msgspec.structs.replace(
            self._launch, id=self.id, epoch=self.epoch, engine=engine, folder=self.folder
        )

    def _set(self, state: str) -> None:
        self.state = state
        self._changed()

    def kill(self, epoch: int) -> None:
        """The replica of this epoch must not serve any more."""
        if epoch == self.epoch and self._place.process is not None:
            self._is_ended = True
            self._place.process.kill()

    async def end(self) -> None:
        """Nothing is to run here any more."""
        self._is_wanted = False
        process = self._place.process
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
