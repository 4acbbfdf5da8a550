"""Triton's interpreter, made quicker: a third of its time goes into listing what ``triton.language`` has, for each
call of every function of a kernel."""

from __future__ import annotations

import functools
import inspect
from typing import Any


def remember_builtins() -> None:
    """List each module's and class's builtins once. Does nothing where Triton is not installed."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return

    @functools.cache
    def builtins_of(owner: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]

    def patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins_of(owner):
            if getattr(owner, name) is member:  # and not what a calling function has put there
                interpreter._patch_attr(owner, name, member, builder, scope)

    for owner in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        builtins_of(owner)  # while all of them are builtins
    interpreter._patch_builtin = patch_builtin
