"""Kernels compiled ahead in other processes, for a GPU that this machine need not have: Triton then finds them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

SCRIPT = '''
import json, logging, sys
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from manylora.kernels.triton import ahead
from manylora.kernels.triton.compiler_process import _NoDevice
from manylora.kernels.triton.small import gate_mul_kernel

class Driver(_NoDevice):
    """The main process's stands in for a GPU's: nothing is launched."""
    def get_current_stream(self, device):
        return 0

driver.set_active(Driver(GPUTarget("cuda", 90, 32)))
logging.basicConfig(level=logging.INFO)
turns = []

def step(block, dtype):
    def run():
        turns.append(block)
        x = torch.zeros(4, 64, dtype=dtype)
        for _ in range(3):  # layers
            gate_mul_kernel[(4, 1)](x, x, 64, 32, BLOCK=block)
    return run

steps = [step(32, torch.float16), step(64, torch.float16), step(64, torch.bfloat16)]
ahead.LEAST_PROCESSES = 1
sys.executable = sys.argv[2]
compiling = ahead.CompileAhead()
compiling._most = int(sys.argv[1])
answer = compiling.rehearse(steps, 1)
pids = [process.pid for process in compiling._processes]
compiling.close()
compiling.close()

hits = []
knobs.compilation.listener = lambda *, src, metadata, metadata_group, times, cache_hit: hits.append(cache_hit)
seen = []
knobs.runtime.jit_cache_hook = lambda *, compile, **_: seen.append(compile["specialization_data"])
if answer:
    for run in steps:
        try:
            run()
        except Exception:
            pass  # there is nothing to launch on
print(json.dumps({"answer": answer, "turns": turns, "hits": hits, "seen": len(seen), "processes": len(pids)}))
'''


def run(cache: Path, program: str = sys.executable) -> tuple[dict[str, Any], str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "2", program],
        env={**kept, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_what_was_compiled_is_found_and_not_asked_for_again(tmp_path: Path) -> None:
    found, log = run(tmp_path)
    assert found["answer"]
    assert found["turns"][:3] == [32, 64, 64], "all are rehearsed, each once"
    assert found["hits"]
    assert all(found["hits"]), "Triton finds each of them in its cache"
    assert found["processes"] == 2
    assert log.count("compiled 3 kernels by 2 processes") == 1
    assert len(list((tmp_path / "manylora-compiled").iterdir())) == 3
    assert len(list(tmp_path.glob("*/*.cubin"))) == 3
    again, log = run(tmp_path)
    assert (again["answer"], again["turns"]) == (False, [32]), "the first tells that nothing is missing"
    assert "compiled" not in log


def test_a_compiler_that_fails_leaves_the_rest_to_the_launches(tmp_path: Path) -> None:
    found, log = run(tmp_path, "/bin/false")
    assert not found["answer"]
    assert log.count("others later: ") == 1
    assert not (tmp_path / "manylora-compiled").exists()
