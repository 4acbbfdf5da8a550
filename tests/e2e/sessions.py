"""Processes of tests in sessions of their own, with all that they start, which end when the tests' process does.

However that ends: a test may run into pytest's own limit while it waits for a thread, and pytest be killed. Run as
a program this is the guard: it is told of sessions by its standard input, and ends what is left when that ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def started(args: list[str], **options: Any) -> subprocess.Popen[Any]:
    """A process that is the first of a session; ``end`` it."""
    process: subprocess.Popen[Any] = subprocess.Popen(args, start_new_session=True, **options)
    _tell(f"{process.pid}\n")
    return process


def end(process: subprocess.Popen[Any]) -> None:
    """Kill all of its session, and wait for it."""
    _kill({process.pid})
    process.wait()
    _tell(f"-{process.pid}\n")


def pids_of(sessions: set[int]) -> list[int]:
    """Of all processes there that are no zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # Of "pid (name) state ppid pgrp session ...": a name may have brackets itself.
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) in sessions and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


def _kill(sessions: set[int]) -> None:
    """One may start another meanwhile."""
    while pids := pids_of(sessions):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


@functools.cache
def _guard(pid: int) -> subprocess.Popen[str]:
    """Of this process; one that was forked off has another."""
    args = [sys.executable, "-S", "-E", __file__]
    null = subprocess.DEVNULL
    return subprocess.Popen(
        args, stdin=subprocess.PIPE, stdout=null, stderr=null, text=True, bufsize=1, start_new_session=True
    )


def _tell(line: str) -> None:
    stream = _guard(os.getpid()).stdin
    assert stream is not None
    stream.write(line)


def main() -> None:
    """Be the guard."""
    sessions = set()
    for line in sys.stdin:
        if line.startswith("-"):
            sessions.discard(int(line[1:]))
        else:
            sessions.add(int(line))
    _kill(sessions)


if __name__ == "__main__":
    main()
