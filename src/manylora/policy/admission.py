"""Which request is admitted next, which ones it is too late for (S-LoRA §4.3, §7.5), and how many may wait.

Owns the three admission policies; does not know what an admission takes, nor how a request is told of its end.
"""

from __future__ import annotations

from manylora.config import FIRST_STEP_S, PolicyConfig
from manylora.policy.queue import WaitingQueue
from manylora.policy.sequences import Sequence
from manylora.types import RequestError

KEPT = 0.7
"""How much of a moving average survives one observation. The authors' abort_req_queue.py keeps 0.3 and
truncates."""


class Admission:
    """``fcfs``: oldest first; ``lcfs``: newest first; ``early-abort``: what can still be served in time.

    A sequence that was admitted before comes first in all of them. Early abort is as in the authors' repository,
    of which the paper gives the idea: a round drops requests that have waited so long that, with
    ``FIRST_STEP_S`` for the step to come, their first token would miss the objective. Then it takes the newest
    first where the queue grows by as many as are admitted, else the oldest. ``growth`` averages, over rounds,
    how many more wait than after the last round that admitted any; ``admitted``, over those, how many it
    admitted.
    """

    def __init__(self, config: PolicyConfig, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        self._max_waiting = config.max_waiting
        self._objective_s = config.slo_ttft_s if config.admission == "early-abort" else None
        self._num_left = 0
        self.growth = 1.0
        self.admitted = 1.0
        waiting.is_newest_first = config.admission == "lcfs"

    def refusal(self) -> RequestError | None:
        """Why a request that comes at this moment cannot join the queue, if so."""
        if self._max_waiting is None or self._waiting.num_arrived < self._max_waiting:
            return None
        return RequestError(
            429, f"the queue is full: {self._waiting.num_arrived} requests wait; try again later"
        )

    def begin_round(self, now: float) -> list[Sequence]:
        """There is room in the step; sets the queue's order and returns the sequences for which it is too late."""
        self._waiting.age(now)
        if self._objective_s is None:
            return []
        self.growth = KEPT * self.growth + (1 - KEPT) * (len(self._waiting) - self._num_left)
        self._waiting.is_newest_first = self.growth >= self.admitted
        return self._waiting.arrived_until(now + FIRST_STEP_S - self._objective_s)

    def end_round(self, num_admitted: int) -> None:
        """Take note that so many were admitted."""
        if num_admitted and self._objective_s is not None:
            self.admitted = KEPT * self.admitted + (1 - KEPT) * num_admitted
            self._num_left = len(self._waiting)
