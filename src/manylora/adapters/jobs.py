"""Work cut into jobs that several threads share. Knows nothing of adapters. No torch here."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from typing import Generic, TypeVar

_Scratch = TypeVar("_Scratch")


@dataclasses.dataclass(frozen=True)
class Helpers:
    """``count`` threads of a pool, which help the calling one. It waits for none that others keep busy."""

    threads: Executor | None = None
    count: int = 0


NO_HELPERS = Helpers()


def run_all(
    jobs: Iterable[Callable[[_Scratch], None]], helpers: Helpers, new_scratch: Callable[[], _Scratch]
) -> None:
    """Run them all, each on one thread, with what that thread keeps from one job to the next.

    Raises a job's error only when none runs any more: what they write to may go to others then.
    """
    left = iter(jobs)

    def work() -> None:
        scratch = new_scratch()
        for job in left:  # each goes to the first thread that asks
            try:
                job(scratch)
            except BaseException:
                for _ in left:  # no thread begins another job
                    pass
                raise

    helping: list[Future[None]] = []
    try:
        if helpers.threads is not None:
            helping.extend(helpers.threads.submit(work) for _ in range(helpers.count))
        work()
    finally:
        helping = [helper for helper in helping if not helper.cancel()]
        wait(helping)
    for helper in helping:
        helper.result()


class Stages(Generic[_Scratch]):
    """Jobs of one stage after another, which threads may end in another order."""

    def __init__(self, ended: Callable[[int], None]) -> None:
        """``ended``: told, on the thread that it happens on, how many stages have ended with all before them. It
        may have been told of more meanwhile."""
        self._tell = ended
        self._lock = threading.Lock()
        self._left: list[int] = []
        self._num_ended = 0

    def job(self, stage: int, job: Callable[[_Scratch], None]) -> Callable[[_Scratch], None]:
        """The job, as one of the stage; before any runs. Every stage has one."""
        self._left.extend([0] * (stage + 1 - len(self._left)))
        self._left[stage] += 1

        def run(scratch: _Scratch) -> None:
            job(scratch)
            with self._lock:
                self._left[stage] -= 1
                before = self._num_ended
                while self._num_ended < len(self._left) and not self._left[self._num_ended]:
                    self._num_ended += 1
                now = self._num_ended
            if now > before:
                self._tell(now)

        return run
