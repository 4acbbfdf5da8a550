"""The tasks of one owner on its event loop: none ends unseen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Tasks:
    """Keeps them alive. ``one_failed``: one has ended by an error, which is in the log."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.one_failed = asyncio.Event()

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin one."""
        task = asyncio.get_running_loop().create_task(work, name=getattr(work, "__qualname__", None))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """End all."""
        for task in self._tasks:
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s has failed", task.get_name(), exc_info=error)
            self.one_failed.set()
