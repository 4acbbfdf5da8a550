"""Tells the process's meter when Triton compiles, which it does whenever a kernel is first called in a new way."""

from __future__ import annotations

import functools
from typing import Any

from triton import knobs

from manylora.devices.preparation import PREPARATION


@functools.cache
def report_compilation() -> None:
    """Count compilation from now on, beside whatever hooks are set already."""
    runtime = knobs.runtime
    before, after = runtime.jit_cache_hook, runtime.jit_post_compile_hook

    def begin(**what: Any) -> bool | None:
        PREPARATION.begin()
        return before(**what) if before else None

    def end(**what: Any) -> bool | None:
        PREPARATION.end()
        return after(**what) if after else None

    runtime.jit_cache_hook, runtime.jit_post_compile_hook = begin, end
