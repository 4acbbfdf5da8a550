"""vLLM beside ours: the whole flow with a stand-in for vLLM, which no machine of these tests can run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.benchmarks.chat_runs import TOY, turns_of
from manylora_lab.benchmarks.offline_runs import read_offline_rows

STAND_IN = {
    "__init__.py": """
import types
class SamplingParams:
    def __init__(self, **given):
        assert given.pop("ignore_eos") and not given.pop("detokenize") and given.pop("temperature") == 0.0
        self.max_tokens = given["max_tokens"]
class LLM:
    def __init__(self, **settings):
        assert settings["load_format"] == "dummy"
        self.loras = []
        self.llm_engine = types.SimpleNamespace(add_lora=self.loras.append)
    def generate(self, prompts, params, use_tqdm, lora_request):
        assert len(prompts) == len(params)
        assert lora_request is None or len(lora_request) == len(prompts)
        assert (lora_request is None) == (not self.loras)
        made = lambda one: types.SimpleNamespace(token_ids=[5] * one.max_tokens)
        return [types.SimpleNamespace(outputs=[made(one)]) for one in params]
""",
    "lora/__init__.py": "",
    "lora/request.py": """
import pathlib
class LoRARequest:
    def __init__(self, name, number, path):
        assert number > 0 and (pathlib.Path(path) / "adapter_config.json").exists() and path.endswith(name)
""",
    "sampling_params.py": "class RequestOutputKind:\n    DELTA = 1\n",
    "engine/__init__.py": "",
    "engine/arg_utils.py": "class AsyncEngineArgs:\n    def __init__(self, **given): self.given = given\n",
    "v1/__init__.py": "",
    "v1/engine/__init__.py": "",
    "v1/engine/async_llm.py": """
import asyncio, os, types
class AsyncLLM:
    errored = False
    @classmethod
    def from_engine_args(cls, args):
        assert args.given["max_loras"] == 50 and args.given["kv_offloading_backend"] == "native"
        if args.given["max_model_len"] == 1:
            raise ValueError("too small")
        return cls()
    async def reset_prefix_cache(self):
        return True
    async def generate(self, prompt, params, request_id, lora_request):
        for number in range(params.max_tokens):
            await asyncio.sleep(0)
            tokens = types.SimpleNamespace(token_ids=[5])
            yield types.SimpleNamespace(outputs=[tokens], num_cached_tokens=len(prompt["prompt_token_ids"]) // 2)
    def shutdown(self):
        pass
""",
}
CHAT = ["--set", 'kv_offloading_backend="native"', "--set", "max_loras=50"]


def run(folder: Path, *args: str) -> dict[str, Any]:
    """The record."""
    for name, text in STAND_IN.items():
        path = folder / "site" / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    known = folder / "site" / "vllm-0.0.dist-info" / "METADATA"
    known.parent.mkdir(exist_ok=True)
    known.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0\n")
    out = folder / "vllm.json"
    words = [sys.executable, "-m", "manylora_lab.benchmarks.vllm_peer", "--toy", "--out", str(out), *args]
    searched = os.pathsep.join([str(folder / "site"), *(one for one in sys.path if one)])
    subprocess.run(
        [*words, "--commit", "abc"], env={**os.environ, "PYTHONPATH": searched}, check=True, timeout=120
    )
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.long
def test_its_parts(tmp_path: Path) -> None:
    found = run(tmp_path, "--parts", "base,lora", "--popularities", "distinct,uniform")
    assert found["left_out"] == []
    assert found["vllm"] == "0.0"
    rows = [*found["base"], *found["lora"]]
    assert [row["popularity"] for row in rows] == [None, "distinct", "uniform"]
    assert {row["tokens"] for row in rows} == {sum(row["output_tokens"] for row in read_offline_rows(True))}
    assert found["engines"]["lora"]["lora_target_modules"][0] == "down_proj"
    assert found["provenance"]


@pytest.mark.long
def test_chat(tmp_path: Path) -> None:
    found = run(tmp_path, "--parts", "chat", "--rates", "10", *CHAT)
    assert found["left_out"] == []
    (row,) = found["chat"]
    turns = turns_of("10", TOY)
    assert row["summary"]["failed"] == 0
    assert row["summary"]["requests"] == len(turns)
    assert 0.4 < row["summary"]["prefix_hit"] < 0.6
    assert found["engines"]["chat"]["max_loras"] == 50


def test_an_engine_that_fails_is_named(tmp_path: Path) -> None:
    found = run(tmp_path, "--parts", "chat", *CHAT, "--set", "max_model_len=1")
    assert found["left_out"] == ["chat: the engine failed"]
    assert "chat" not in found
