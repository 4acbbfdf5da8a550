"""A process that solves dLoRA's programmes: HiGHS holds memory and ignores interrupts, so it can be ended.

Owns the child. It is started with the first programme, lives from one to the next, and ends with its parent,
whose end of the pipe is then closed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any

from manylora import processes
from manylora.config import ConfigError
from manylora.protocol.routing import Solve, Solved

START_S = 30.0
"""For the child to be there, beside what a solution may take."""


def solver_is_there() -> bool:
    """Whether HiGHS is installed (``pip install 'manylora[cluster]'``)."""
    return importlib.util.find_spec("highspy") is not None


@contextlib.contextmanager
def solving(wait_s: float | None = None) -> Iterator[Callable[[Solve], Solved] | None]:
    """What solves programmes as long as the context lasts; None without HiGHS."""
    if not solver_is_there():
        yield None
        return
    solver = SolverProcess(wait_s)
    try:
        yield solver.solve
    finally:
        solver.close()


class SolverProcess:
    """One programme at a time; ``solve`` blocks, so a loop calls it on another thread. ``wait_s``: after
    which a search is given up and its process ended; None: never, so that an answer does not depend on how
    fast the machine is."""

    def __init__(self, wait_s: float | None = None) -> None:
        """Raises ConfigError without HiGHS."""
        if not solver_is_there():
            raise ConfigError("dLoRA's programme is solved by highspy: pip install 'manylora[cluster]'")
        self._wait_s = wait_s
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None

    def solve(self, problem: Solve) -> Solved:
        """The answer; without shares where none came in time, or the process ended."""
        try:
            pipe = self._pipe or self._start()
            pipe.send(problem)
            if pipe.poll(self._wait_s):
                answer = pipe.recv()
                assert isinstance(answer, Solved)
                return answer
        except (OSError, EOFError):
            pass
        self.close()
        return Solved(problem.number)

    def close(self) -> None:
        """End the process, whatever it does. Idempotent; the next programme starts another."""
        child, pipe, self._child, self._pipe = self._child, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        if child is not None:
            child.kill()
            child.wait()

    def _start(self) -> Connection[Any, Any]:
        # multiprocessing's own children run the caller's main module again, or have its threads' locks.
        self._pipe, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            self._child = processes.start("manylora.solving.process", str(number), pass_fds=[number])
        if not self._pipe.poll(START_S):
            raise OSError("the solver does not start")
        self._pipe.recv()
        return self._pipe


def main() -> None:
    """The child: answers until the parent has closed its end."""
    from manylora.solving.highs import solve

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the parent, which closes its end
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):
        pipe.send("ready")
        while True:
            pipe.send(solve(pipe.recv()))


if __name__ == "__main__":
    main()
