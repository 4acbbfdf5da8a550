"""Hints to add replicas or to remove them: Punica's rule (§5.1), with a delay both ways."""

from __future__ import annotations

from manylora.config.routing import RouterConfig
from manylora.protocol.routing import ScaleHint
from manylora.router.fleet import Fleet
from manylora.router.replicas import ReplicaState

_LOOKED_AT = 8
"""How many replicas of least load are searched for a lightly loaded one."""
_MEAN_PROMPT_TOKENS = 256


class ScaleHints:
    """The hints: one more if no replica was lightly loaded for ``scale_up_s``; one fewer if one was empty, and
    another lightly loaded, for ``scale_down_s``.

    ``scale_down_s`` also passes from each hint to the next.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._busy_from_s: float | None = None
        self._empty_from_s: float | None = None
        self._hinted_s = float("-inf")

    def tick(self, view: Fleet, num_queued: int) -> ScaleHint | None:
        """Return a hint for the present cluster, if it is due."""
        light = self._light(view)
        if num_queued and not light:
            return self._want_more(view, "requests wait at the router")
        if view.up and not light:
            return self._want_more(view, "no replica is lightly loaded")
        self._busy_from_s = None
        empty = [replica for replica in light if not replica.requests]
        if not empty or len(light) < 2 or num_queued:
            self._empty_from_s = None
            return None
        if self._empty_from_s is None:
            self._empty_from_s = view.now
        if not self._is_due(view, self._empty_from_s, self._config.scale_down_s):
            return None
        self._empty_from_s, self._hinted_s = None, view.now
        return ScaleHint(-1, "a replica is empty", empty[-1].id)

    def _want_more(self, view: Fleet, reason: str) -> ScaleHint | None:
        self._empty_from_s = None
        if self._busy_from_s is None:
            self._busy_from_s = view.now
        if not self._is_due(view, self._busy_from_s, self._config.scale_up_s):
            return None
        self._busy_from_s, self._hinted_s = view.now, view.now
        return ScaleHint(1, reason)

    def _is_due(self, view: Fleet, since_s: float, delay_s: float) -> bool:
        return view.now - since_s >= delay_s and view.now - self._hinted_s >= self._config.scale_down_s

    def _light(self, view: Fleet) -> list[ReplicaState]:
        """Return the least loaded replicas with less than half of their rows, and room for a mean request."""
        found = (view.up[replica] for replica in view.by_load.least(_LOOKED_AT))
        return [
            replica
            for replica in found
            if 2 * replica.rows < replica.facts.max_seqs
            and replica.free_pages * replica.facts.page_tokens >= _MEAN_PROMPT_TOKENS + view.lengths.mean
        ]
