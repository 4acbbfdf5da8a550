"""The journal's file: what is in a line, what older ones lack, and what damage is called."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from manylora.engine.journal import JournalWriter, fingerprint, read_answered, read_journal
from manylora.protocol import Abort, Command, EndSequence, RunStep, SequenceStart, SetTimer, StepRow, Timer
from manylora.types import SamplingParams
from tests.engine.test_engine import CONFIG

START = SequenceStart(1, 0, 2, (5, 6, 7), 3, 0, (9,), SamplingParams(temperature=0), ())
STEP = RunStep(1, (START,), (StepRow(1, 0, 3, 1, ()),))


def test_a_line_an_event(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "journal", CONFIG)
    writer.record(Abort("a"), 1.5)
    writer.answered([EndSequence(3)])
    writer.record(Timer(), 2.0)  # the policy failed on this one
    writer.record(Timer(), 3.0)
    writer.answered([])
    writer.record(Timer(), 4.0)
    writer.close()
    first, *lines = (json.loads(line) for line in (tmp_path / "journal").read_text().splitlines())
    assert first["policy"]["num_pages"] == CONFIG.num_pages
    assert lines == [
        [1.5, "Abort", {"request": "a", "sample": None, "reason": "abort"}, fingerprint([EndSequence(3)])],
        [2.0, "Timer", {}],
        [3.0, "Timer", {}, fingerprint([])],
        [4.0, "Timer", {}],
    ]
    config, answered = read_answered(tmp_path / "journal")
    assert config == CONFIG
    assert [(now, commanded is None) for now, _, commanded in answered] == [
        (1.5, False), (2.0, True), (3.0, False), (4.0, True),
    ]  # fmt: skip
    assert next(iter(read_journal(tmp_path / "journal")[1])) == (1.5, Abort("a"))


def test_fingerprints_tell_commands_apart() -> None:
    """By kind, by every field, by order; not by how a parameter's number was written."""
    others: list[list[Command]] = [
        [], [STEP], [SetTimer(1.0)], [EndSequence(1)], [SetTimer(1.0), EndSequence(1)],
        [EndSequence(1), SetTimer(1.0)],
        [dataclasses.replace(STEP, rows=(StepRow(1, 0, 3, 1, ((0, 9),)),))],
        [dataclasses.replace(STEP, starts=(dataclasses.replace(START, tokens=(5, 6, 8)),))],
    ]  # fmt: skip
    assert len({fingerprint(commands) for commands in others}) == len(others)
    written = dataclasses.replace(START, params=SamplingParams(temperature=0.0))
    assert fingerprint([dataclasses.replace(STEP, starts=(written,))]) == fingerprint([STEP])
    # Journals are read on other machines and by later versions.
    assert fingerprint([STEP, EndSequence(1)]) == "6eb7979b915f8439"


@pytest.mark.parametrize(
    ("line", "says"),
    [("[1.0,", ":3: expected"), ('[1.0,"Nothing",{}]', ":3: .*Nothing"), ('[1.0,"Abort",{}]', ":3: .*request"),
     ("5", ":3: expected")],
)  # fmt: skip
def test_damage_says_where(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "journal"
    JournalWriter(path, CONFIG).close()
    path.write_text(f'{path.read_text()}[0.5,"Timer",{{}}]\n{line}\n')
    with pytest.raises(ValueError, match=says):
        list(read_journal(path)[1])
    path.write_text("{}\n")
    with pytest.raises(ValueError, match=":1: expected the policy's settings"):
        read_journal(path)
