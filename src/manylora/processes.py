"""Child processes that end with their parent, signals that end one in order, and what the system says of it.

Run as a program (``python -m manylora.processes PARENT MODULE ARGUMENT...``) this is the beginning of each child:
it asks the system to be killed when its parent ends, stopped or not, and then becomes the module.
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
"""Threads that only look at something stay below it for seconds."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def command(module: str, *arguments: str) -> list[str]:
    """The command line of a child that is the module and ends with this process. Only for the main thread: a
    child's parent is the thread that starts it."""
    return [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]


def start(module: str, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """Start a child that is the module and ends with this process; from any thread. ``options``: as of Popen.
    Raises OSError."""
    words = command(module, *arguments)
    if threading.current_thread() is threading.main_thread():
        return subprocess.Popen(words, **options)
    started: Future[subprocess.Popen[Any]] = Future()

    def run() -> None:
        """Start it on a thread that lasts as long as the child, since the caller's may end sooner."""
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
    """SIGTERM, SIGINT, and SIGHUP unless it is ignored, as it is where the process was started by nohup."""
    always = (signal.SIGTERM, signal.SIGINT)
    return always if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*always, signal.SIGHUP)


def at_parents_end(number: signal.Signals) -> None:
    """Get this signal when the parent ends, where the system knows how."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def _fields(pid: int) -> list[str]:
    """Read /proc/PID/stat from the state on; nothing where the system does not say."""
    try:
        # Of "pid (name) state ppid pgrp ...": a name may have brackets itself.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Tell whether a signal or a debugger has stopped the process. False where the system does not say."""
    return bool(found := _fields(pid)) and found[0] in "Tt"


def group_of(leader: int) -> list[int]:
    """The processes of a process group; none where the system does not say."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []
    return [pid for pid in pids if (found := _fields(pid)) and int(found[2]) == leader]


def effort(pids: Iterable[int]) -> float:
    """Measure the work of processes so far: seconds of computing, theirs and of children that have ended, and
    how often they read a page from a disk. What stays the same for long does nothing."""
    found = [fields for pid in pids if (fields := _fields(pid))]
    return sum(sum(map(int, each[11:15])) / _TICKS_PER_S + sum(map(int, each[9:11])) for each in found)


def main(parent: int, module: str, *arguments: str) -> None:
    """Be the child of this parent."""
    at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it has ended before
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
