"""A CPU worker: a process that computes its slices of a step's cold rows, job after job, and ends with its engine.

It loads no torch. Between steps it sleeps in a read from the engine's socket, whose end is its own end; within a
step it looks at the board, at first without a pause and then with short ones.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time

import msgspec
import numpy as np

from manylora.assist.board import Board, BoardShape
from manylora.assist.orders import LentPool, Orders, receive
from manylora.assist.products import CpuProducts

SPIN_S = 200e-6
PAUSE_S = 50e-6
LOOK_S = 0.05
"""How often it asks, while it waits for a job, whether its engine is there."""


def main(arguments: list[str]) -> int:
    """``arguments``: the worker's number, its core or -1, descriptors of its socket and of the board, and the
    board's shape."""
    worker, core, descriptor, board_descriptor = map(int, arguments[:4])
    num_workers, num_tokens, in_features, out_features = map(int, arguments[4:8])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they go to whole groups: it is the engine that decides
    bind(core)
    board = Board(
        board_descriptor, BoardShape(num_workers, num_tokens, in_features, out_features, arguments[8])
    )
    os.close(board_descriptor)
    with socket.socket(fileno=descriptor) as sock:
        told = receive(sock)
        if told is None:
            return 0
        products = CpuProducts(msgspec.msgpack.decode(told, type=LentPool), board)
        decoder = msgspec.msgpack.Decoder(Orders)
        sock.sendall(b"r")
        while (told := receive(sock)) is not None:
            orders = decoder.decode(told)
            is_alone = not serve(orders, worker, board, products, sock)
            board.note_step(worker, orders.step)
            if is_alone:
                break
    return 0


def bind(core: int) -> None:
    """Stay on this core; where the system does not want it, anywhere."""
    if core >= 0:
        try:
            os.sched_setaffinity(0, {core})
        except (AttributeError, OSError):
            return


def serve(orders: Orders, worker: int, board: Board, products: CpuProducts, sock: socket.socket) -> bool:
    """Compute a step's jobs as they are posted; False where the engine has ended meanwhile."""
    cells = [np.frombuffer(packed, "<i8") for packed in orders.cells]
    for place, (layer, number) in enumerate(orders.jobs):
        job = orders.first_job + place + 1
        if not _posted(job, orders.step, board, sock):
            return board.abandoned >= orders.step
        began = time.perf_counter_ns()
        products.compute(orders, cells, layer, number)
        board.note_busy(worker, time.perf_counter_ns() - began)
        board.note_done(worker, job)
    return True


def _posted(job: int, step: int, board: Board, sock: socket.socket) -> bool:
    """Wait for the job; False where it will not come."""
    began = looked = time.perf_counter()
    while board.posted < job:
        if board.abandoned >= step:
            return False
        now = time.perf_counter()
        if now - began < SPIN_S:
            time.sleep(0)
            continue
        time.sleep(PAUSE_S)
        if now - looked > LOOK_S:
            looked = now
            if _has_ended(sock):
                return False
    return board.abandoned < step


def _has_ended(sock: socket.socket) -> bool:
    """Whether the engine has closed its end: within a step it says nothing."""
    readable, _, _ = select.select([sock], [], [], 0)
    return bool(readable) and not sock.recv(1, socket.MSG_PEEK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
