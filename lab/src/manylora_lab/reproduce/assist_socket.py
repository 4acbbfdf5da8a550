"""A CPU worker that has rows and gives results over its socket, as engines beside CaraServe's do (§4.2).

It computes what the engine's own workers compute, by the same code. No server starts it.
"""

from __future__ import annotations

import socket
import struct
import sys
import time

import msgspec
import numpy as np

from manylora.assist.board import BoardShape, new_board
from manylora.assist.orders import LentPool, Orders, receive, send
from manylora.assist.process import bind
from manylora.assist.products import CpuProducts

TOOK = struct.Struct("<q")
"""Before the results: how long they were computed, in nanoseconds."""


def main(arguments: list[str]) -> int:
    """``arguments``: its core or -1, the descriptor of its socket, and the shape of a board, which is its own."""
    core, descriptor, num_tokens, in_features, out_features = map(int, arguments[:5])
    bind(core)
    _, board = new_board(BoardShape(1, num_tokens, in_features, out_features, arguments[5]))
    with socket.socket(fileno=descriptor) as sock:
        told = receive(sock)
        if told is None:
            return 0
        products = CpuProducts(msgspec.msgpack.decode(told, type=LentPool), board)
        decoder = msgspec.msgpack.Decoder(Orders)
        while (told := receive(sock)) is not None:
            orders = decoder.decode(told)
            cells = [np.frombuffer(packed, "<i8") for packed in orders.cells]
            for layer, number in orders.jobs:
                product = orders.products[number]
                sent = receive(sock)
                if sent is None:
                    return 0
                rows = board.rows(orders.num_tokens, product.in_features)
                rows[:] = np.frombuffer(sent, rows.dtype).reshape(rows.shape)
                began = time.perf_counter_ns()
                products.compute(orders, cells, layer, number)
                took_ns = time.perf_counter_ns() - began
                results = board.results(orders.num_tokens, product.width)
                send(sock, TOOK.pack(took_ns) + results.tobytes())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
