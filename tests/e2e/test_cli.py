"""The command line as a process: help, flags, config files, bad values and ``manylora adapters``."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from manylora import LLM
from manylora.cli import main
from manylora.config.declaring import ConfigError
from manylora.flags import FLAGS
from tests.e2e import folders
from tests.e2e.process import (
    BASE,
    MODEL,
    Server,
    assert_error,
    environment,
    free_port,
    get,
    lines_of,
    post,
    run_cli,
)
from tests.sampled import sampled

CONTRACT_FLAGS = (
    "served-model-name", "adapter", "adapter-dir", "host", "port", "device", "dtype", "load-format",
    "max-model-len", "max-num-seqs", "max-batch-tokens", "page-tokens", "device-pool", "max-adapter-rank",
    "drain-timeout", "api-key", "metrics-key", "max-waiting", "max-connections", "max-body-size", "config",
    "step-timeout",
)  # fmt: skip


def assert_refused(*args: str, says: tuple[str, ...] = ()) -> str:
    """Exit code 2, one line on stderr (beside what was logged) that says the words, nothing on stdout.

    Returns stderr."""
    ended = run_cli(*args)
    assert ended.returncode == 2, ended.stderr
    (line,) = [line for line in lines_of(ended.stderr) if " INFO manylora" not in line]
    assert not ended.stdout
    for word in says:
        assert word in line
    return ended.stderr


class Here:
    """Commands in this process, which has imported what they need: for what is refused before anything starts."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *args: str) -> tuple[object, str, str]:
        """Exit code, stdout and stderr."""
        code: object
        try:
            code = main(args)
        except SystemExit as left:  # as argparse leaves
            code = left.code
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def assert_refused(self, *args: str, says: tuple[str, ...] = ()) -> None:
        """As ``assert_refused`` of a process, and nothing at all is logged."""
        code, out, err = self.run(*args)
        assert (code, out) == (2, ""), err
        (line,) = lines_of(err)
        for word in says:
            assert word in line


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """What is not refused would be served: it fails the test instead, and no signal of this process is handled."""

    def run_server(*_: object) -> int:
        raise AssertionError("it is served")

    monkeypatch.setattr("manylora.main.run_server", run_server)
    monkeypatch.setattr("manylora.processes.stop_signals", tuple)
    return Here(capsys)


def test_commands_say_that_kernels_are_being_compiled_and_nothing_else_of_the_log() -> None:
    said = "import logging as l; l.getLogger('manylora.kernels.x').info('compiling'); l.getLogger('x').info('no')"
    program = f"from manylora.cli import main; main(['reproduce', '--list']); {said}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (line,) = lines_of(ended.stderr)
    assert line.endswith(" INFO manylora.kernels.x: compiling")


def test_help_is_quick_and_names_all_flags() -> None:
    """Quick, since it imports nothing of weight."""
    shown = run_cli("serve", "--help", PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines_of(shown.stderr)}
    assert "argparse" in imported
    assert not imported & {"torch", "numpy", "starlette", "uvicorn", "asyncio", "tokenizers", "yaml"}
    text = shown.stdout
    for flag in (*CONTRACT_FLAGS, *(flag.option[2:] for flag in FLAGS)):
        assert f"--{flag}" in text
    for words in (("--help",), ("adapters", "--help"), ("adapters", "check", "--help")):
        ended = run_cli(*words)
        assert ended.returncode == 0
        assert "usage: manylora" in ended.stdout
    assert run_cli("--version").stdout.startswith("manylora ")


BAD_VALUES = [
    ("--port", "70000"), ("--port", "-1"), ("--port", "x"), ("--port", "8.5"), ("--device", "tpu"),
    ("--dtype", "int8"), ("--load-format", "x"), ("--device-pool", "10XB"), ("--device-pool", "-5"),
    ("--device-pool", "much"), ("--device-pool", "9" * 400), ("--max-model-len", "0"),
    ("--max-model-len", "9" * 30), ("--max-num-seqs", "0"), ("--max-num-seqs", "9" * 30),
    ("--max-batch-tokens", "x"), ("--page-tokens", "0"), ("--page-tokens", "9" * 30),
    ("--max-adapter-rank", "0"), ("--drain-timeout", "-1"), ("--drain-timeout", "nan"),
    ("--drain-timeout", "x"), ("--adapter", "x"), ("--adapter", "x="), ("--adapter", "=x"),
    ("--adapter-dir", "/no/such/folder"), ("--api-key", ""), ("--config", "/no/such/file"),
    ("--cache-policy", "mru"), ("--cache-set", "tau"), ("--cache-set", "window_s=x"),
    ("--cache-set", "adapter_share=0.2"),
    ("--host-pool", "-5"), ("--host-pool", "much"), ("--max-waiting", "0"), ("--max-waiting", "all"),
    ("--max-connections", "0"), ("--max-body-size", "0"), ("--max-body-size", "big"), ("--metrics-key", "no"),
    ("--max-num-seqs", "32769"),
    ("--max-num-seqs", "1000000000000"), ("--step-timeout", "0"), ("--step-timeout", "-1"),
    ("--step-timeout", "nan"), ("--step-timeout", "inf"), ("--step-timeout", "x"),
]  # fmt: skip


