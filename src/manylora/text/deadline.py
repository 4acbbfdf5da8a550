"""An end to work that does not end by itself."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from manylora.types import InvalidRequest

_Result = TypeVar("_Result")


class _TooLate(BaseException):
    """Raised from outside; a base exception, so that the work does not take it for one of its own."""


def within(seconds: float, work: Callable[..., _Result], *args: Any) -> _Result:
    """Call ``work`` on this thread, not the main one; raises InvalidRequest where the work, in Python, takes
    longer."""
    thread, lock, is_over = threading.get_ident(), threading.Lock(), False

    def end() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TooLate))

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        try:
            return work(*args)
        finally:
            with lock:
                is_over = True
            timer.cancel()
    except _TooLate:
        raise InvalidRequest(f"the chat template takes longer than {seconds:g} s", "messages") from None
