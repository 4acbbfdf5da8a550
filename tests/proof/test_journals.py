"""Recorded lives of every policy come out the same, command for command: proof that a change is one of form."""

from __future__ import annotations

import collections
import dataclasses
import lzma
import typing
from collections.abc import Callable
from pathlib import Path

import pytest
from manylora_lab.baselines import ALL_CACHE_POLICIES
from manylora_lab.sim.conformance import recorded_commands, replay_difference

from manylora.engine.journal import fingerprint, read_answered
from manylora.policy.replica import Replica
from manylora.protocol.commands import Command, Report, RunStep, SwapPages
from manylora.protocol.events import Event, ReportDue
from tests.proof.record import JOURNALS, lives

LEAST_JOURNALS, LEAST_EVENTS, MOST_BYTES = 60, 200_000, 5_300_000
PATHS = sorted(JOURNALS.glob("*.jsonl.xz"))
A_JOURNAL = JOURNALS / "fastlibra-pages-2-crowd.jsonl.xz"


def unpacked(packed: Path, folder: Path) -> Path:
    path = folder / packed.stem
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    return path


@pytest.mark.parametrize("packed", PATHS, ids=lambda path: path.name.partition(".")[0])
def test_replays_to_equal_fingerprints(packed: Path, tmp_path: Path) -> None:
    config, answered = read_answered(unpacked(packed, tmp_path))
    entries = list(answered)
    assert all(there is not None for _, _, there in entries)
    difference = replay_difference(config, entries, fingerprint)
    assert difference is None, str(difference)


@pytest.mark.parametrize("policy", ALL_CACHE_POLICIES)
def test_reports_decide_nothing(policy: str, tmp_path: Path) -> None:
    """A replica that is asked for a report after every event commands the same as one that is not."""
    config, answered = read_answered(unpacked(JOURNALS / f"{policy}-2-tiny.jsonl.xz", tmp_path))
    replica = Replica(config)
    for number, (now, event, there) in enumerate(answered):
        assert fingerprint(replica.handle(event, now)) == there, number
        (report,) = replica.handle(ReportDue(("all", "changed")[number % 2]), now)
        assert isinstance(report, Report)
        assert report.gauges.pages_total == config.num_pages


def test_there_are_enough() -> None:
    assert len(PATHS) >= LEAST_JOURNALS
    assert sum(path.stat().st_size for path in PATHS) <= MOST_BYTES
    num_events = sum(lzma.decompress(path.read_bytes()).count(b"\n") - 1 for path in PATHS)
    assert num_events >= LEAST_EVENTS
    recorded = {path.name.partition(".")[0] for path in PATHS}
    assert recorded >= {f"{policy}-{depth}-{scene}" for policy, depth, scene in lives()}


def test_together_they_show_everything_that_can_happen(tmp_path: Path) -> None:
    """One policy's journals hold every event and every command, failures and preemption among them."""
    seen: collections.Counter[str] = collections.Counter()
    for packed in JOURNALS.glob("manylora-*.jsonl.xz"):
        config, answered = read_answered(unpacked(packed, tmp_path))
        for told in recorded_commands(config, ((now, event) for now, event, _ in answered)):
            ok = getattr(told.event, "ok", True)
            seen[type(told.event).__name__ if ok else f"failed {type(told.event).__name__}"] += 1
            seen.update(type(command).__name__ for command in told.commands)
            seen.update(getattr(command, "action", "") for command in told.commands)
            errors = (getattr(command, "error", None) for command in told.commands)
            seen.update(f"status {error.status}" for error in errors if error is not None)
            seen["unsound"] += bool(getattr(told.event, "unsound", ()))
    kinds = {kind.__name__ for kind in (*typing.get_args(Event), *typing.get_args(Command))}
    kinds -= {"ReportDue", "Report", "StatusDue", "Status"}  # decide nothing
    kinds |= {"failed StepDone", "failed CopyDone", "failed AdapterRead", "failed SwitchDone"}
    kinds |= {"status 400", "status 404", "status 429", "status 500", "status 503", "unsound"}
    kinds |= {"evict", "save", "drop", "load", "read", "drop-host", "preempt", "merge", "unmerge"}
    assert kinds - {kind for kind, number in seen.items() if number} == set()


# ---------------------------------------------------------------- that the proof can fail


def another_page(commands: list[Command]) -> list[Command] | None:
    """With one page id changed."""
    for place, command in enumerate(commands):
        if isinstance(command, RunStep) and command.starts and command.starts[0].pages:
            first, *rest = command.starts
            start = dataclasses.replace(first, pages=(first.pages[0] + 1, *first.pages[1:]))
            changed = dataclasses.replace(command, starts=(start, *rest))
            return [*commands[:place], changed, *commands[place + 1 :]]
    return None


def swapped_pairs(commands: list[Command]) -> list[Command] | None:
    """With two pairs of one copy in the other order."""
    for place, command in enumerate(commands):
        if isinstance(command, SwapPages) and len(command.pairs) > 1:
            first, second, *rest = command.pairs
            changed = dataclasses.replace(command, pairs=(second, first, *rest))
            return [*commands[:place], changed, *commands[place + 1 :]]
    return None


def other_order(commands: list[Command]) -> list[Command] | None:
    """With two commands in the other order."""
    return [commands[1], commands[0], *commands[2:]] if len(commands) > 1 else None


@pytest.mark.parametrize("change", [another_page, swapped_pairs, other_order])
def test_one_changed_command_is_seen(
    change: Callable[[list[Command]], list[Command] | None], tmp_path: Path
) -> None:
    config, answered = read_answered(unpacked(A_JOURNAL, tmp_path))
    entries = list(answered)
    told = recorded_commands(config, ((now, event) for now, event, _ in entries))
    for (_, _, there), here in zip(entries, told, strict=True):
        changed = change(list(here.commands))
        if changed is not None:
            assert fingerprint(here.commands) == there != fingerprint(changed)
            return
    raise AssertionError("nothing in the journal could be changed so")


def test_one_missing_event_is_seen(tmp_path: Path) -> None:
    config, answered = read_answered(unpacked(A_JOURNAL, tmp_path))
    entries = list(answered)
    for number in (len(entries) // 3, len(entries) // 2):
        kept = entries[:number] + entries[number + 1 :]
        assert replay_difference(config, kept, fingerprint) is not None
