"""A router's journal: what it was told is enough to have it command the same again."""

from __future__ import annotations

import subprocess
import sys
import typing
from pathlib import Path

import msgspec
import pytest
from manylora_lab.baselines import ALL_ROUTERS
from manylora_lab.sim.conformance import replay_difference

from manylora.engine.journal import ROUTER, JournalWriter, fingerprint, read_answered
from manylora.protocol.routing import Asked, Held, RouterCommand, RouterEvent
from manylora.router.router import Router
from tests.router.world import IMPATIENT, RESTLESS, World

ROOT = Path(__file__).parents[2]
DIGEST = """
import hashlib
from manylora.engine.journal import fingerprint
from manylora_lab.baselines import ALL_ROUTERS
from tests.router.world import IMPATIENT, RESTLESS, World

digest = hashlib.blake2b()
for seed, policy in enumerate([*ALL_ROUTERS, RESTLESS, IMPATIENT] * 3):
    world = World(seed, policy)
    world.play(120)
    for _, _, commands in world.history:
        digest.update(fingerprint(commands).encode())
print(digest.hexdigest())
"""


def played(policy: str, seed: int = 5) -> World:
    world = World(seed, policy)
    world.play(150)
    return world


@pytest.mark.parametrize("policy", [*ALL_ROUTERS, RESTLESS, IMPATIENT])
def test_a_journal_replays_to_equal_fingerprints(policy: str, tmp_path: Path) -> None:
    world = played(policy)
    writer = JournalWriter(tmp_path / "journal", world.config, 20_000)
    for now, event, commands in world.history:
        writer.record(event, now)
        writer.answered(commands)
    writer.close()
    config, answered = ROUTER.read_answered(tmp_path / "journal")
    assert config == world.config
    entries = list(answered)
    assert [(now, event) for now, event, _ in entries] == [(now, event) for now, event, _ in world.history]
    assert replay_difference(config, entries, fingerprint, Router) is None
    now, event, _ = entries[-1]
    old = (tmp_path / "journal").read_text()
    for text in ('"handover":"drop"' if not world.drops else '"handover":"wait"', '"across_numerics":true'):
        (tmp_path / "old").write_text(old.replace('{"router":{', f'{{"router":{{{text},', 1))
        with pytest.raises(ValueError, match="was removed"):
            ROUTER.read_answered(tmp_path / "old")
    found = replay_difference(config, [*entries[:-1], (now, event, "0")], fingerprint, Router)
    assert found is not None
    assert found.number == len(entries)
    with pytest.raises(ValueError, match="expected the policy's settings"):
        read_answered(tmp_path / "journal")


def test_events_and_commands_cross_to_another_process() -> None:
    """As msgpack and back, each into a record of its own kind."""
    found = set()
    solved = played("dlora", seed=0)
    for world in (
        solved,
        *(played(policy, seed) for seed, policy in enumerate([*ALL_ROUTERS, RESTLESS] * 2)),
    ):
        for _, event, commands in world.history:
            for message in (event, *commands):
                found.add(type(message))
                there = msgspec.msgpack.encode(message)
                assert msgspec.msgpack.decode(there, type=type(message)) == message
    held = Held(Asked("a", 1, 20, 10, attempts=2), 1, 2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(held), type=Held) == held
    assert found | {Held} >= set(typing.get_args(RouterEvent))
    names = {kind.__name__ for kind in set(typing.get_args(RouterCommand)) - found}
    assert names <= {"Unplace"}


def test_commands_are_equal_under_different_hash_seeds() -> None:
    digests = set()
    for seed in ("0", "1"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": "src:lab/src:.", "PATH": "/usr/bin:/bin"}
        found = subprocess.run(
            [sys.executable, "-c", DIGEST],
            cwd=ROOT,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        digests.add(found.stdout)
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 128
