"""A process that compiles kernels into Triton's cache, for another: a line in for each, a line back.

Needs no device and takes none. Ends with its input.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class _NoDevice:
    """Of Triton's drivers what compiling asks for: one device, of this kind."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def compile_one(order: dict[str, Any]) -> None:
    """``order``: the kernel's ``module`` and ``name``, how it was called (``data``, as Triton writes that down for
    ``preload``), and the ``target`` (backend, architecture, warp size). Raises whatever the compiler raises."""
    driver.set_active(_NoDevice(GPUTarget(*order["target"])))
    kernel: Any = getattr(importlib.import_module(order["module"]), order["name"])
    kernel.preload(order["data"])


def main() -> None:
    """Answers each line: an empty text, or why it could not be."""
    for line in sys.stdin:
        error = ""
        try:
            compile_one(json.loads(line))
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}".partition("\n")[0]
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
