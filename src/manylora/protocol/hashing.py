"""Computes hashes that are the same in every process: of numbers, of prompts' blocks and of replies."""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence

from manylora.protocol.routing import BLOCK_TOKENS
from manylora.types import AdapterId

_MASK = 2**64 - 1


def hash_number(number: int) -> int:
    """Hash a number to 64 bits, each of which depends on all bits of the number (splitmix64)."""
    mixed = (number + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


BLOCK_BYTES = 8 * BLOCK_TOKENS


def prefix_hashes(adapter: AdapterId, cache_scope: str, tokens: Sequence[int]) -> tuple[int, ...]:
    """Hash each full block of a prompt together with all blocks before it, as in ``Asked.prefix``."""
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
    """Hash the full blocks that a reply completes after those of the prompt. The reply's last token has no
    KV: no step computes it. ``prefix``: the prompt's own hashes where they are known, since hashing a long
    prompt takes long."""
    known = prefix_hashes(adapter, cache_scope, prompt) if prefix is None else prefix
    last = known[-1] if known else prefix_root(adapter, cache_scope.encode())
    return _chain(last, (*prompt[len(known) * BLOCK_TOKENS :], *reply[:-1]))


def prefix_root(adapter: AdapterId, cache_scope: bytes) -> int:
    """Return the hash from which the first block's hash starts."""
    return _digest(adapter.to_bytes(8, "little", signed=True) + cache_scope)


def block_hash(before: int, cells: bytes) -> int:
    """Hash a block's tokens, 8 bytes each in the machine's order, together with the hash of the blocks before
    it."""
    return _digest(before.to_bytes(8, "little") + cells)


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
