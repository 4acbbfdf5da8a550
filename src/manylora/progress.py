"""Sets up the log and the progress bars that people see on stderr."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from manylora.config.declaring import ConfigError

if TYPE_CHECKING:
    from tqdm import tqdm

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging() -> None:
    """Log each event as a line on stderr. MANYLORA_LOG_LEVEL sets the level. Raises ConfigError where it
    names none."""
    level = os.environ.get("MANYLORA_LOG_LEVEL", "INFO").upper()
    levels = logging.getLevelNamesMapping()
    if level not in levels:
        raise ConfigError(f"MANYLORA_LOG_LEVEL must be one of {', '.join(levels)}, got {level!r}")
    logging.basicConfig(stream=sys.stderr, level=level, format=_LOG_FORMAT)


def announce_compilation() -> None:
    """Log to stderr when kernels are compiled for this GPU, which takes minutes the first time."""
    logging.basicConfig(stream=sys.stderr, format=_LOG_FORMAT)
    logging.getLogger("manylora.kernels").setLevel(logging.INFO)


class Bar:
    """A progress bar on a terminal, silent elsewhere. Call it with (done, total), in bytes unless a ``unit``
    is given."""

    def __init__(self, what: str, unit: str = "B") -> None:
        self._what = what
        self._unit = unit
        self._bar: tqdm[Any] | None = None

    def __call__(self, done: int, total: int) -> None:
        bar = self._bar
        if bar is None:
            from tqdm import tqdm  # imported late: the command line needs this module even without tqdm

            # With disable=None the bar shows only where stderr is a terminal.
            bar = tqdm(
                total=total,
                desc=self._what,
                unit=self._unit,
                unit_scale=self._unit == "B",
                file=sys.stderr,
                disable=None,
                leave=False,
            )
            self._bar = bar
        bar.update(done - bar.n)
        if done >= total:
            bar.close()
