"""What one client is served more than another, by hand."""

from __future__ import annotations

import pytest
from manylora_lab.sim.service import Served, service_difference


def test_only_windows_in_which_both_wait_throughout_count() -> None:
    """Of windows of 10 s: a waits from 0 to 30, by two requests, b from 5 to 25."""
    requests = [
        Served("a", 0.0, 12.0, 13.0, 14.0, 100.0, 8.0),
        Served("a", 11.0, 30.0, 31.0, 32.0, 100.0, 8.0),
        Served("b", 5.0, 25.0, 26.0, 27.0, 100.0, 8.0),
        Served("b", 1.0, 2.0, 15.0, 25.0, 100.0, 60.0),
    ]
    assert service_difference(requests, window_s=10.0) == {"max": 78.0, "mean": 78.0, "pairs": 1}
    assert service_difference(requests, {"a": 2.0}, 10.0) == {"max": 24.0, "mean": 24.0, "pairs": 1}
    assert service_difference(requests, window_s=40.0) is None


def test_of_three_clients_there_are_three_pairs() -> None:
    requests = [
        Served(name, -1.0, 10.0, 0.0, 5.0, 0.0, service)
        for name, service in (("a", 1.0), ("b", 4.0), ("c", 9.0))
    ]
    found = service_difference(requests, window_s=10.0)
    assert found is not None
    assert found["mean"] == pytest.approx((3 + 8 + 5) / 3)
    assert (found["max"], found["pairs"]) == (8.0, 3)
