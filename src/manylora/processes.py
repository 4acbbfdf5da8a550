"""Starts child processes that end with their parent, and reads what the system reports of processes.

As a program (``python -m manylora.processes PARENT MODULE ARGUMENT...``) it is the beginning of each child.
It asks the system to kill it when its parent ends, even where a signal has stopped it. Then it runs the
module.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
LEAST_EFFORT = 0.05
"""The least increase of ``effort`` that counts as work. Threads that only poll stay below it for seconds."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def command(module: str, *arguments: str) -> list[str]:
    """Build the command line of a child that runs the module and ends with this process. Only for the main
    thread: a child's parent is the thread that starts it."""
    return [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]


def start(module: str, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """Start a child that runs the module and ends with this process; from any thread. ``options``: as for
    Popen. Raises OSError."""
    words = command(module, *arguments)
    if threading.current_thread() is threading.main_thread():
        return subprocess.Popen(words, **options)
    started: Future[subprocess.Popen[Any]] = Future()

    def run() -> None:
        """Start the child on a thread that lasts as long as the child, since the caller's thread may end
        sooner."""
        try:
            child = subprocess.Popen(words, **options)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(child)
        child.wait()

    threading.Thread(target=run, name="manylora-child", daemon=True).start()
    return started.result()


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return SIGTERM, SIGINT, and SIGHUP unless it is ignored, as under nohup."""
    always = (signal.SIGTERM, signal.SIGINT)
    return always if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*always, signal.SIGHUP)


def at_parents_end(number: signal.Signals) -> None:
    """Ask the system to send this signal when the parent ends, where it can."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def _fields(pid: int) -> list[str]:
    """Read the fields of /proc/PID/stat from the state on. Returns an empty list where the system gives none."""
    try:
        # The form is "pid (name) state ppid pgrp ...", and a name may contain brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped the process. False where the system does not report
    it."""
    return bool(found := _fields(pid)) and found[0] in "Tt"


def group_of(leader: int) -> list[int]:
    """List the processes of a process group. Returns an empty list where the system does not report it."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []
    return [pid for pid in pids if (found := _fields(pid)) and int(found[2]) == leader]


def effort(pids: Iterable[int]) -> float:
    """Measure the work of processes so far: their seconds of computing, those of their ended children, and
    the number of pages they read from a disk. A process whose effort stays the same for long does nothing."""
    found = [fields for pid in pids if (fields := _fields(pid))]
    return sum(sum(map(int, each[11:15])) / _TICKS_PER_S + sum(map(int, each[9:11])) for each in found)


def main(parent: int, module: str, *arguments: str) -> None:
    """Run the module as a child of this parent."""
    at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent has ended already
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
