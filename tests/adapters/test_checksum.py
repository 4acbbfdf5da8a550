"""The checksum of packed pieces: what it is sure to find, and that it stays what it is."""

from __future__ import annotations

import random

import numpy as np
import pytest

from manylora.adapters.checksum import MOST_BYTES, NUMBERS, checksum, checksums


def by_hand(data: bytes) -> tuple[int, int]:
    numbers = [int(number) for number in NUMBERS]

    def weighed(part: bytes) -> int:
        words = [int.from_bytes(part[at : at + 8], "little") for at in range(0, len(part), 8)]
        return sum(word * number for word, number in zip(words, numbers)) % 2**64

    whole = len(data) // 8 * 8
    return weighed(data), weighed(data[4 : whole - 4])


def drawn(size: int, seed: int = 0) -> np.ndarray:
    return np.frombuffer(random.Random(seed).randbytes(size), np.uint8).copy()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 15, 16, 17, 1000, 4096])
def test_what_it_is(size: int) -> None:
    data = drawn(size)
    assert checksum(data) == by_hand(data.tobytes())


def test_it_stays_what_it_is() -> None:
    """Files that were written are read by later versions."""
    assert checksum(np.arange(250, dtype=np.uint8)) == PINNED


PINNED = (9608320502952827520, 14375140224665128536)


def test_the_numbers_are_as_two_flipped_bits_need_them() -> None:
    assert len(NUMBERS) * 8 > MOST_BYTES
    low = NUMBERS & np.uint64(2**33 - 1)
    assert bool((low % 2 == 1).all())
    assert len(np.unique(low)) == len(low)
    assert int(low.max()) < 2**32, "so no two add up to 2**33"
    assert len(np.unique(NUMBERS >> np.uint64(33))) > 0.9 * len(NUMBERS)


def test_every_flipped_bit_and_pairs_of_them() -> None:
    data = drawn(203)
    right = checksum(data)
    bits = [(place, 1 << bit) for place in range(len(data)) for bit in range(8)]

    def differs(*flipped: tuple[int, int]) -> bool:
        for place, bit in flipped:
            data[place] ^= bit
        found = checksum(data)
        for place, bit in flipped:
            data[place] ^= bit
        return found != right

    assert all(differs(bit) for bit in bits)
    highest = [(place, 0x80) for place in range(7, 203, 8)]
    assert all(differs(one, other) for one in highest for other in highest if one < other)
    chance = random.Random(1)
    assert all(differs(*chance.sample(bits, 2)) for _ in range(3000))


def test_pieces_that_changed_places_or_were_lost() -> None:
    data = drawn(MOST_BYTES)
    right = checksum(data)
    half = MOST_BYTES // 2
    moved = np.concatenate((data[half:], data[:half]))
    assert checksum(moved) != right
    for at in (0, 4096, MOST_BYTES - 4096):
        lost = data.copy()
        lost[at : at + 4096] = 0
        assert checksum(lost) != right
    assert checksum(np.zeros(64, np.uint8)) == checksum(np.zeros(72, np.uint8)), "lengths are told elsewhere"


@pytest.mark.parametrize("piece_bytes", [8, 12, 64, 4096])
@pytest.mark.parametrize("num_bytes", [0, 8, 60, 64, 128, 129, 1000, 8192])
def test_many_at_once(piece_bytes: int, num_bytes: int) -> None:
    data = np.random.default_rng(num_bytes).integers(0, 256, num_bytes + 8, dtype=np.uint8)[8:]
    expected = [checksum(data[at : at + piece_bytes]) for at in range(0, num_bytes, piece_bytes)]
    assert checksums(data, piece_bytes) == expected
