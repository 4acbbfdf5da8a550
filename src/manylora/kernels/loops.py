"""How Numba compiles loops: on first use, kept on disk where that can be, and the process's meter is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import event

from manylora.devices.preparation import PREPARATION

_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}

Loop = TypeVar("Loop", bound=Callable[..., Any])


class _Reporter(event.Listener):  # type: ignore[misc]  # numba has no types
    """Tells the process's meter when Numba compiles: also later, for arguments of new types."""

    def on_start(self, _: event.Event) -> None:
        PREPARATION.begin()

    def on_end(self, _: event.Event) -> None:
        PREPARATION.end()


event.register("numba:compile", _Reporter())


def loop(function: Loop) -> Loop:
    """Compiled, without the GIL, and without looking at the bounds of arrays."""
    return _compiled(function)


def fast_loop(function: Loop) -> Loop:
    """The same, where sums of floats may be taken in any order."""
    return _compiled(function, fastmath=True)


def _compiled(function: Loop, **more: Any) -> Loop:
    try:
        return cast(Loop, numba.njit(**_OPTIONS, **more, cache=True)(function))
    except RuntimeError:  # there is no folder that may be written to
        return cast(Loop, numba.njit(**_OPTIONS, **more)(function))
