"""Random histories: replicas come, go and hang, reports come late, twice and in any order, plans are for the dead.

After every event the invariants hold (``routing.invariants``), and every command is right by what the router was
told (``world``): one owner for a live request, attempts that only rise, nothing to a replica that is down,
draining, or can never hold it, and one end for every request.
"""

from __future__ import annotations

import collections

import pytest

from tests.router.world import RESTLESS, World

HISTORIES, EVENTS = 1_000, 80
IN_LONG = 10_000


def play(seed: int, policy: str | None = None) -> World:
    world = World(seed, policy)
    try:
        world.play(EVENTS + seed % 3 * 20)
        world.settle()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {world.policy}, event {len(world.history)}: {error}") from error
    return world


@pytest.mark.parametrize("part", range(4))
def test_random_histories(part: int) -> None:
    for seed in range(part, HISTORIES, 4):
        play(seed)


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_many_random_histories(part: int) -> None:
    for seed in range(HISTORIES + part, HISTORIES + IN_LONG, 10):
        play(seed)


def test_another_router_takes_over() -> None:
    for seed in range(120):
        world = World(seed)
        try:
            for _ in range(3):
                world.play(40)
                world.succeed()
            world.play(40)
            world.settle()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {world.policy}: {error}") from error


def test_histories_are_not_idle() -> None:
    """They assign, move and refuse, or the properties would say nothing."""
    found: collections.Counter[str] = collections.Counter()
    for seed in range(40):
        for _, _, commands in play(seed, RESTLESS).history:
            found.update(type(command).__name__ for command in commands)
    least = {"Assign": 300, "Withdraw": 40, "Refuse": 20, "Fence": 20, "AskReport": 5, "ScaleHint": 1}
    assert {name: count for name, count in least.items() if found[name] < count} == {}
    assert {"SetTimer", "Routed"} <= set(found)
