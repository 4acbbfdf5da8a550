"""Plain scripts: no ``__main__`` guard, no close, several engines; and what importing costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.engines import Bench

SOURCES = Path(__file__).resolve().parents[2] / "src"

SCRIPT = """
import asyncio, os, sys
from pathlib import Path
from manylora import LLM, AsyncLLM, SamplingParams

model, adapter = sys.argv[1:]
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
settings = {"device": "cpu", "device_pool": "4MiB"}

def children():
    lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    return " ".join(lists).split()

for _ in range(2):
    first = LLM(model, {"a": adapter}, **settings)
    second = LLM(model, {"a": adapter}, **settings)
    for llm, name in ((first, None), (second, "a")):
        print(*llm.generate([[1, 2, 3]], params, name)[0].outputs[0].token_ids)
    assert children() == [], children()

async def main():
    global third
    third = AsyncLLM(model, {"a": adapter}, **settings)
    print(*(await third.generate([[1, 2, 3]], params, "a"))[0].outputs[0].token_ids)

asyncio.run(main())
print("end")
"""


def run_python(*args: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *args], env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks into Linux's /proc")
def test_a_script_without_guard_and_without_close(bench: Bench, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    adapter = bench.checkpoint.adapters["everything"]
    done = run_python(str(script), str(bench.checkpoint.folder), str(adapter))
    base = bench.reference.greedy([1, 2, 3], None, 6)
    adapted = bench.reference.greedy([1, 2, 3], "everything", 6)
    expected = [base, adapted, base, adapted, adapted]
    assert done.stdout.splitlines() == [*(" ".join(map(str, tokens)) for tokens in expected), "end"]
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0


def test_importing_loads_nothing_heavy() -> None:
    code = "import sys, manylora; from manylora import SamplingParams; print(*sys.modules)"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    heavy = {"torch", "numpy", "transformers", "tokenizers", "starlette", "jinja2"}
    assert heavy.isdisjoint(done.stdout.split())
