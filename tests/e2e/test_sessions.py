"""What tests start ends with them, however they end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e import sessions
from tests.e2e.process import REPOSITORY, environment, is_running, wait_until

CHILD = "import subprocess; subprocess.run(['sleep', '1000'], process_group=0)"
"""A process whose own child is of another group."""
TESTS = f"""
import os, subprocess, sys, time
from tests.e2e import sessions

args = [sys.executable, "-c", {CHILD!r}]
kept, ended = (sessions.started(args, stdout=subprocess.DEVNULL) for _ in range(2))
while not all(len(sessions.pids_of({{each.pid}})) == 2 for each in (kept, ended)):
    time.sleep(0.01)
print(*sessions.pids_of({{ended.pid}}))
sessions.end(ended)
print(*sessions.pids_of({{kept.pid}}), flush=True)
"""


@pytest.mark.parametrize("last", ["os._exit(1)", "os.kill(os.getpid(), 9)", "pass"])
def test_nothing_is_left(last: str) -> None:
    found = environment()
    found["PYTHONPATH"] += f":{REPOSITORY}"
    process = subprocess.run(
        [sys.executable, "-c", f"{TESTS}\n{last}"], env=found, stdout=subprocess.PIPE, text=True
    )
    ended, kept = ([*map(int, line.split())] for line in process.stdout.splitlines())
    assert len(ended) == len(kept) == 2
    assert not any(map(is_running, ended))
    wait_until(lambda: not any(map(is_running, kept)), f"the end of {kept}")


def test_it_knows_its_own() -> None:
    process = sessions.started(["sleep", "1000"])
    try:
        assert sessions.pids_of({process.pid}) == [process.pid]
    finally:
        sessions.end(process)
    assert process.returncode == -9