@pytest.mark.parametrize("flag", BAD_VALUES, ids=lambda flag: f"{flag[0]}={flag[1][:10]}")
def test_a_bad_value_is_refused_in_one_line_that_names_the_flag(flag: tuple[str, str], here: Here) -> None:
    name, value = flag
    here.assert_refused("serve", MODEL, name, value, says=("config file",) if name == "--config" else (name,))


@pytest.mark.parametrize(
    "flag", [("--port", "70000"), ("--port", "x")], ids=["by the settings", "by argparse"]
)
def test_a_process_refuses_a_bad_value_alike(flag: tuple[str, str]) -> None:
    assert flag in BAD_VALUES
    assert_refused("serve", MODEL, *flag, says=("--port",))


def test_usage_errors_are_one_line(here: Here) -> None:
    assert_refused(says=("COMMAND",))
    here.assert_refused("serve", says=("model",))
    here.assert_refused("serve", MODEL, "--no-such-flag", says=("--no-such-flag",))
    here.assert_refused("serve", MODEL, "--adapter", "x=a", "--adapter", "x=b", says=("twice",))


def test_a_log_level_that_is_none_is_refused_in_one_line() -> None:
    ended = run_cli("serve", MODEL, "--port", "0", MANYLORA_LOG_LEVEL="banana")
    assert ended.returncode == 2
    (line,) = lines_of(ended.stderr)
    assert "MANYLORA_LOG_LEVEL" in line
    assert "INFO" in line
    assert "BANANA" in line.upper()


def test_models_that_cannot_be_served(tmp_path: Path) -> None:
    assert_refused("serve", str(tmp_path / "none"), "--port", "0", says=("none", "no such directory"))
    assert_refused("serve", str(tmp_path), "--port", "0", says=("config.json",))
    (tmp_path / "config.json").write_text("{")
    assert_refused("serve", str(tmp_path), "--port", "0", says=("config.json", "JSON"))
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    assert_refused("serve", str(tmp_path), "--port", "0", says=("GPT2LMHeadModel", "not supported"))


def test_addresses_that_cannot_be_listened_on() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_refused("serve", MODEL, "--port", port, says=(port, "in use"))
    assert_refused("serve", MODEL, "--host", "x" * 70 + ".invalid", says=("cannot listen",))


ONLY_THE_ENGINE = ["pool", "length", "cuda", "trace", "journal", "adapter"]


@pytest.fixture
def refused_by_the_engine(
    adapters: Path, tmp_path: Path
) -> dict[str, tuple[tuple[str, str], tuple[str, ...]]]:
    """By case: a flag with its value, and what is said."""
    bad = folders.with_config(adapters / "german", tmp_path / "bad", use_dora=True)
    return {
        "cuda": (("--device", "cuda"), ("CUDA",)),
        "pool": (("--device-pool", "1KiB"), ("pool", "pages")),
        "length": (("--max-model-len", "5000"), ("5000", "1024")),
        "journal": (("--journal", str(tmp_path / "none" / "journal")), ("journal", "No such file")),
        "trace": (("--trace", str(tmp_path / "none" / "trace")), ("trace", "No such file")),
        "adapter": (("--adapter", f"x={bad}"), ("'x'", "DoRA")),
    }


@pytest.mark.parametrize("case", sampled(((case,) for case in ONLY_THE_ENGINE), 3))
def test_what_only_the_engine_can_refuse(
    case: str, refused_by_the_engine: dict[str, tuple[tuple[str, str], tuple[str, ...]]]
) -> None:
    args, says = refused_by_the_engine[case]
    said = assert_refused("serve", MODEL, "--port", "0", *args, says=says)
    if case in ("journal", "trace", "adapter"):
        assert "running on" not in said, "before the model is loaded"


def test_in_process_it_refuses_the_same(
    refused_by_the_engine: dict[str, tuple[tuple[str, str], tuple[str, ...]]],
) -> None:
    for (flag, value), says in refused_by_the_engine.values():
        name, _, path = value.partition("=")
        given: Any = {name: path} if flag == "--adapter" else int(value) if value.isdecimal() else value
        keyword = "adapters" if flag == "--adapter" else flag[2:].replace("-", "_")
        with pytest.raises(ConfigError) as refusal:
            LLM(MODEL, **{"device": "cpu", keyword: given})
        for word in says:
            assert word in str(refusal.value)


