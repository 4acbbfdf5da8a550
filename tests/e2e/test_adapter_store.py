"""A server and an ``LLM`` on one adapter store: restarts, damage, and what is refused at the start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from manylora import LLM, SamplingParams
from tests.e2e.process import BASE, MODEL, Server, lines_of, run_cli, wait_until

NAMES = ("german", "greek", "spanish")
LABEL = f'{{model_name="{BASE}"}}'
HITS, MISSES = (f"manylora:adapter_store_{name}_total{LABEL}" for name in ("hits", "misses"))
BYTES = f"manylora:adapter_store_bytes{LABEL}"
POOLS = ("--device", "cpu", "--device-pool", "16MiB", "--host-pool", "16MiB")


@pytest.fixture
def root(adapters: Path, tmp_path: Path) -> Path:
    for name in NAMES:
        shutil.copytree(adapters / name, tmp_path / "adapters" / name)
    return tmp_path / "adapters"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def packed(store: Path) -> list[Path]:
    return sorted(store.glob("*.packed"))


def answers(server: Server) -> list[str]:
    return [server.text(model=name, max_tokens=12) for name in NAMES]


def test_a_store_outlives_its_server(root: Path, store: Path, tmp_path: Path) -> None:
    args = ("--adapter-dir", str(root), *POOLS, "--adapter-store", str(store), "--adapter-store-size", "1GiB")
    with Server(*args) as server:
        server.wait_ready()
        first = answers(server)
        wait_until(lambda: len(packed(store)) == len(NAMES), "packed files")
        assert server.unload("greek").status_code == 200
        assert server.load("greek", root / "greek").status_code == 200
        assert answers(server) == first
        found = server.metrics()
        assert (found[HITS], found[MISSES]) == (1, len(NAMES))
        assert found[BYTES] == sum(file.stat().st_size for file in packed(store))
        server.process.kill()  # as a crash does
    damaged = packed(store)[0]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    (store / "left.1.abcdef01.part").write_bytes(b"of a process that was killed")
    config = tmp_path / "serve.yaml"
    config.write_text(f"adapter-dir: {root}\nadapter-store: {store}\n")
    with Server("--config", str(config), *POOLS) as server:
        server.wait_ready()
        assert answers(server) == first
        found = server.metrics()
        assert (found[HITS], found[MISSES]) == (len(NAMES) - 1, 1)
        wait_until(lambda: len(packed(store)) == len(NAMES), "the damaged file anew")
        assert not list(store.glob("*.part"))


def test_in_process(root: Path, store: Path) -> None:
    settings: dict[str, Any] = {"device": "cpu", "device_pool": "16MiB", "host_pool": "16MiB"}
    paths = {name: str(root / name) for name in NAMES}
    params = SamplingParams(temperature=0.0, max_tokens=10)
    prompts = [[5, 6, 7, 8]] * len(NAMES)

    def tokens(**more: Any) -> tuple[list[list[int]], dict[str, float]]:
        with LLM(MODEL, paths, served_model_name=BASE, **settings, **more) as llm:
            found = [out.outputs[0].token_ids for out in llm.generate(prompts, params, list(NAMES))]
            if more:
                wait_until(lambda: len(packed(store)) == len(NAMES), "packed files")
                size = sum(file.stat().st_size for file in packed(store))
                wait_until(lambda: llm.metrics()[BYTES] == size, "bytes of packed files")
            return [list(ids) for ids in found], llm.metrics()

    expected, without = tokens()
    assert (without[HITS], without[MISSES], without[BYTES]) == (0, 0, 0)
    for hits in (0, len(NAMES)):
        found, figures = tokens(adapter_store=str(store), adapter_store_size="64MiB")
        assert found == expected
        assert (figures[HITS], figures[MISSES]) == (hits, len(NAMES) - hits)
        assert figures[BYTES] == sum(file.stat().st_size for file in packed(store))


def test_a_store_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    ended = run_cli("serve", MODEL, "--port", "0", "--device", "cpu", "--adapter-store", os.fspath(file))
    assert ended.returncode == 2
    assert lines_of(ended.stderr)[-1].endswith(f"--adapter-store {file} cannot be used: it is not a folder")
    assert "Traceback" not in ended.stderr
