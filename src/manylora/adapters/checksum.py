"""A checksum for error detection that costs little beside reading the bytes. No torch here.

Two sums, modulo 2^64, of all 8-byte words, each word times a number of its own; the words of the second sum begin
four bytes later. Damage within one word is always found, since the numbers are odd. So are two flipped bits: where
both are the same bit of their words and too high for the first sum, they are low in the second's, and there are no
two numbers whose sum or difference is 0 modulo 2^33. Other damage is missed with a chance of about 2^-64.
It is made against accidents alone.
"""

from __future__ import annotations

import numpy as np

MOST_BYTES = 2**20
"""What one checksum is of, at most."""

CHECKSUM = np.dtype([("words", "<u8"), ("shifted", "<u8")])

_WORD = np.dtype("<u8")
_HALF = _WORD.itemsize // 2


def _numbers(count: int) -> np.ndarray:
    """31 random bits above 33 that are odd and differ in every two of them, by no half of their range."""
    random = np.random.PCG64(0).random_raw(count) >> np.uint64(33)
    return np.asarray((random << np.uint64(33)) | (2 * np.arange(count, dtype=np.uint64) + np.uint64(1)))


NUMBERS = _numbers(MOST_BYTES // _WORD.itemsize + 1)
"""uint64: what each word is multiplied by. Not to be changed."""


def checksum(data: np.ndarray) -> tuple[int, int]:
    """Of contiguous bytes, MOST_BYTES at most. Leaves the interpreter to other threads meanwhile."""
    end = len(data) // _WORD.itemsize * _WORD.itemsize
    rest = int.from_bytes(data[end:].tobytes(), "little") * int(NUMBERS[end // _WORD.itemsize])
    words, shifted = data[:end].view(_WORD), data[_HALF : end - _HALF].view(_WORD)
    return (_weighed(words) + rest) % 2**64, _weighed(shifted)


def checksums(data: np.ndarray, piece_bytes: int) -> list[tuple[int, int]]:
    """``checksum`` of each piece of contiguous bytes; the last may be shorter. Few calls for many pieces: threads
    that share the interpreter wait for each other at every call."""
    count, width = len(data) // piece_bytes, piece_bytes // _WORD.itemsize
    if count < 2 or piece_bytes % _WORD.itemsize:
        return [checksum(data[at : at + piece_bytes]) for at in range(0, len(data), piece_bytes)]
    whole = data[: count * piece_bytes]
    words = whole.view(_WORD).reshape(count, width)
    between = whole[_HALF:-_HALF].view(_WORD)
    shifted = np.lib.stride_tricks.as_strided(between, (count, width - 1), (piece_bytes, _WORD.itemsize))
    sums = [np.einsum("ij,j->i", each, NUMBERS[: each.shape[1]]).tolist() for each in (words, shifted)]
    rest = [checksum(data[len(whole) :])] if len(data) > len(whole) else []
    return [*zip(*sums), *rest]


def _weighed(words: np.ndarray) -> int:
    return int(np.einsum("i,i", words, NUMBERS[: len(words)]))