NAMED = ["missing", "weights", "name", "long", "base", "rank"]
ASK_LLM = """
import json, sys
from manylora import LLM
from manylora.config.declaring import ConfigError
for model, name, path, limit in json.loads(sys.argv[1]):
    try:
        LLM(model, {name: path}, max_adapter_rank=limit)
    except ConfigError as error:
        print("torch" in sys.modules, error)
"""


@pytest.fixture
def named(adapters: Path, tmp_path: Path) -> dict[str, tuple[str, str, int, tuple[str, ...]]]:
    """By case: name, path and limit of ranks of an adapter that is refused, and what is said."""
    good, bad = str(adapters / "german"), folders.copy_of(adapters / "german", tmp_path / "bad")
    (bad / folders.WEIGHTS).write_bytes(b"\x80\x04K\x01.")
    return {
        "missing": ("x", str(tmp_path / "none"), 64, ("'x'", "no adapter folder 'none'")),
        "weights": ("x", str(bad), 64, ("'x'", folders.WEIGHTS)),
        "name": ("x\ny", good, 64, ("'x\\ny'", "must be printable")),
        "long": ("n" * 201, good, 64, ("at most 200 characters",)),
        "base": (MODEL, good, 64, ("the name of the base model",)),
        "rank": ("x", good, 1, ("'x'", "rank")),
    }


@pytest.mark.parametrize("case", sampled(((case,) for case in NAMED), len(NAMED)))  # all are asked for below
def test_adapters_that_are_named_are_refused_before_the_model_is_loaded(
    case: str, named: dict[str, tuple[str, str, int, tuple[str, ...]]]
) -> None:
    name, path, limit, says = named[case]
    args = ("--port", "0", "--adapter", f"{name}={path}", "--max-adapter-rank", str(limit))
    assert "running on" not in assert_refused("serve", MODEL, *args, says=says)


def test_an_llm_refuses_them_before_torch_is_imported(
    named: dict[str, tuple[str, str, int, tuple[str, ...]]],
) -> None:
    asked = json.dumps([(MODEL, name, path, limit) for name, path, limit, _ in named.values()])
    argv = [sys.executable, "-c", ASK_LLM, asked]
    ended = subprocess.run(argv, capture_output=True, text=True, check=True, env=environment())
    for line, case in zip(lines_of(ended.stdout), NAMED, strict=True):
        assert line.startswith("False "), "torch is not imported, let alone a weight read"
        for word in named[case][-1]:
            assert word in line


def test_config_files(tmp_path: Path, here: Here) -> None:
    yaml_file, json_file = tmp_path / "serve.yaml", tmp_path / "serve.json"
    yaml_file.write_text("max-model-len: 64\nport: 70000\n")
    assert_refused("serve", MODEL, "--config", str(yaml_file), says=("--port", "70000"))
    # The command line wins, and its value is as bad.
    here.assert_refused("serve", MODEL, "--config", str(yaml_file), "--port", "70001", says=("70001",))
    json_file.write_text('{"max_num_seqs": 0, "model": "m"}')
    here.assert_refused("serve", "--config", str(json_file), says=("--max-num-seqs",))
    for text, words in (
        ("prot: 8000", ("prot",)),
        ("- a list", ("names and values",)),
        ("a: [", ("not valid",)),
        ("port: true", ("--port",)),
        ("api_key: 5", ("--api-key",)),
    ):
        yaml_file.write_text(text)
        here.assert_refused("serve", MODEL, "--config", str(yaml_file), says=words)


