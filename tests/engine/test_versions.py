"""Versions of adapters that are numbered elsewhere, beside those that an engine numbers itself."""

from __future__ import annotations

import time

import pytest

from manylora.engine.driver import Driver
from manylora.protocol.executor import AdapterError
from tests.engine.fake_executor import FakeExecutor
from tests.engine.test_engine import CONFIG, INFO


@pytest.fixture
def driver() -> Driver:
    made = Driver(CONFIG, FakeExecutor(), INFO)
    made.start(lambda deltas: None, lambda reason: None)
    return made


def test_a_version_keeps_the_number_it_was_given(driver: Driver) -> None:
    assert driver.add_adapter("a", "1").id == 1
    assert driver.add_adapter("b", "1", adapter=40).id == 40
    assert driver.add_adapter("c", "1").id == 41, "own numbers go on above"
    assert driver.add_adapter("d", "1", adapter=7).id == 7
    assert driver.add_adapter("e", "1").id == 42
    driver.close()


def test_no_number_is_served_twice(driver: Driver) -> None:
    """What the first version left behind must never meet the second's requests."""
    driver.add_adapter("a", "1", adapter=5)
    for used in (5, 0, -1):
        with pytest.raises(AdapterError, match=f"{used} is, or was, the version of another") as caught:
            driver.add_adapter("b", "1", adapter=used)
        assert caught.value.status == 409
    driver.remove_adapter("a").result(timeout=60)
    with pytest.raises(AdapterError, match="5 is, or was"):
        driver.add_adapter("a", "1", adapter=5)
    assert [card.name for card in driver.adapters()] == []
    driver.close()


def test_a_number_that_was_never_served_may_be_given_again(driver: Driver) -> None:
    with pytest.raises(AdapterError, match="no good"):
        driver.add_adapter("a", "bad", adapter=5)
    assert driver.add_adapter("a", "1", adapter=5).id == 5
    driver.close()


def test_a_version_that_a_router_wants_kept_comes_without_a_request(driver: Driver) -> None:
    driver.add_adapter("a", "1", adapter=5)
    driver.add_adapter("b", "1", adapter=6)
    driver.keep(5, True)
    driver.keep(99, True)  # it is not served here

    def tiers() -> dict[str, str]:
        driver.stats().result(timeout=60)
        return {load.name: load.state for load in driver.adapter_uses()}

    deadline = time.monotonic() + 60
    while tiers()["a"] != "resident" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert tiers() == {"a": "resident", "b": "absent"}
    driver.keep(5, False)
    driver.remove_adapter("a").result(timeout=60)
    assert tiers() == {"b": "absent"}
    driver.close()
