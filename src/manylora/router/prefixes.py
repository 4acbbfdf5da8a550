"""The index of prefixes by replica, from the prompts sent there: an approximation that evictions correct.

Owns a bounded memory of block hashes. A hash stands for its block and all before it, under one adapter version
and cache scope, so equal hashes are equal KV.
"""

from __future__ import annotations

from collections.abc import Sequence

from manylora.router.replicas import ReplicaState

_MOST_HOLDERS = 4
"""The most replicas of one block; the latest stay."""


class Prefixes:
    """Two generations of hashes: when the younger is full the older is dropped; a hash that is used stays
    young."""

    def __init__(self, most_blocks: int) -> None:
        self._most_young = max(most_blocks // 2, 1)
        self._young: dict[int, tuple[ReplicaState, ...]] = {}
        self._old: dict[int, tuple[ReplicaState, ...]] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, prefix: Sequence[int], replica: ReplicaState) -> int:
        """Add a prompt that was sent to a replica; return how many of its first blocks were there already."""
        young, old = self._young, self._old
        alone = (replica,)
        num_there, is_there = 0, True
        for block in prefix:
            holders = young.get(block)
            if holders is None:
                holders = old.pop(block, None) if old else None
            is_there = is_there and holders is not None and replica in holders
            num_there += is_there
            if not holders:
                young[block] = alone
            elif holders[-1] is not replica:
                others = [holder for holder in holders if holder is not replica and holder.is_up]
                young[block] = (*others[-_MOST_HOLDERS + 1 :], replica)
            elif block not in young:
                young[block] = holders
        if len(young) > self._most_young:
            self._old, self._young = young, {}
        return num_there

    def evict(self, blocks: Sequence[int], replica: ReplicaState) -> None:
        """Remove blocks that the replica has lost."""
        for block in blocks:
            for generation in (self._young, self._old):
                holders = generation.get(block)
                if holders is not None and replica in holders:
                    left = tuple(holder for holder in holders if holder is not replica)
                    if left:
                        generation[block] = left
                    else:
                        del generation[block]

    def match(self, prefix: Sequence[int], most: int) -> dict[ReplicaState, int]:
        """Return the open replicas with the longest parts of a prompt, each with its number of blocks, longest
        first."""
        young, old = self._young, self._old
        levels: list[tuple[ReplicaState, ...]] = []
        for block in prefix:
            holders = young.get(block) or old.get(block)
            if holders is None:
                break
            levels.append(holders)
        found: dict[ReplicaState, int] = {}
        last: tuple[ReplicaState, ...] | None = None
        for depth in range(len(levels), 0, -1):
            holders = levels[depth - 1]
            if holders is last:
                continue
            last = holders
            for holder in reversed(holders):
                if holder.is_open and holder not in found:
                    found[holder] = depth
                    if len(found) == most:
                        return found
        return found

    def cached_blocks(self, prefix: Sequence[int], replica: ReplicaState) -> int:
        """Return how many of a prompt's first blocks the replica has."""
        young, old = self._young, self._old
        count = 0
        for block in prefix:
            holders = young.get(block) or old.get(block)
            if holders is None or replica not in holders:
                break
            count += 1
        return count
