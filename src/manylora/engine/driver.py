"""An engine: a replica, its ports, and what others ask of it. Knows the real clock so that nothing else has to."""

from __future__ import annotations

import concurrent.futures
import math
import queue
import time
from collections.abc import Callable

from manylora.config import PolicyConfig
from manylora.engine.client import Delta, EngineDead, EngineStats, GenerationRequest
from manylora.engine.journal import JournalWriter
from manylora.engine.lines import TraceWriter
from manylora.engine.loop import Loop
from manylora.engine.ports import EnginePorts
from manylora.policy.replica import Replica
from manylora.protocol import Abort, Executor, Keep, LetGo, Status
from manylora.reports import AdapterUse
from manylora.types import AdapterCard, AdapterId, EngineInfo, RequestId


class Driver(Loop):
    """Runs one replica on one executor. Public methods may be called from any thread."""

    _ports: EnginePorts

    def __init__(
        self,
        config: PolicyConfig,
        executor: Executor,
        info: EngineInfo,
        *,
        journal: JournalWriter | None = None,
        trace: TraceWriter | None = None,
        step_timeout_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``step_timeout_s``: an engine whose step takes longer is taken for lost where it is watched."""
        self.info = info
        self.step_timeout_s = step_timeout_s
        inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        ports = EnginePorts(config, executor, info, inbox, clock, trace)
        super().__init__(Replica(config), ports, inbox, clock=clock, journal=journal)

    def start(
        self,
        deliver: Callable[[list[Delta]], None],
        died: Callable[[str], None],
        *,
        is_watched: bool = False,
    ) -> None:
        """Start the loop's thread, and with ``is_watched`` one that gives the loop up where a step takes longer
        than ``step_timeout_s``.

        ``deliver`` is called on the loop's thread with the news of each round; ``died`` with the reason if the
        loop ends by itself.
        """
        self._ports.deliver_to(deliver)
        self.run(died, self.step_timeout_s if is_watched else None)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; an unknown adapter is answered by a Delta with status 404."""
        self._inbox.put(request)

    def abort(self, request: RequestId, sample: int | None, reason: str) -> None:
        self._inbox.put(Abort(request, sample, reason))

    def withdraw(self, request: RequestId, attempt: int = 0) -> None:
        """Let an attempt at a request go for another engine: its open samples end as RELEASED after the tokens
        of the steps in flight. Unknown: ignored."""
        self._inbox.put(LetGo(request, attempt))

    def keep(self, adapter: AdapterId, is_kept: bool) -> None:
        """Have a copy of the version stay on the device, or not any more; see ``Keep``."""
        self._inbox.put(Keep(adapter, is_kept))

    def add_adapter(
        self, name: str, path: str, *, verify: bool = True, adapter: AdapterId | None = None
    ) -> AdapterCard:
        """Check and serve an adapter; reads its files on the caller's thread. Raises AdapterError, and EngineDead.

        Without ``verify`` only headers are read: for thousands of adapters at start-up. ``adapter``: the version's
        id, where others number versions; never given twice, whatever became of the first one.
        """
        if self.end is not None:
            raise EngineDead(self.end)
        return self._ports.catalog.add(name, path, verify, adapter)

    def remove_adapter(self, name: str, version: AdapterId | None = None) -> concurrent.futures.Future[None]:
        """Stop serving a name, or a version of those that others number, at once; the future is done when nothing
        of it is left."""
        freed = self._ports.catalog.remove(name, version)
        self._abandon_if_ended()
        return freed

    @property
    def most_adapter_pages(self) -> int:
        """How many pages of its pool one adapter may take."""
        return self._ports.catalog.most_pages

    def adapters(self) -> tuple[AdapterCard, ...]:
        return self._ports.catalog.cards()

    def stats(self) -> concurrent.futures.Future[EngineStats]:
        """A snapshot taken between two steps. ``adapters`` is empty there: ``adapter_uses`` has them."""
        future = self._ports.ask_stats()
        self._abandon_if_ended()
        return future

    def status(self, is_full: bool = False) -> concurrent.futures.Future[Status]:
        """What a router is to know, between two steps: changes since the last call, or all where ``is_full``. One
        caller at a time, or changes go to another."""
        future = self._ports.ask_status(is_full)
        self._abandon_if_ended()
        return future

    def adapter_uses(self) -> tuple[AdapterUse, ...]:
        """Every served adapter at the moment of the newest snapshot. O(adapters), none of it on the loop."""
        return self._ports.adapter_uses()

    def _abandon_if_ended(self) -> None:
        """What was just put into the inbox waits for an answer, and the loop may have ended a moment ago."""
        if self.end is not None:
            self.abandon()
