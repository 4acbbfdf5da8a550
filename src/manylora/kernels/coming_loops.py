"""Loops for the CPU that are compiled while torch serves: a first start need not wait for them.

Owns the process that compiles them, since Numba holds the interpreter meanwhile. What it compiles is kept on disk,
where this process finds it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

from manylora import processes
from manylora.kernels import compiled
from manylora.kernels.cpu_compiled import CompiledOps

_log = logging.getLogger(__name__)


class ComingOps(CompiledOps):
    """Ready at once where the loops have been compiled before; else later, which one line of the log says."""

    def __init__(self) -> None:
        is_kept = compiled.are_kept()
        super().__init__(waits=is_kept)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if not is_kept:
            self._thread = threading.Thread(target=self._compile, name="manylora-loops", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Torch or loops, whichever serves by now. Ends the compiler. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
        if self._thread is not None:
            self._thread.join()

    def _compile(self) -> None:
        began_s = time.monotonic()
        try:
            with self._lock:
                if self._is_closed:
                    return
                # It ends when its input does: when this process ends, however that comes.
                self._process = processes.start(
                    "manylora.kernels.coming_loops", stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            with self._process:
                self._process.wait()
            if self._is_closed:
                return
            self.use_loops()  # what could not be kept on disk is compiled here
        except Exception as error:  # Numba's own, and the system's
            _log.warning("torch serves, not compiled loops: %s", str(error).strip().partition("\n")[0])
            return
        _log.info(
            "compiled loops serve steps from now on: ready after %.1f s, torch served until then",
            time.monotonic() - began_s,
        )


def _main() -> None:
    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    CompiledOps()


if __name__ == "__main__":
    _main()
