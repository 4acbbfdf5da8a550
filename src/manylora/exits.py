"""What becomes of engines in process at the interpreter's exit. Does not know what an engine is."""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import Protocol


class Closes(Protocol):
    """Something that is to be closed."""

    def close(self) -> None:
        """End it and free what it holds. Idempotent."""


_open: weakref.WeakSet[Closes] = weakref.WeakSet()
_is_exiting = threading.Event()


def close_at_exit(engine: Closes) -> None:
    """Close the engine at exit, where it is still there: finalizers have all had their turn by then."""
    _open.add(engine)


def wait_at_exit() -> None:
    """At exit a daemon thread has no caller to raise to: it waits for the end that is coming."""
    if _is_exiting.is_set() and threading.current_thread().daemon:
        threading.Event().wait()


def _exit() -> None:
    """End the engines, and raise nothing: only daemon threads can still wait for one."""
    _is_exiting.set()
    for engine in list(_open):
        engine.close()


atexit.register(_exit)
