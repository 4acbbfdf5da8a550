"""Runs any number of jobs, of which the engine knows a limited number at a time: the rest follow as these end.

Does not know what a job is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


async def run_all(
    jobs: Sequence[_Job],
    start: Callable[[_Job], Coroutine[Any, Any, _Result]],
    room: asyncio.Semaphore,
) -> list[_Result]:
    """The results in the order of the jobs.

    ``start`` submits a job at once and returns what waits for its result; it is called in order, as many at a time
    as ``room`` has. The first failure is raised, and what else runs then is cancelled.
    """
    running: list[asyncio.Task[_Result]] = []
    has_failed = False

    def ended(task: asyncio.Task[_Result]) -> None:
        nonlocal has_failed
        room.release()
        has_failed = has_failed or task.cancelled() or task.exception() is not None

    try:
        for job in jobs:
            # At once while there is room, so that jobs that come together start together.
            await room.acquire()
            if has_failed:
                room.release()
                break
            try:
                task = asyncio.create_task(start(job))
            except BaseException:
                room.release()
                raise
            task.add_done_callback(ended)
            running.append(task)
        return list(await asyncio.gather(*running))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
