"""What has become of a process, as the system sees it.

So a rank that is stopped is told from one that is busy, whatever the rank itself can say: no compilation, no long
prompt and no loaded machine looks like it.
"""

from __future__ import annotations

from collections.abc import Sequence

from manylora.processes import is_stopped

LOOK_S = 0.5
STOPPED_LOOKS = 10
"""A process that was stopped at so many looks in a row is lost. Looks, not seconds: where all processes are
stopped together, the one that looks is, too."""


class StoppedProcesses:
    """Looks at processes, every ``LOOK_S``, for one that is stopped and stays so."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._stopped = [0] * len(pids)

    def look(self) -> int | None:
        """Which of them is lost, by its place."""
        for place, pid in enumerate(self._pids):
            self._stopped[place] = self._stopped[place] + 1 if is_stopped(pid) else 0
        return next((place for place, looks in enumerate(self._stopped) if looks >= STOPPED_LOOKS), None)
