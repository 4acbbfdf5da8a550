"""Compiles kernels into Triton's cache for another process, which sends a line for each and gets a line back.

Runs as a process of its own, which needs no device and ends when its input ends.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class _NoDevice:
    """A stand-in for Triton's driver, with what compiling reads of it: one device of the given target."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def compile_one(order: dict[str, Any]) -> None:
    """Compile the kernel that ``order`` describes into Triton's cache. Raises whatever the compiler raises.

    ``order`` has the kernel's ``module`` and ``name``; ``data``, the call in the form that
    ``JITFunction.preload`` reads; and ``target``: backend, architecture and warp size.
    """
    driver.set_active(_NoDevice(GPUTarget(*order["target"])))
    kernel: Any = getattr(importlib.import_module(order["module"]), order["name"])
    kernel.preload(order["data"])


def main() -> None:
    """Compile the order in each input line, and print an empty JSON string or the reason for the failure."""
    for line in sys.stdin:
        error = ""
        try:
            compile_one(json.loads(line))
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}".partition("\n")[0]
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
