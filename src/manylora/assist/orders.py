"""What a worker is told before a step: which rows are whose, and in which order their products come.

Owns the form in which it crosses to the worker. Does not know how it is computed.
"""

from __future__ import annotations

import socket
import struct

import msgspec

_LENGTH = struct.Struct("<q")


class LentPool(msgspec.Struct, frozen=True, array_like=True):
    """Where the engine's host pool lies, and how adapters lie in it: in elements of their dtype."""

    pool: int
    """A descriptor."""
    pool_bytes: int
    slab_elements: int
    cell_elements: int
    piece: int
    """Every cell begins at a multiple of so many elements (``AdapterGeometry.alignment``)."""


class ProductPart(msgspec.Struct, frozen=True, array_like=True):
    """One projection of a product: its columns of the results, its records (first cell of A, of B, rank) and its
    scales by adapter, the scales also by layer."""

    first_column: int
    num_columns: int
    records: list[tuple[int, int, int]]
    scales: list[list[float]]


class Product(msgspec.Struct, frozen=True, array_like=True):
    """Projections that read the same input."""

    in_features: int
    width: int
    """Columns of the results."""
    parts: list[ProductPart]


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """Rows [first, end) of an adapter, by its place in the orders."""

    adapter: int
    first: int
    end: int


class Orders(msgspec.Struct, frozen=True, array_like=True):
    """One step for one worker. ``cells``: for each adapter int64, little-endian: at how many elements into the
    pool a cell's layer 0 begins. ``jobs``: (layer, place of the product), which follow job ``first_job`` of the
    board."""

    step: int
    num_tokens: int
    first_job: int
    jobs: list[tuple[int, int]]
    products: list[Product]
    cells: list[bytes]
    slices: list[Slice]


_encode = msgspec.msgpack.Encoder().encode


def encoded(message: LentPool | Orders) -> bytes:
    return _encode(message)


def send(sock: socket.socket, message: bytes) -> None:
    """Raises OSError where the other side does not take it."""
    sock.sendall(_LENGTH.pack(len(message)) + message)


def receive(sock: socket.socket) -> bytes | None:
    """The next message; None where the other side has ended."""
    head = _exactly(sock, _LENGTH.size)
    return None if head is None else _exactly(sock, _LENGTH.unpack(head)[0])


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        part = sock.recv(count - len(found))
        if not part:
            return None
        found += part
    return bytes(found)


def cut(lengths: list[int], slice_tokens: int, num_workers: int) -> list[list[Slice]]:
    """Share out rows, ``lengths`` of each adapter one after the other: as even as can be among as few workers as
    take ``slice_tokens`` each, or among all of them (CaraServe §4.2)."""
    total = sum(lengths)
    count = max(1, min(num_workers, -(-total // slice_tokens), total))
    ends: list[int] = []
    for length in lengths:
        ends.append(length + (ends[-1] if ends else 0))
    found: list[list[Slice]] = []
    for worker in range(count):
        first, end = worker * total // count, (worker + 1) * total // count
        own = []
        for adapter, (length, last) in enumerate(zip(lengths, ends)):
            begin, stop = max(first, last - length), min(end, last)
            if begin < stop:
                own.append(Slice(adapter, begin, stop))
        found.append(own)
    return found
