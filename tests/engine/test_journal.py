"""The journal's file: what is in a line, what older ones lack, and what damage is called."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import stat
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from manylora_lab.sim.conformance import replay_difference

from manylora.cluster.recording import without_what_fails
from manylora.config.merging import MergeConfig
from manylora.config.sections import EngineSettings, ModelSettings
from manylora.engine import journal
from manylora.engine.driver import Driver
from manylora.engine.journal import (
    ROUTER,
    JournalWriter,
    LineFile,
    TraceWriter,
    fingerprint,
    read_answered,
    read_journal,
)
from manylora.engine.ledger import Ledger
from manylora.engine.local import LocalEngine
from manylora.policy.replica import Replica
from manylora.protocol.commands import (
    Command,
    EndSequence,
    Reject,
    RunStep,
    SequenceStart,
    SetTimer,
    Status,
    StepRow,
    SwapPages,
)
from manylora.protocol.events import Abort, Arrive, Timer
from manylora.protocol.routing import ReplicaReport
from manylora.types import BASE, Request, SamplingParams
from tests.engine.fake_executor import FakeExecutor
from tests.engine.test_engine import CONFIG, INFO, drain, request

START = SequenceStart(1, 0, 2, (5, 6, 7), 3, 0, (9,), SamplingParams(temperature=0), ())
STEP = RunStep(1, (START,), (StepRow(1, 0, 3, 1, ()),))


def test_a_journal_of_what_was_removed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    JournalWriter(path, dataclasses.replace(CONFIG, merge=MergeConfig("manylora", minority="wait"))).close()
    path.write_text(path.read_text().replace('"minority":"wait"', '"minority":"mixed"'))
    with pytest.raises(ValueError, match=r"settings: .*--merge-minority must be one of wait, unmerge"):
        read_journal(path)


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


def test_a_refusal_of_a_full_queue_is_in_the_journal_and_replays(tmp_path: Path) -> None:
    """And a journal from before there was such a bound is read as one without."""
    config = dataclasses.replace(CONFIG, max_waiting=1)
    writer, replica = JournalWriter(tmp_path / "journal", config), Replica(config)
    for number in range(3):
        request = Request(f"r{number}", BASE, (1, 2), SamplingParams(max_tokens=1, seed=0))
        event = Arrive(request, more=number < 2)
        writer.record(event, 1.0)
        commands = replica.handle(event, 1.0)
        writer.answered(commands)
    writer.close()
    found, answered = read_answered(tmp_path / "journal")
    again, unbounded = Replica(found), Replica(CONFIG)
    for now, heard, said in answered:
        assert fingerprint(again.handle(heard, now)) == said
        assert not any(isinstance(command, Reject) for command in unbounded.handle(heard, now))
    first, *rest = (tmp_path / "journal").read_text().splitlines()
    policy = json.loads(first)["policy"]
    assert policy.pop("max_waiting") == 1
    (tmp_path / "older").write_text("\n".join([json.dumps({"policy": policy}), *rest]))
    assert read_answered(tmp_path / "older")[0] == CONFIG


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
    assert fingerprint([STEP, EndSequence(1)]) == "cd2cf0143f3b7bb6"


def test_a_field_at_its_default_is_no_part_of_a_fingerprint() -> None:
    """So that a command may gain one, and journals of before stay valid."""
    row = msgspec.json.encode(
        [["RunStep", {"step": 1, "starts": [], "rows": [[1, 0, 3, 1]]}], ["EndSequence", {"sequence": 1}]]
    )
    assert fingerprint([RunStep(1, (), (StepRow(1, 0, 3, 1, ()),)), EndSequence(1)]) == (
        hashlib.blake2b(row, digest_size=8).hexdigest()
    )
    assert fingerprint([SwapPages(1, True, ((2, 3),), None)]) == fingerprint([SwapPages(1, True, ((2, 3),))])
    assert fingerprint([SwapPages(1, True, ((2, 3),), 4)]) != fingerprint([SwapPages(1, True, ((2, 3),))])


def test_fingerprints_of_another_form_are_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    writer = JournalWriter(path, CONFIG)
    writer.record(Timer(), 1.0)
    writer.answered([EndSequence(3)])
    writer.close()
    assert next(read_answered(path)[1])[2] == fingerprint([EndSequence(3)])
    first, *rest = path.read_text().splitlines(keepends=True)
    header = json.loads(first)
    del header["fingerprints"]
    path.write_text(json.dumps(header) + "\n" + "".join(rest))
    assert next(read_answered(path)[1]) == (1.0, Timer(), None)


def test_reports_of_journals_before_this_form_are_read(tmp_path: Path) -> None:
    """They have the fields of a report and of its status side by side."""
    path = tmp_path / "journal"
    old = {"replica": 2, "epoch": 1, "seq": 7, "seen_upto": 3, "running": 1, "waiting": 0, "free_pages": 5,
           "is_full": True, "residency": [[4, 2]]}  # fmt: skip
    lines = {"router": {"policy": "manylora"}}, [1.0, "ReplicaReport", old]
    path.write_text("\n".join(map(json.dumps, lines)))
    _, events = ROUTER.read_answered(path)
    status = Status(7, 1, 0, 5, is_full=True, residency=((4, 2),))
    assert list(events) == [(1.0, ReplicaReport(2, 1, 3, status), None)]


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


def test_requests_without_a_seed_have_the_engines(tmp_path: Path) -> None:
    async def scenario() -> None:
        writer = JournalWriter(tmp_path / "journal", CONFIG)
        info = dataclasses.replace(INFO, seed=7)
        engine = LocalEngine(Driver(CONFIG, FakeExecutor(), info, journal=writer))
        for name, params in (("a", {}), ("b", {}), ("c", {"seed": 0})):
            await drain(engine.generate(request(name, (1, 2), None, **params)))
        await engine.close()

    asyncio.run(scenario())
    _, events = read_journal(tmp_path / "journal")
    assert [event.request.params.seed for _, event in events if isinstance(event, Arrive)] == [7, 7, 0]
    for given, expected in ((None, 7), (3, 3)):
        assert Ledger(request("a", (1,), None, seed=given), lambda: 0.0, 7).begin().params.seed == expected


# ---------------------------------------------------------------- parts


def serve(path: Path, part_bytes: int | None) -> None:
    """A run with requests and an adapter that comes and goes."""

    async def scenario() -> None:
        engine = LocalEngine(
            Driver(CONFIG, FakeExecutor(), INFO, journal=JournalWriter(path, CONFIG, part_bytes))
        )
        await engine.add_adapter("x", "3")
        asked = [request(f"r{i}", (i, 2, 3), "x" if i % 2 else None, n=2, max_tokens=20) for i in range(12)]
        await asyncio.gather(*[drain(engine.generate(r)) for r in asked])
        await engine.remove_adapter("x")
        await engine.close()

    asyncio.run(scenario())


def test_a_journal_in_parts_is_read_and_replayed_as_one(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    serve(path, 4096)
    parts = [path, *(tmp_path / f"journal.{number}" for number in range(1, len(list(tmp_path.iterdir()))))]
    assert len(parts) > 2
    for number, part in enumerate(parts):
        lines = part.read_text().splitlines()
        assert all(json.loads(line) for line in lines), "each part is text, line by line"
        is_last = number == len(parts) - 1
        assert (lines[-1] == json.dumps({"part": number + 1}, separators=(",", ":"))) == (not is_last)
        assert is_last or 4096 <= part.stat().st_size < 2 * 4096
    config, answered = read_answered(path)
    entries = list(answered)
    assert config == CONFIG
    assert len(entries) == sum(len(part.read_text().splitlines()) for part in parts) - len(parts)
    assert all(there is not None for _, _, there in entries)
    assert replay_difference(config, iter(entries), fingerprint) is None
    # A shorter run in the same place: what is left of the longer one is not its own.
    serve(path, None)
    assert len(list(read_journal(path)[1])) == len(path.read_text().splitlines()) - 1


def test_what_it_says_of_clients_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.touch(0o644)  # of a version that left it to all
    before = os.umask(0)
    try:
        serve(path, 4096)
        TraceWriter(tmp_path / "trace").close()
        without_what_fails(EngineSettings(ModelSettings("m"), journal=str(tmp_path / "tried")))
    finally:
        os.umask(before)
    assert len(list(tmp_path.iterdir())) > 4
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}


def test_what_is_no_file_keeps_its_mode() -> None:
    mode = os.stat(os.devnull).st_mode
    LineFile(Path(os.devnull), "trace").close()
    assert os.stat(os.devnull).st_mode == mode


def test_a_part_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    serve(path, 4096)
    with (tmp_path / "journal.1").open("a") as part:
        part.write("never read: it goes on elsewhere")
    num_events = len(list(read_journal(path)[1]))
    damaged = tmp_path / "journal.2"
    text = damaged.read_text()
    damaged.write_text("not JSON\n" + text)
    with pytest.raises(ValueError, match=r"journal\.2:1: expected \[moment"):
        list(read_journal(path)[1])
    damaged.unlink()
    events = read_journal(path)[1]
    with pytest.raises(ValueError, match=r"journal\.2 is missing"):
        list(events)
    damaged.write_text(text)
    assert len(list(read_journal(path)[1])) == num_events


def test_a_next_part_that_cannot_be_opened_ends_the_journal_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    (tmp_path / "journal.2").mkdir()
    serve(path, 4096)
    assert len([r for r in caplog.records if "the journal ends here" in r.getMessage()]) == 1
    config, answered = read_answered(path)
    assert replay_difference(config, answered, fingerprint) is None, "what was written is whole"


def test_reading_keeps_no_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    writer = JournalWriter(path, CONFIG, 2**20)
    for number in range(40_000):
        writer.record(Abort(f"request-{number:060}"), float(number))
    writer.close()
    assert sum(part.stat().st_size for part in tmp_path.iterdir()) > 4 * 2**20
    tracemalloc.start()
    events = read_journal(path)[1]
    assert next(events) == (0.0, Abort(f"request-{0:060}"))
    assert sum(1 for _ in events) == 39_999
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 2**20


# ---------------------------------------------------------------- the writer's thread


def test_lines_are_made_on_another_thread_and_none_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file takes less than what comes, whoever records waits."""
    gate = threading.Event()
    makers: set[int] = set()
    write = LineFile.write
    writer = JournalWriter(tmp_path / "journal", CONFIG)
    monkeypatch.setattr(LineFile, "write", lambda file, line: (gate.wait(), write(file, line)))

    def noted(commands: Sequence[Command]) -> str:
        makers.add(threading.get_ident())
        return fingerprint(commands)

    monkeypatch.setattr(journal, "fingerprint", noted)
    num_events = 2 * journal.MOST_WAITING

    def loop() -> None:
        for number in range(num_events):
            writer.record(Timer(), float(number))
            writer.answered([SetTimer(number + 1.0)])

    recording = threading.Thread(target=loop)
    recording.start()
    recording.join(0.3)
    assert recording.is_alive(), "no more than so many wait"
    gate.set()
    recording.join(60)
    writer.close()
    writer.close()
    assert [now for now, _ in read_journal(tmp_path / "journal")[1]] == [float(n) for n in range(num_events)]
    assert makers.isdisjoint({threading.get_ident(), recording.ident})


def test_a_line_that_cannot_be_made_ends_the_journal_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = JournalWriter(tmp_path / "journal", CONFIG)
    writer.record(Timer(), 1.0)
    writer.record(object(), 2.0)
    for number in range(2 * journal.MOST_WAITING):
        writer.record(Timer(), 3.0 + number)
    writer.close()
    assert [now for now, _ in read_journal(tmp_path / "journal")[1]] == [1.0]
    assert "the journal ends here" in caplog.text
