"""Children that end with their parent, and what the system says of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from manylora.processes import effort, group_of, is_stopped, start
from tests.e2e.process import is_running, wait_until

CHILD = """
import signal, sys, time
from manylora import processes
if "goes on" in sys.argv:
    processes.at_parents_end(signal.SIGCONT)
print("up", flush=True)
time.sleep(1000)
"""
PARENT = """
import subprocess, sys, threading, time
from manylora import processes
children = []
def begin():
    children.append(processes.start("a_child", *sys.argv[2:], stdout=subprocess.PIPE))
if sys.argv[1] == "a thread":
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
else:
    begin()
children[0].stdout.readline()
time.sleep(0.2)
print(children[0].pid, children[0].poll(), flush=True)
time.sleep(1000)
"""

COMPUTES = """
import sys
print("up", flush=True)
for line in sys.stdin:
    sum(range(10**7))
    print("done", flush=True)
"""


@pytest.fixture
def parent(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "a_child.py").write_text(CHILD)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[1] / 'src'}"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *request.param],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("parent", [["the main thread"], ["a thread"]], indirect=True)
def test_a_child_that_is_stopped_ends_with_its_parent(parent: subprocess.Popen[str]) -> None:
    """And not with the thread that has asked for it."""
    assert parent.stdout is not None
    pid, code = parent.stdout.readline().split()
    assert code == "None"
    os.kill(int(pid), signal.SIGSTOP)
    wait_until(lambda: is_stopped(int(pid)), "a stopped child")
    parent.kill()
    wait_until(lambda: not is_running(int(pid)), "the child's end")


@pytest.mark.parametrize("parent", [["the main thread", "goes on"]], indirect=True)
def test_a_child_that_may_go_on_is_stopped_no_more(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    pid = int(parent.stdout.readline().split()[0])
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(pid), "a stopped child")
    parent.kill()
    try:
        wait_until(lambda: not is_stopped(pid), "a child that goes on")
        assert is_running(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_child_whose_parent_is_another_ends() -> None:
    command = [sys.executable, "-m", "manylora.processes", "1", "this"]
    assert subprocess.run(command, timeout=60).returncode == 1


def test_a_child_is_the_module_with_its_arguments() -> None:
    child = start("base64", "-t", stdout=subprocess.PIPE)  # encodes and decodes a text of its own
    said, _ = child.communicate(timeout=60)
    assert b"Aladdin:open sesame" in said


def test_effort_tells_what_computes_from_what_waits() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COMPUTES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        process_group=0,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        assert group_of(process.pid) == [process.pid]
        before = effort([process.pid])
        time.sleep(0.1)
        assert effort([process.pid]) == before
        process.stdin.write("go\n")
        process.stdout.readline()
        assert effort([process.pid]) > before
        process.stdin.close()
    assert effort([process.pid]) == 0
