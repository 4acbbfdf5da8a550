"""Counters by which the last program to arrive is known; every kernel leaves them at zero."""

from __future__ import annotations

import torch

_LEAST = 1 << 16


class LaunchCounters:
    """int32 zeros of one device, shared by launches that are ordered on it.

    Taken for the first time outside of capture. Those that became too few live on, since captured graphs know
    their address.
    """

    def __init__(self) -> None:
        self._all: list[torch.Tensor] = []

    def take(self, count: int, device: torch.device) -> torch.Tensor:
        """At least ``count`` counters."""
        if not self._all or len(self._all[-1]) < count:
            self._all.append(torch.zeros(max(count, _LEAST), dtype=torch.int32, device=device))
        return self._all[-1]
