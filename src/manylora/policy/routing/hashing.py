"""Numbers that look like chance and are the same in every process: hashes of what they are asked for."""

from __future__ import annotations

import hashlib

_MASK = 2**64 - 1


def hash_text(text: str, counter: int = 0) -> int:
    """64 bits for a text; ``counter`` gives others for the same one."""
    digest = hashlib.blake2b(f"{counter} {text}".encode("utf-8", "replace"), digest_size=8)
    return int.from_bytes(digest.digest(), "big")


def hash_number(number: int) -> int:
    """64 bits for a number, each of which depends on all of its own (splitmix64)."""
    mixed = (number + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
