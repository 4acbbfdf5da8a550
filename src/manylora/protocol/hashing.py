"""Numbers that look like chance and are the same in every process: hashes of what they are asked for."""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence

from manylora.protocol.routing import BLOCK_TOKENS
from manylora.types import AdapterId

_MASK = 2**64 - 1


def hash_number(number: int) -> int:
    """64 bits for a number, each of which depends on all of its own (splitmix64)."""
    mixed = (number + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


BLOCK_BYTES = 8 * BLOCK_TOKENS


def prefix_hashes(adapter: AdapterId, cache_scope: str, tokens: Sequence[int]) -> tuple[int, ...]:
    """For each full block of a prompt its hash and that of all before it, as ``Asked.prefix`` has them."""
    return _chain(prefix_root(adapter, cache_scope.encode()), tokens)


def _chain(last: int, tokens: Sequence[int]) -> tuple[int, ...]:
    cells, found = array.array("q", tokens).tobytes(), []
    for start in range(0, len(cells) - BLOCK_BYTES + 1, BLOCK_BYTES):
        last = block_hash(last, cells[start : start + BLOCK_BYTES])
        found.append(last)
    return tuple(found)


def reply_hashes(
    adapter: AdapterId,
    cache_scope: str,
    prompt: Sequence[int],
    reply: Sequence[int],
    prefix: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Likewise for the full blocks that a reply has made after those of the prompt. No step computes its last
    token. ``prefix``: the prompt's own hashes, where they are known: of a long one they take long."""
    known = prefix_hashes(adapter, cache_scope, prompt) if prefix is None else prefix
    last = known[-1] if known else prefix_root(adapter, cache_scope.encode())
    return _chain(last, (*prompt[len(known) * BLOCK_TOKENS :], *reply[:-1]))


def prefix_root(adapter: AdapterId, cache_scope: bytes) -> int:
    """What stands before the first block."""
    return _digest(adapter.to_bytes(8, "little", signed=True) + cache_scope)


def block_hash(before: int, cells: bytes) -> int:
    """64 bits for a block's tokens, 8 bytes each in the machine's order, after those before it."""
    return _digest(before.to_bytes(8, "little") + cells)


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
