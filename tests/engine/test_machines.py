"""The loop runs any machine: here one that is no replica, with ports of its own."""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

from manylora.engine.client import EngineDead
from manylora.engine.loop import Loop, Routes
from manylora.protocol import SetTimer, Timer, handlers

WAIT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Asked:
    """A guest wants a table."""

    guest: str


@dataclasses.dataclass(frozen=True)
class Left:
    """The guest who has been seated longest has left."""


@dataclasses.dataclass(frozen=True)
class Seat:
    """Give the guest a table."""

    guest: str


@dataclasses.dataclass(frozen=True)
class Refuse:
    """There has been no table for too long."""

    guest: str


class Restaurant:
    """The machine: ``num_tables``, a queue, and patience of ``patience_s``."""

    def __init__(self, num_tables: int, patience_s: float) -> None:
        self.num_free = num_tables
        self.patience_s = patience_s
        self.waiting: collections.deque[tuple[str, float]] = collections.deque()
        self.told: list[tuple[float, Any]] = []

    def handle(self, event: Any, now: float) -> list[Any]:
        self.told.append((now, event))
        commands: list[Any] = []
        match event:
            case Asked():
                self.waiting.append((event.guest, now + self.patience_s))
            case Left():
                self.num_free += 1
            case Timer():
                while self.waiting and self.waiting[0][1] <= now:
                    commands.append(Refuse(self.waiting.popleft()[0]))
        while self.num_free and self.waiting:
            self.num_free -= 1
            commands.append(Seat(self.waiting.popleft()[0]))
        if self.waiting:
            commands.append(SetTimer(self.waiting[0][1]))
        return commands


class Tables:
    """The ports: seated guests leave, oldest first, as soon as the loop waits for them and may."""

    preparation_s = 0.0

    def __init__(self) -> None:
        self.news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.seated: collections.deque[str] = collections.deque()
        self.may_leave = threading.Event()
        self.num_closed = 0
        self.errors: list[EngineDead] = []

    def routes(self) -> Routes:
        return handlers(self, [Seat, Refuse])

    def seat(self, command: Seat, now: float) -> None:
        self.seated.append(command.guest)
        self.news.put(f"{command.guest} sits")

    def refuse(self, command: Refuse, now: float) -> None:
        self.news.put(f"{command.guest} is refused")

    def take(self, item: str) -> Iterator[Any]:
        if item == "fire":
            raise RuntimeError("the kitchen burns")
        yield Asked(item)

    def drained(self) -> Iterator[Any]:
        yield from ()

    @property
    def is_busy(self) -> bool:
        return bool(self.seated) and self.may_leave.is_set()

    def wait(self) -> None:
        time.sleep(0.001)

    def ended(self) -> Iterator[Any]:
        self.seated.popleft()
        yield Left()

    def flush(self) -> None:
        pass

    def abandon(self, error: EngineDead) -> None:
        self.errors.append(error)

    def close(self, *, frees: bool = True) -> None:
        self.num_closed += 1


def opened(
    num_tables: int, patience_s: float
) -> tuple[Loop, Restaurant, Tables, queue.SimpleQueue[object], list[str]]:
    machine, ports = Restaurant(num_tables, patience_s), Tables()
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    loop = Loop(machine, ports, inbox, clock=time.monotonic)
    deaths: list[str] = []
    loop.run(deaths.append)
    return loop, machine, ports, inbox, deaths


def test_events_commands_and_ends_of_its_own() -> None:
    loop, machine, ports, inbox, deaths = opened(2, 1e6)
    for guest in "abcd":
        inbox.put(guest)
    news = [ports.news.get(timeout=WAIT_S) for _ in range(2)]
    assert news == ["a sits", "b sits"]
    ports.may_leave.set()
    inbox.put("e")  # wakes the loop
    assert [ports.news.get(timeout=WAIT_S) for _ in range(3)] == ["c sits", "d sits", "e sits"]
    loop.close()
    assert deaths == []
    assert ports.num_closed == 1
    moments = [moment for moment, _ in machine.told]
    assert moments == sorted(moments)


def test_its_timer() -> None:
    loop, _, ports, inbox, _ = opened(1, 0.05)
    for guest in "abc":
        inbox.put(guest)
    news = [ports.news.get(timeout=WAIT_S) for _ in range(3)]
    assert news == ["a sits", "b is refused", "c is refused"]
    loop.close()


def test_its_death() -> None:
    loop, _, ports, inbox, deaths = opened(1, 1.0)
    inbox.put("a")
    inbox.put("fire")
    ends_at = time.monotonic() + WAIT_S
    while not (deaths and ports.errors) and time.monotonic() < ends_at:
        time.sleep(0.001)
    assert deaths == ["the engine failed: the kitchen burns"]
    assert str(ports.errors[0]) == deaths[0]
    loop.close()
    assert ports.num_closed == 1