def test_every_flag_is_accepted_and_a_config_file_sets_the_same(adapters: Path, tmp_path: Path) -> None:
    """One server: half of the flags on the command line, half in a file, of which one is overruled.

    Its adapter root holds what must be skipped with a warning, and a key is needed.
    """
    root = tmp_path / "root"
    folders.copy_of(adapters / "german", root / "german")
    wide = folders.widened(
        adapters / "finnish", root / "wide", 64 // folders.rank_of(adapters / "finnish") + 1
    )
    shutil.copytree(adapters / "french", root / "truncated")
    (root / "truncated" / folders.WEIGHTS).write_bytes(b"\x08")
    shutil.copytree(adapters / "french", root / "lost")
    (root / "lost" / folders.CONFIG).unlink()
    shutil.copytree(adapters / "french", root / BASE)
    (root / "README").write_text("no adapter")
    port = free_port()
    settings = {
        "adapter": [f"named={adapters / 'coffee'}", f"german={adapters / 'french'}"], "host": "127.0.0.1",
        "device": "cpu", "dtype": "float32", "load_format": "auto", "max_model_len": 99, "max_num_seqs": 8,
        "api_key": ["first", "second"], "page_tokens": 8,
    }  # fmt: skip
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(settings))
    journal = tmp_path / "journal"
    args = ("--config", str(file), "--adapter-dir", str(root), "--port", str(port), "--max-model-len", "200",
            "--max-batch-tokens", "64", "--device-pool", "32MiB", "--max-adapter-rank", "64",
            "--drain-timeout", "3", "--journal", str(journal))  # fmt: skip
    with Server(*args) as server:
        server.wait_ready()
        assert server.url.endswith(f":{port}")
        for name, why in (
            ("wide", f"rank {folders.rank_of(wide)}"),
            ("truncated", "truncated"),
            ("lost", folders.CONFIG),
            (BASE, "base model"),
        ):
            (line,) = [line for line in lines_of(server.log) if f"adapter '{name}' in" in line]
            assert "WARNING" in line
            assert why in line
        _check_keys(server)
        server.http.headers["Authorization"] = "Bearer second"
        cards = server.http.get("/v1/models").json()["data"]
        assert sorted(card["id"] for card in cards) == sorted([BASE, "german", "named"])
        roots = {card["id"]: card["root"] for card in cards}
        assert roots["german"] == str(adapters / "french")  # an explicit --adapter wins
        assert {card["max_model_len"] for card in cards} == {200}
        assert server.text(model="named", max_tokens=4)
        # A second server on the port is refused before it loads anything; the first one is unharmed.
        assert_refused("serve", MODEL, "--port", str(port), says=(str(port), "in use"))
        assert server.text(model="german", max_tokens=4)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        server.assert_all_gone()
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert lines[0]["policy"]["page_tokens"] == 8
    assert [line[1] for line in lines[1:]].count("Arrive") == 2


def _check_keys(server: Server) -> None:
    """401 without a key on /v1/*; probes stay open."""
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer"},
                    {"Authorization": "first"}, {"Authorization": "Basic first"},
                    {"x-api-key": "first"}):  # fmt: skip
        for path in ("/v1/models", "/v1/completions", "/v1/load_lora_adapter", "/v1/nope"):
            answer = post(f"{server.url}{path}", headers=headers, json={})
            assert_error(answer, 401, "key")
    for key in ("first", "second"):
        answer = get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200
    assert_error(server.http.get("/metrics"), 401)
    for path in ("/health", "/version", "/docs"):
        assert get(f"{server.url}{path}").status_code == 200


def test_adapters_list(adapters: Path, tmp_path: Path, here: Here) -> None:
    root = tmp_path / "root"
    shutil.copytree(adapters / "german", root / "good")
    folders.with_config(adapters / "german", root / "dora", use_dora=True)
    listed = run_cli("adapters", "list", str(root), "--model", MODEL)
    assert (listed.returncode, listed.stderr) == (0, "")
    lines = {line.split()[0]: line for line in lines_of(listed.stdout)}
    assert set(lines) == {"good", "dora"}
    assert f"rank {folders.rank_of(root / 'good')}" in lines["good"]
    assert "pages" in lines["good"]
    assert "does not fit" in lines["dora"]
    assert "DoRA" in lines["dora"]
    code, out, _ = here.run("adapters", "list", str(root), "--model", MODEL, "--json")
    assert code == 0
    assert {name: facts["fits"] for name, facts in json.loads(out).items()} == {"good": True, "dora": False}
    code, out, err = here.run("adapters", "list", str(tmp_path / "none"), "--model", MODEL)
    assert (code, out) == (2, "")
    assert "none" in err


def test_adapters_check(server: Server, adapters: Path, tmp_path: Path, here: Here) -> None:
    good = str(adapters / "japanese")
    rank = folders.rank_of(adapters / "japanese")
    code, out, err = here.run("adapters", "check", good, "--model", MODEL)
    assert (code, err) == (0, "")
    for word in ("rank", str(rank), "pages", "fits", "yes"):
        assert word in out
    code, out, _ = here.run("adapters", "check", good, "--model", MODEL, "--json")
    assert json.loads(out)["pages"] == server.gauge('manylora:adapter_pages{adapter_name="japanese"}')
    path, tensor, shape = folders.of_other_base(adapters / "german", tmp_path / "foreign")
    here.assert_refused(
        "adapters", "check", str(path), "--model", MODEL, says=(tensor, str(shape), "[256, 256]")
    )
    none = str(tmp_path / "none")
    for args, says in (
        ((none, "--model", MODEL), "none"),
        ((good, "--model", none), "none"),
        ((good, "--model", MODEL, "--max-adapter-rank", "1"), f"rank {rank}"),
    ):
        code, out, err = here.run("adapters", "check", *args)
        assert (code, out) == (2, "")
        (line,) = lines_of(err)
        assert says in line
    here.assert_refused("adapters", "check", good, says=("--model",))
