"""Torch serves until the CPU's loops are compiled, and tokens are the same before and after."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from manylora.kernels import compiled
from manylora.kernels.coming_loops import ComingOps
from manylora.kernels.cpu_compiled import CompiledOps
from manylora.kernels.select import ops_for
from tests.e2e.process import wait_until
from tests.executor.conftest import Files, files  # noqa: F401  # a fixture
from tests.executor.drive import Rig

PROMPTS = {1: [5, 3, 8, 2, 9, 1, 7], 2: [4, 4, 2], 3: [6, 1, 6, 1, 6]}


@pytest.fixture(autouse=True)
def kept() -> None:
    """So that no test waits for the compiler for long."""
    CompiledOps()


def test_the_same_tokens_before_and_after_in_the_middle_of_sequences(
    files: Files,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops = CompiledOps(waits=False)
    monkeypatch.setattr("manylora.executor.build.ops_for", lambda *_, **__: ops)
    ran: list[str] = []
    for name in ("attend", "add_lora", "store_kv", "rotate_in_place", "add_norm", "gate"):
        loop = getattr(compiled, name)

        def noting(*args, loop=loop, name=name):  # type: ignore[no-untyped-def]
            ran.append(name)
            return loop(*args)

        monkeypatch.setattr(compiled, name, noting)
    rig = Rig(files.model, tmp_path, num_pages=200, page_bytes=3072)
    for adapter, path in files.adapters.items():
        rig.serve(adapter, path)
    for sequence, prompt in PROMPTS.items():
        rig.open(sequence, prompt, adapter=sequence)
    rig.open(4, [9, 9, 1])
    rig.decode(4, 1, 2, 3, 4)
    assert not ran
    ops.use_loops()
    ran.clear()
    rig.decode(2, 1, 2, 3, 4)  # LoRA goes on as it was planned
    rig.decode(4, 1, 2, 3)
    rig.open(5, PROMPTS[1], adapter=1)
    rig.decode(3, 1, 2, 3, 4, 5)
    assert {"attend", "add_lora", "store_kv", "rotate_in_place", "add_norm", "gate"} <= set(ran)
    for held in rig.sequences.values():
        files.reference.check_greedy(held.tokens[: held.num_prompt], held.generated, files.path(held.adapter))
    rig.worker.close()


def test_one_line_says_when_they_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert compiled.are_kept()
    assert ComingOps().is_ready
    assert not caplog.records
    monkeypatch.setattr(compiled, "are_kept", lambda: False)
    ops = ComingOps()
    assert not ops.is_ready
    wait_until(lambda: ops.is_ready, "the loops")
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "compiled loops serve steps from now on"
    ]


def test_what_cannot_be_compiled_leaves_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "are_kept", lambda: False)
    monkeypatch.setattr("manylora.kernels.coming_loops.sys.executable", "/nowhere/python")
    ops = ComingOps()
    wait_until(lambda: "torch serves, not compiled loops" in caplog.text, "the warning")
    assert not ops.is_ready
    ops.close()


@pytest.mark.parametrize("begun", [True, False])
def test_closing_ends_the_compiler(begun: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled, "are_kept", lambda: False)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    ops = ComingOps()
    if begun:
        wait_until(lambda: ops._process is not None, "the compiler")
    ops.close()
    ops.close()
    assert not ops.is_ready
    assert ops._thread is not None
    assert not ops._thread.is_alive()
    assert ops._process is None or ops._process.returncode is not None


def test_the_compiler_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "manylora.kernels.coming_loops"],
        stdin=subprocess.PIPE,
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
    )
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(120) == 1


def test_only_those_who_ask_get_a_compiler_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "are_kept", lambda: False)
    assert type(ops_for(torch.device("cpu"), compiled=True)) is CompiledOps
    beside = ops_for(torch.device("cpu"), compiled=True, waits=False)
    assert isinstance(beside, ComingOps)
    beside.close()
