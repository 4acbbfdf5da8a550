"""Solves dLoRA's programme (§5.2) with HiGHS, in a child process.

The process is separate because HiGHS holds memory and ignores interrupts. The rows and columns are the
paper's relaxation: a request may be divided among replicas (x is real), an adapter is at a replica or is not
(y is binary). For each adapter and replica, one row n y >= the sum of the x of its n requests replaces the
paper's n rows y >= x. As y is binary, the two are equivalent. A search runs on one thread and ends by its gap
or its number of nodes, never by a clock, so equal programmes have equal answers. The process starts with the
first programme, solves the following ones too, and ends with its parent.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

from manylora import processes
from manylora.config.declaring import ConfigError
from manylora.protocol.routing import Solve, Solved
from manylora.types import AdapterId

MOST_NODES = 1000
"""Nodes of the search tree after which a search ends."""
LEAST_GAP = 0.01
"""Relative gap to the best possible value at which a search ends: 1 %."""
_DIGITS = 6


class ProgrammeModel:
    """A programme as a HiGHS model.

    Its columns are, in order: the share of each request at each replica, request by request; whether each
    adapter is at each replica, adapter by adapter; the pages above each replica's limit; and the time T in
    seconds until the last replica is done, which is minimised.
    """

    def __init__(self, problem: Solve, most_nodes: int = MOST_NODES, least_gap: float = LEAST_GAP) -> None:
        import highspy  # not at the top: it takes long, and only the child needs it

        self.highs = highspy.Highs()
        options = {
            "output_flag": False, "threads": 1, "parallel": "off", "random_seed": 0, "mip_rel_gap": least_gap,
            "mip_abs_gap": 0.0, "mip_max_nodes": most_nodes,
        }  # fmt: skip
        for name, value in options.items():
            self.highs.setOptionValue(name, value)
        self._problem = problem

        self._places = places = range(len(problem.replicas))
        num_shares = len(problem.requests) * len(places)
        num_columns = num_shares + len(problem.adapters) * len(places)
        self.highs.addVars(num_columns, [0.0] * num_columns, [1.0] * num_columns)
        for column in range(num_shares, num_columns):
            self.highs.changeColIntegrality(column, highspy.HighsVarType.kInteger)
        first_over, last = num_columns, num_columns + len(places)
        for _ in range(len(places) + 1):
            self.highs.addVar(0.0, highspy.kHighsInf)
        self.highs.changeColCost(last, 1.0)

        of_adapter: dict[AdapterId, list[int]] = collections.defaultdict(list)
        for request, each in enumerate(problem.requests):
            of_adapter[each.adapter].append(request)
            self._row(1.0, 1.0, [(self.share(request, place), 1.0) for place in places])
        for place, replica in enumerate(problem.replicas):
            seconds, pages = [], []
            for request, each in enumerate(problem.requests):
                column = self.share(request, place)
                seconds.append((column, each.run_s + (each.move_s if each.source != place else 0.0)))
                pages.append((column, float(each.pages)))
            for number, (adapter, size) in enumerate(problem.adapters):
                column = num_shares + number * len(places) + place
                seconds.append((column, problem.eta_s))
                pages.append((column, float(size)))
                shares = [(self.share(request, place), -1.0) for request in of_adapter[adapter]]
                self._row(0.0, highspy.kHighsInf, [(column, float(len(shares))), *shares])
            over = first_over + place
            self._row(-highspy.kHighsInf, float(replica.pages), [*pages, (over, -1.0)])
            self._row(-highspy.kHighsInf, 0.0, [*seconds, (over, replica.page_s), (last, -1.0)])

    def share(self, request: int, place: int) -> int:
        """Return the column of a request's share at a replica."""
        return request * len(self._places) + place

    def solve(self) -> Solved:
        """Return the shares, and the least value in seconds that any plan can have.

        There are no shares where the search found no solution.
        """
        highs, number = self.highs, self._problem.number
        highs.run()
        solution = highs.getSolution()
        if not solution.value_valid:
            return Solved(number)
        values = [min(max(round(value, _DIGITS), 0.0), 1.0) for value in solution.col_value]
        shares = tuple(
            tuple(values[self.share(request, place)] for place in self._places)
            for request in range(len(self._problem.requests))
        )
        return Solved(number, shares, max(float(highs.getInfo().mip_dual_bound), 0.0))

    def _row(self, least: float, most: float, entries: Sequence[tuple[int, float]]) -> None:
        """Add the row ``least`` <= sum of each column times its number <= ``most``."""
        columns, numbers = [column for column, _ in entries], [number for _, number in entries]
        self.highs.addRow(least, most, len(entries), columns, numbers)


def solve(problem: Solve) -> Solved:
    """Solve a programme in this process."""
    return ProgrammeModel(problem).solve()


START_S = 30.0
"""Seconds that the child has to start, beside the time for a solution."""


def solver_is_there() -> bool:
    """Return whether HiGHS is installed (``pip install 'manylora[cluster]'``)."""
    return importlib.util.find_spec("highspy") is not None


@contextlib.contextmanager
def solving() -> Iterator[Callable[[Solve], Solved] | None]:
    """Yield a function that solves programmes while the context lasts, or None without HiGHS."""
    if not solver_is_there():
        yield None
        return
    with contextlib.closing(SolverProcess()) as solver:
        yield solver.solve


class SolverProcess:
    """A child process that solves one programme at a time.

    ``solve`` blocks, so an event loop calls it on another thread. ``wait_s``: seconds after which a search is
    given up and its process killed; None: never, so that an answer does not depend on the speed of the
    machine.
    """

    def __init__(self, wait_s: float | None = None) -> None:
        """Raise ConfigError if HiGHS is not installed. The first ``solve`` starts the process."""
        if not solver_is_there():
            raise ConfigError("dLoRA's programme is solved by highspy: pip install 'manylora[cluster]'")
        self._wait_s = wait_s
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None

    def solve(self, problem: Solve) -> Solved:
        """Return the answer, without shares where it did not come in time or the process ended."""
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
        """Kill the process, even during a search. Idempotent. The next programme starts another process."""
        child, pipe, self._child, self._pipe = self._child, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        if child is not None:
            child.kill()
            child.wait()

    def _start(self) -> Connection[Any, Any]:
        # Not multiprocessing: its children run the caller's main module again or inherit its threads' locks.
        self._pipe, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            self._child = processes.start("manylora.solving", str(number), pass_fds=[number])
        if not self._pipe.poll(START_S):
            raise OSError("the solver does not start")
        self._pipe.recv()
        return self._pipe


def main() -> None:
    """Run the child: answer programmes until the parent has closed its end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes its end
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):
        pipe.send("ready")
        while True:
            pipe.send(solve(pipe.recv()))


if __name__ == "__main__":
    main()
