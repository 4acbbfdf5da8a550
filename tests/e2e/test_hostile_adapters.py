"""Adapters made to stop a server: at its start, while it runs, and on the command line."""

from __future__ import annotations

import io
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from manylora.cli import main
from tests.e2e import folders
from tests.e2e.folders import CONFIG, WEIGHTS
from tests.e2e.process import (
    MODEL,
    REPOSITORY,
    Server,
    assert_error,
    completion,
    lines_of,
    post,
    run_cli,
)

GOOD = REPOSITORY / "demo" / "adapters" / "german"
ANSWER_LIMIT_S = 60.0
"""For a refusal, on a machine that others keep busy: each takes at most seconds."""
DELAY_LIMIT_S = 5.0
"""For what others ask meanwhile; half a second on a machine that is free."""


def _header(path: Path, raw: bytes, size_bytes: int | None = None) -> None:
    with open(path / WEIGHTS, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        if size_bytes is not None:
            file.truncate(8 + len(raw) + size_bytes)


def _dimensions(count: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        shape = b",".join([b"9223372036854775807"] * count)
        _header(path, b'{"x":{"dtype":"F32","shape":[' + shape + b'],"data_offsets":[0,0]}}')

    return change


def _keys(path: Path) -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    _header(path, json.dumps({f"key {i}": empty for i in range(270_000)}).encode())


def _rank(rank: int) -> Callable[[Path], None]:
    """Weights of gigabytes that take no room on the disk."""

    def change(path: Path) -> None:
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
        size = rank * 256 * 4
        entries = {
            name.format(side): {"dtype": "F32", "shape": shape, "data_offsets": [begin, begin + size]}
            for side, shape, begin in (("A", [rank, 256], 0), ("B", [256, rank], size))
        }
        _header(path, json.dumps(entries).encode(), 2 * size)
        _config(r=rank, rank_pattern={}, target_modules=["q_proj"])(path)

    return change


def _config(**changes: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / CONFIG).read_text())
        (path / CONFIG).write_text(json.dumps({**config, **changes}))

    return change


def _deep(path: Path) -> None:
    config = {**json.loads((path / CONFIG).read_text()), "bias": "HERE"}
    (path / CONFIG).write_text(json.dumps(config).replace('"HERE"', "[" * 900 + "]" * 900))


def _half_a_character(path: Path) -> None:
    _header(path, b'{"half\\ud83d":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4)


_SLOW = "(?:.|.)?" * 30 + "Z"

HOSTILE: dict[str, Callable[[Path], None]] = {
    "dimensions": _dimensions(100_000),
    "more-dimensions": _dimensions(600_000),
    "keys": _keys,
    "rank-pattern": _config(rank_pattern={_SLOW: 8}, r=7),
    "alpha-pattern": _config(alpha_pattern={_SLOW: 8, ".?" * 22 + "Z": 8}, r=7),
    "many-patterns": _config(rank_pattern={".*" * 900 + str(i): 8 for i in range(70)}),
    "target-modules": _config(target_modules=_SLOW),
    "exclude-modules": _config(exclude_modules=_SLOW, r=7),
    "layers-pattern": _config(layers_pattern=_SLOW, layers_to_transform=[0]),
    "composed-group": _config(layers_pattern="(?P<idx>layers)", layers_to_transform=[0]),
    "composed-flags": _config(layers_pattern="(?i)layers", layers_to_transform=[0]),
    "rank": _rank(100_000),
    "more-rank": _rank(1_000_000),
    "deep": _deep,
    "half-a-character": _half_a_character,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of hostile adapters and a good one."""
    root = tmp_path_factory.mktemp("hostile") / "adapters"
    folders.copy_of(GOOD, root / "good")
    for name, breaking in HOSTILE.items():
        breaking(folders.copy_of(GOOD, root / name))
    return root


@pytest.fixture(scope="module")
def started(root: Path) -> Iterator[Server]:
    with Server("--adapter-dir", str(root), "--device-pool", "24MiB", "--host-pool", "32MiB") as server:
        yield server.wait_ready()


def test_a_server_starts_without_them(started: Server) -> None:
    served = {card["id"] for card in started.http.get("/v1/models").json()["data"]}
    assert "good" in served
    assert not served & HOSTILE.keys()
    for name in HOSTILE:
        assert f"adapter '{name}' in" in started.log, "the log says that it is skipped"
    assert started.text(model="good")


@pytest.mark.parametrize("name", HOSTILE)
def test_loading_one_holds_up_nothing_else(name: str, started: Server, root: Path) -> None:
    delays, done = [], threading.Event()

    def ask_others() -> None:
        """From this process, which the server's and the engine's work does not hold up."""
        while not done.is_set():
            began_s = time.monotonic()
            answer = post(f"{started.url}/v1/completions", json=completion(model="good", max_tokens=1))
            assert answer.status_code == 200
            delays.append(time.monotonic() - began_s)

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(ask_others)
        try:
            began_s = time.monotonic()
            error = assert_error(started.load("loaded", root / name), 400)
            took_s = time.monotonic() - began_s
        finally:
            done.set()
        asking.result()
    assert took_s < ANSWER_LIMIT_S
    assert max(delays) < DELAY_LIMIT_S
    assert str(root.parent) not in error["message"]
    error["message"].encode()


def test_they_took_no_memory(started: Server) -> None:
    status = Path(f"/proc/{started.engine_pid}/status").read_text()
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    assert peak_kib < 1.5 * 2**20, "gigabytes were asked for"


def test_files_that_change_are_no_fault_of_who_asks(started: Server, root: Path) -> None:
    folder = folders.copy_of(GOOD, root / "changing")
    try:
        assert started.load("changing", folder).status_code == 200
        _config(lora_alpha=99)(folder)
        error = assert_error(started.complete(model="changing"), 503, f"{CONFIG} has changed", "add it again")
        assert str(root) not in error["message"]
        shutil.rmtree(folder)
        error = assert_error(started.complete(model="changing"), 503, "no adapter folder")
        assert str(root) not in error["message"]
        assert started.text(model="good")
        assert started.unload("changing").status_code == 200
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_the_command_line_says_what_is_wrong_with_each(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", MODEL, "--max-adapter-rank", "64")
    listed = run_cli("adapters", "list", str(root), *options)
    assert listed.returncode == 0, listed.stderr
    lines = {line.split()[0]: line for line in lines_of(listed.stdout)}
    assert lines.keys() == {"good", *HOSTILE}
    for name, line in lines.items():
        assert ("does not fit" in line) == (name != "good"), line
    assert "half\\ud83d" in lines["half-a-character"]
    for name in ("dimensions", "rank-pattern", "half-a-character"):
        assert main(["adapters", "check", str(root / name), *options]) == 2, name
        assert len(lines_of(capsys.readouterr().err)) == 1


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_reports_are_written_whatever_the_terminal_can_show(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders.copy_of(GOOD, tmp_path / "größe")
    _config(base_model_name_or_path="half\ud83d\x1b[2J größe")(folder)
    for args in (("check", str(folder)), ("list", str(tmp_path)), ("list", str(tmp_path), "--json")):
        shown = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding))
        assert main(["adapters", *args, "--model", MODEL]) == 0
        assert shown.getvalue()
        assert b"\x1b" not in shown.getvalue()


def test_a_process_writes_them_too(tmp_path: Path) -> None:
    folder = folders.copy_of(GOOD, tmp_path / "größe")
    _config(base_model_name_or_path="half\ud83d\x1b[2J größe")(folder)
    ended = run_cli("adapters", "list", str(tmp_path), "--json", "--model", MODEL, PYTHONIOENCODING="ascii")
    assert ended.returncode == 0, ended.stderr
    assert len(json.loads(ended.stdout)) == 1
