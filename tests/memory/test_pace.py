"""A limit on the rate of copies: never faster, on any lane, and closing does not wait for it."""

from __future__ import annotations

import time

import pytest

from manylora.memory.pace import Pace


class Clock:
    """Time that passes while something waits for it, now and then for longer than it wanted."""

    def __init__(self) -> None:
        self.now, self.num_waits = 100.0, 0

    def wait(self, seconds: float) -> bool:
        self.num_waits += 1
        self.now += seconds + (0.0002 if self.num_waits % 3 == 0 else 0.0)
        return False


@pytest.mark.parametrize("bytes_s", [4 * 10**9, 52 * 10**9, 10**6])
def test_many_pieces_take_what_the_rate_says(bytes_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(), Pace(bytes_s)
    monkeypatch.setattr("manylora.memory.pace.time.monotonic", lambda: clock.now)
    monkeypatch.setattr(pace._stopped, "wait", clock.wait)
    for _ in range(400):
        pace.moved(pace.piece_bytes)
    took_s = clock.now - 100.0
    assert took_s == pytest.approx(400 * pace.piece_bytes / bytes_s, rel=0.05)
    clock.now += 10.0  # what was not used is not saved up
    since = clock.now
    for _ in range(100):
        pace.moved(pace.piece_bytes)
    assert clock.now - since >= 0.95 * 100 * pace.piece_bytes / bytes_s


def test_a_stopped_pace_waits_no_more() -> None:
    pace = Pace(1)
    pace.stop()
    began = time.monotonic()
    pace.moved(1000)
    assert time.monotonic() - began < 100
