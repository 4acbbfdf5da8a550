"""Copies between the host pool and the device pool: how fast they are, and what they cost steps beside them."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from manylora.protocol.commands import SequenceStart, SwapPages
from manylora.protocol.events import CopyDone
from manylora_lab.bench.direct import DirectExecutor
from manylora_lab.benchmarks.engine_rig import EngineRig
from manylora_lab.benchmarks.run_report import Row
from manylora_lab.benchmarks.step_rig import StepRig

COMMAND_BYTES = 256 * 2**20
"""Copied by one command, about what an adapter of rank 64 and its history take."""
COPIED_PAGES, WAITING, ROUNDS = 32, 4, 4
"""The pages of a copy beside steps, of which so many a direction are always under way."""
RATE_ROUNDS = 5
DIRECTIONS = {"in": (True,), "out": (False,), "both": (True, False)}
"""To the device."""


# ---------------------------------------------------------------- beside steps


def beside_copies(rig: StepRig, starts: Sequence[SequenceStart], steps: int) -> dict[str, Row]:
    """Steps two in flight with saturated lanes against steps alone, in turns: milliseconds, and the ratio."""
    pages = rig.pages(16 * COPIED_PAGES)
    found: dict[str, Row] = {}
    for name, directions in DIRECTIONS.items():
        alone, beside, rates = [], [], []
        for _ in range(ROUNDS):
            alone.append(rig.decode_ms(starts, steps, 2)["mean_ms"])
            lanes = Lanes(rig.direct, pages, directions)
            began = time.perf_counter()
            beside.append(rig.decode_ms(starts, steps, 2, lanes.top_up)["mean_ms"])
            rates.append(lanes.num_copied / (time.perf_counter() - began))
            lanes.drain()
        one, other = statistics.median(alone), statistics.median(beside)
        found[name] = {
            "alone_ms": one, "beside_ms": other, "slower_by": other / one - 1, "pages_per_s": rates[-1],
        }  # fmt: skip
    return found


class Lanes:
    """Keeps copies of pages under way, in one direction or in both."""

    def __init__(self, direct: DirectExecutor, pages: list[int], directions: Sequence[bool]) -> None:
        half = len(pages) // 2
        # In: into the first half from the host's; out: from the second half into the host's other pages.
        pairs = {True: list(enumerate(pages[:half])), False: list(zip(pages[half:], range(half, 2 * half)))}
        chunks = [slice(at, at + COPIED_PAGES) for at in range(0, half, COPIED_PAGES)]
        self._direct = direct
        self._turns = {
            direction: itertools.cycle([tuple(pairs[direction][chunk]) for chunk in chunks])
            for direction in directions
        }
        self._numbers = itertools.count(1)
        self._copies: list[SwapPages] = []
        self.num_copied = 0

    def top_up(self) -> None:
        """Take in what has landed, and begin as many."""
        for copy in [copy for copy in self._copies if self._direct.has_landed(copy)]:
            self._take(copy)
        for direction, turns in self._turns.items():
            while sum(copy.to_device == direction for copy in self._copies) < WAITING:
                self._copies.append(SwapPages(next(self._numbers), direction, next(turns)))
                self._direct.begin(self._copies[-1])

    def drain(self) -> None:
        """Wait for what is under way."""
        while self._copies:
            self._take(self._copies[0])

    def _take(self, copy: SwapPages) -> None:
        landed(self._direct, copy)
        self._copies.remove(copy)
        self.num_copied += COPIED_PAGES


def landed(direct: DirectExecutor, copy: SwapPages) -> CopyDone:
    """The copy's answer."""
    done = direct.wait_for(copy)
    assert isinstance(done, CopyDone)
    assert done.ok, done.error
    return done


# ---------------------------------------------------------------- rates


def raw_rates(device: str) -> dict[str, float]:
    """GB/s of one large copy of memory that CUDA itself has pinned: in, out, and each with both at once."""
    is_gpu = device == "cuda"
    num_bytes = 4 * 2**30 if is_gpu else 2**24
    there = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    host = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(2)]
    streams: list[Any] = [torch.cuda.Stream() if is_gpu else None for _ in range(2)]  # type: ignore[no-untyped-call]
    wait: Callable[[], object] = torch.cuda.synchronize if is_gpu else lambda: None

    def copy(directions: Sequence[bool]) -> float:
        wait()
        began = time.perf_counter()
        for to_device in directions:
            with torch.cuda.stream(streams[to_device]) if is_gpu else contextlib.nullcontext():
                source, target = (host[0], there[0]) if to_device else (there[1], host[1])
                target.copy_(source, non_blocking=True)
        wait()
        return len(directions) * num_bytes / (time.perf_counter() - began) / 1e9

    rates = {}
    for name, directions in DIRECTIONS.items():
        copy(directions)
        rates[name] = statistics.median(copy(directions) for _ in range(RATE_ROUNDS))
    return rates


class PageCopies:
    """Copies of a rig's pages, as many as both pools have."""

    def __init__(self, rig: EngineRig, direct: DirectExecutor) -> None:
        self._direct = direct
        self._page_bytes = rig.policy.page_bytes
        self._num_pages = min(rig.policy.num_pages, rig.policy.num_host_pages)
        self._num_copies = 0
        self._shuffle = random.Random(0)

    def rates(self) -> dict[str, Row]:
        """GB/s from the first command to the last answer, commands given at once; and by the sum of ``copy_s``."""
        found: dict[str, Row] = {}
        for pattern, scattered in (("neighbours", False), ("scattered", True)):
            for name, directions in DIRECTIONS.items():
                pairs = [self._run(directions, scattered) for _ in range(RATE_ROUNDS + 1)][1:]
                rates, own_rates = zip(*pairs, strict=True)
                found[f"{pattern}_{name}"] = {
                    "gb_per_s": statistics.median(rates),
                    "gb_per_s_all": list(rates),
                    "gb_per_s_by_copy_s": statistics.median(own_rates),
                }
        return found

    def _run(self, directions: Sequence[bool], scattered: bool) -> tuple[float, float]:
        commands = [
            command
            for to_device in directions
            for command in self._commands(to_device, scattered, len(directions) == 2)
        ]
        num_bytes = sum(len(command.pairs) for command in commands) * self._page_bytes
        began, copy_s = time.perf_counter(), 0.0
        for command in commands:
            self._direct.begin(command)
        for command in commands:
            copy_s += landed(self._direct, command).copy_s
        return num_bytes / (time.perf_counter() - began) / 1e9, num_bytes / copy_s / 1e9

    def _commands(self, to_device: bool, scattered: bool, halves: bool) -> list[SwapPages]:
        """Commands that copy every page once. ``halves``: sources in the lower half of their pool,
        destinations in the upper one, so that the two directions never touch one page."""
        count = self._num_pages // 2 if halves else self._num_pages
        sources, destinations = list(range(count)), list(range(self._num_pages - count, self._num_pages))
        if scattered:
            self._shuffle.shuffle(sources)
            self._shuffle.shuffle(destinations)
        pairs = list(zip(sources, destinations, strict=True))
        size = max(1, COMMAND_BYTES // self._page_bytes)
        made = []
        for at in range(0, count, size):
            self._num_copies += 1
            made.append(SwapPages(self._num_copies, to_device, tuple(pairs[at : at + size])))
        return made
