"""Work cut into jobs that several threads share. Knows nothing of adapters. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

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
