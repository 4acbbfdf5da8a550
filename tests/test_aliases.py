"""Other engines' spellings of flags, wherever settings are written, against the table in docs/flags.md."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import manylora.main
from manylora.aliases import (
    ALIASES,
    FOREIGN,
    REMOVED,
    REMOVED_PARAMETERS,
    REMOVED_VALUES,
    Alias,
    Foreign,
)
from manylora.cli import _parser, main
from manylora.config.declaring import ConfigError, option_of
from manylora.config.named import find_commands
from manylora.config.sections import EngineSettings, HttpSettings
from manylora.flags import FLAGS, build_settings, canonical
from manylora.llm import LLM, AsyncLLM

PAGE = Path(__file__).parent.parent / "docs" / "flags.md"
PLAIN = [
    alias for alias in ALIASES if alias.of is not None and not alias.lists_adapters and alias.switch is None
]
ADAPTERS = [alias for alias in ALIASES if alias.lists_adapters]
SWITCHES = [alias for alias in ALIASES if alias.of is None]
plain = pytest.mark.parametrize("alias", PLAIN, ids=lambda alias: alias.name)
adapters = pytest.mark.parametrize("alias", ADAPTERS, ids=lambda alias: alias.name)
switches = pytest.mark.parametrize("alias", SWITCHES, ids=lambda alias: alias.name)


class Reached(Exception):
    """The settings came where something would be built from them."""


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is served; this process keeps its signal handlers."""

    def reached(*settings: Any) -> None:
        raise Reached(*settings)

    monkeypatch.setattr(manylora.main, "run_server", reached)
    monkeypatch.setattr(manylora.main, "build_driver", reached)
    monkeypatch.setattr(manylora.main, "load_texts", lambda model: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def built(**values: Any) -> tuple[EngineSettings, HttpSettings]:
    return build_settings({"model": "m", **values})


def served(*args: str) -> tuple[EngineSettings, HttpSettings]:
    with pytest.raises(Reached) as reached:
        main(["serve", "m", *args])
    return reached.value.args[0], reached.value.args[1]


def test_names_are_told_apart() -> None:
    own = {flag.name for flag in FLAGS}
    assert not own & {alias.name for alias in ALIASES}
    assert len({alias.name for alias in ALIASES}) == len(ALIASES)


def test_help_shows_each_beside_what_it_means() -> None:
    (commands,) = [action for action in _parser(find_commands())._actions if action.dest == "==SUPPRESS=="]
    assert isinstance(commands.choices, dict)
    text = " ".join(commands.choices["serve"].format_help().split())
    for alias in ALIASES:
        assert alias.option in text
        says = f"always on, {alias.means}" if alias.of is None else f"the same as {alias.same}"
        assert f"{alias.engines}: {says}" in text


@plain
@pytest.mark.usefixtures("stopped")
def test_it_sets_what_the_flag_sets(alias: Alias, tmp_path: Path) -> None:
    assert alias.of is not None
    expected = built(**{alias.of: 96})
    assert expected != built()
    file = tmp_path / "serve.json"
    for key in (alias.name, alias.option.lstrip("-")):
        file.write_text(json.dumps({key: 96}))
        assert served("--config", str(file)) == expected
    assert served(alias.option, "96") == expected
    assert built(**{alias.name: 96}) == expected
    keywords: dict[str, Any] = {alias.name: 96}
    for kind in (LLM, AsyncLLM):
        with pytest.raises(Reached) as reached:
            kind("m", **keywords)
        assert reached.value.args[0] == expected[0]


@plain
@pytest.mark.usefixtures("stopped")
def test_two_spellings_agree_or_are_refused(
    alias: Alias, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert alias.of is not None
    own = "--" + alias.of.replace("_", "-")
    expected = built(**{alias.of: 96})
    assert served(alias.option, "96", own, "96") == expected
    assert built(**{alias.name: "96", alias.of: 96}) == expected
    assert main(["serve", "m", alias.option, "96", own, "95"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert alias.option in line
    assert own in line
    both: dict[str, Any] = {alias.name: 96, alias.of: 95}
    for kind in (LLM, AsyncLLM):
        with pytest.raises(ConfigError, match=alias.option):
            kind("m", **both)
    # The command line wins over a file, whatever the spelling.
    file = tmp_path / "serve.json"
    for in_file, given in ((alias.name, own), (alias.of, alias.option)):
        file.write_text(json.dumps({in_file: 95}))
        assert served("--config", str(file), given, "96") == expected
    file.write_text(json.dumps({alias.name: 95, alias.of: 96}))
    assert main(["serve", "m", "--config", str(file)]) == 2


def test_two_aliases_of_one_flag_agree_or_are_refused() -> None:
    assert built(block_size=32, page_size=32) == built(page_tokens=32)
    with pytest.raises(ConfigError, match="--block-size and --page-size"):
        built(block_size=32, page_size=16)


@plain
@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("wrong", ["x", "1.5", "0", "-3"])
def test_a_bad_value_is_one_line(alias: Alias, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert alias.of is not None
    assert main(["serve", "m", alias.option, wrong]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    own = "--" + alias.of.replace("_", "-")
    assert {alias.option, own} & set(re.findall(r"[-\w]+", line))


GERMAN = {"german": "./de", "legal": "./legal=2"}


@adapters
@pytest.mark.usefixtures("stopped")
def test_adapters_are_listed_in_every_form(alias: Alias, tmp_path: Path) -> None:
    expected = built(adapter=GERMAN)
    objects: list[dict[str, Any]] = [
        {"name": "german", "path": "./de", "base_model_name": "m"},
        {"lora_name": "legal", "lora_path": "./legal=2", "pinned": False, "base_model_name": None},
    ]
    texts = [json.dumps(one) for one in objects]
    pairs = ["german=./de", "legal=./legal=2"]
    assert served(alias.option, *pairs) == expected
    assert served(alias.option, *texts) == expected
    assert served(alias.option, pairs[0], texts[1]) == expected
    assert served(alias.option, pairs[0], alias.option, pairs[1]) == expected
    assert served(alias.option, *pairs, "--adapter", pairs[0], "--adapter", pairs[1]) == expected
    for value in (pairs, objects, texts, GERMAN):
        assert built(**{alias.name: value}) == expected
        (tmp_path / "serve.json").write_text(json.dumps({alias.name: value}))
        assert served("--config", str(tmp_path / "serve.json")) == expected
    # The base may be named in another place than the adapter.
    (tmp_path / "serve.json").write_text(
        json.dumps({alias.name: [{**objects[0], "base_model_name": "shown"}]})
    )
    named, _ = served("--config", str(tmp_path / "serve.json"), "--served-model-name", "shown")
    assert named.adapters.adapters == (("german", "./de"),)


@adapters
@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize(
    "wrong",
    [
        ["./de"], ["german="], ["=./de"], ["a=x", "a=y"], ["{"], ['{"name": "german"}'], ['{"path": "./de"}'],
        ['{"name": 1, "path": "./de"}'], ['{"name": "a=b", "path": "./de"}'], ['{"name": "", "path": "./de"}'],
        ['{"name": "german", "path": "./de", "base_model_name": "other"}'],
        ['{"name": "german", "path": "./de", "pinned": true}'],
        ['{"name": "german", "path": "./de", "scale": 2}'],
    ],
)  # fmt: skip
def test_adapters_that_cannot_be_had_are_one_line(
    alias: Alias, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "m", alias.option, *wrong]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert alias.option in line or "--adapter" in line


@adapters
def test_adapters_of_two_spellings_agree_or_are_refused(alias: Alias) -> None:
    with pytest.raises(ConfigError, match=alias.option):
        built(**{alias.name: ["german=./de"], "adapter": ["german=./other"]})


@switches
@pytest.mark.usefixtures("stopped")
def test_what_is_always_on_can_be_asked_for(
    alias: Alias, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"{alias.name}: true")
    assert served(alias.option) == served("--config", str(file)) == built(**{alias.name: True}) == built()
    file.write_text(f"{alias.name}: false")
    assert main(["serve", "m", "--config", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert alias.option in line
    if alias.contradicts is not None:
        name, contrary = alias.contradicts
        with pytest.raises(ConfigError, match=alias.option):
            built(**{alias.name: True, name: contrary})


@pytest.mark.usefixtures("stopped")
def test_a_switch_of_theirs_is_a_value_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = built(lora_sharding="sharded")
    assert served("--fully-sharded-loras") == built(fully_sharded_loras=True) == expected != built()
    file = tmp_path / "serve.yaml"
    file.write_text("fully-sharded-loras: false")
    assert served("--config", str(file)) == built(lora_sharding="replicated")
    assert served("--config", str(file), "--fully-sharded-loras") == expected
    assert main(["serve", "m", "--fully-sharded-loras", "--lora-sharding", "replicated"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--fully-sharded-loras" in line
    with pytest.raises(ConfigError, match="--fully-sharded-loras"):
        built(fully_sharded_loras="perhaps")


def test_other_commands_take_them_where_they_take_the_flag() -> None:
    args = ["warmup", "m", "--max-num-batched-tokens", "96", "--block-size", "8", "--max-lora-rank", "4"]
    parsed = _parser(find_commands()).parse_args(args)
    assert (parsed.max_num_batched_tokens, parsed.block_size, parsed.max_lora_rank) == ("96", "8", "4")
    assert canonical({"block_size": "8"}) == {"page_tokens": 8}


def given(foreign: Foreign, value: str) -> list[str]:
    """Words of a command line that give a flag this value."""
    if foreign.is_switch:
        return [foreign.option if value == "true" else option_of(f"no_{foreign.name}")]
    return [f"{foreign.option}={value}"]


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda foreign: foreign.name)
def test_what_has_no_counterpart_is_noted_or_refused(
    foreign: Foreign, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    other = "true" if foreign.is_switch else "4"
    noted = [] if foreign.harmless is not None else [f"{foreign.option} does nothing here: {foreign.because}"]
    for value in (other,) if foreign.harmless is None else foreign.harmless:
        file = tmp_path / "serve.yaml"
        file.write_text(f"{foreign.name}: {value}")
        keyword: Any = value == "true" if foreign.is_switch else value
        caplog.clear()
        assert served(*given(foreign, value)) == served("--config", str(file)) == built()
        assert built(**{foreign.name: keyword}) == built()
        assert caplog.messages == noted * 3
    if foreign.harmless is None:
        return
    capsys.readouterr()
    assert main(["serve", "m", *given(foreign, other)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert foreign.option in line
    assert foreign.because in line
    for kind in (LLM, AsyncLLM):
        keywords: dict[str, Any] = {foreign.name: True if foreign.is_switch else other}
        with pytest.raises(ConfigError, match=foreign.option):
            kind("m", **keywords)


@pytest.mark.usefixtures("stopped")
def test_the_command_line_wins_over_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("trust-remote-code: true")
    assert main(["serve", "m", "--config", str(file)]) == 2
    assert served("--config", str(file), "--no-trust-remote-code") == built()


@pytest.mark.usefixtures("stopped")
def test_a_copied_command_is_taken() -> None:
    found = served(
        "--served_model_name", "a", "b:c", "--max_lora_rank=64", "--gpu_memory_utilization", "0.9",
        "--enforce-eager", "--lora-modules", "my_de=./my_de", "--seed", "7", "--root-path=/llm", "--max-loras",
        "4",
    )  # fmt: skip
    assert found == built(
        served_model_name=["a", "b:c"], max_adapter_rank=64, gpu_memory_utilization=0.9, cuda_graphs="off",
        adapter={"my_de": "./my_de"}, seed=7, root_path="/llm",
    )  # fmt: skip
    assert served("--no-enforce-eager") == built(enforce_eager=False) == built()


def test_what_sizes_the_pool_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="--device-pool and --gpu-memory-utilization"):
        built(gpu_memory_utilization=0.9, device_pool="1GiB")


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("option", ["--model", "--model-path"])
def test_the_model_may_be_an_option(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Reached) as reached:
        main(["serve", option, "m", "--served-model-name", "a", "b"])
    assert reached.value.args == built(served_model_name=["a", "b"])
    assert main(["serve", "m", option, "n"]) == 2
    assert "MODEL and --model" in capsys.readouterr().err


@pytest.mark.usefixtures("stopped")
def test_the_model_may_follow_on_its_names(tmp_path: Path) -> None:
    with pytest.raises(Reached) as reached:
        main(["serve", "--served-model-name", "a", "b", "m"])
    assert reached.value.args[0] == built(served_model_name=["a", "b"])[0]
    file = tmp_path / "serve.yaml"
    file.write_text("model: m\nserved-model-name: [x]")
    with pytest.raises(Reached) as reached:
        main(["serve", "--config", str(file), "--served-model-name", "a", "b"])
    assert reached.value.args[0].model.names == ("a", "b")


def test_a_base_has_several_names() -> None:
    engine, _ = built(served_model_name=["a", "", "b", "a"], lora_modules=[
        {"name": "x", "path": "./x", "base_model_name": "b"}, {"name": "y", "path": "./y", "base_model_name": "m"},
    ])  # fmt: skip
    assert (engine.model.names, engine.model.name) == (("a", "b"), "a")
    assert [name for name, _ in engine.adapters.adapters] == ["x", "y"]
    assert built(served_model_name="")[0].model.names == built()[0].model.names == ("m",)


KEYS = "\ufeff# one a line\n\nfirst\n  second \n#third\n"


@pytest.mark.usefixtures("stopped")
def test_keys_come_from_a_file_and_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text(KEYS, encoding="utf-8")
    assert served("--api-key-file", str(file))[1].api_keys == ("first", "second")
    assert served("--api-key", "own", "--api-key-file", str(file))[1].api_keys == ("own", "first", "second")
    monkeypatch.setenv("MANYLORA_API_KEY", "of the environment")
    assert served()[1].api_keys == ("of the environment",)
    assert served("--api-key", "own")[1].api_keys == ("own",)
    assert served("--api-key-file", str(file))[1].api_keys == ("first", "second")
    assert built()[1].api_keys == ()
    monkeypatch.setenv("MANYLORA_API_KEY", " ")
    assert main(["serve", "m"]) == 2
    file.write_text("# none\n")
    assert main(["serve", "m", "--api-key-file", str(file)]) == 2
    file.write_bytes(b"\xff")
    assert main(["serve", "m", "--api-key-file", str(file)]) == 2
    assert [line.split()[2] for line in capsys.readouterr().err.splitlines()] == [
        "MANYLORA_API_KEY", "--api-key-file", "cannot",
    ]  # fmt: skip


GONE = [
    *((name, "1", instead) for name, instead in REMOVED.items()),
    *((name, value, instead) for (name, value), instead in REMOVED_VALUES.items()),
]


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize(("name", "value", "instead"), GONE)
def test_what_was_removed_ends_in_one_line(
    name: str,
    value: str,
    instead: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = option_of(name) if name in REMOVED else f"{option_of(name)} {value}"
    expected = f"{given} was removed: {instead}"
    assert main(["serve", "m", option_of(name), value]) == 2
    assert capsys.readouterr().err == f"manylora: error: {expected}\n"
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: m\n{name}: '{value}'")
    assert main(["serve", "--config", str(file)]) == 2
    assert capsys.readouterr().err == f"manylora: error: {expected}\n"
    with pytest.raises(ConfigError) as refused:
        LLM("m", **{name: value})  # type: ignore[arg-type]
    assert str(refused.value) == expected
    if name in REMOVED:
        monkeypatch.setenv(f"MANYLORA_{name.upper()}", value)
        assert main(["serve", "m"]) == 2
        assert capsys.readouterr().err.startswith(f"manylora: error: MANYLORA_{name.upper()} was removed: ")


@pytest.mark.parametrize(("parameter", "instead"), REMOVED_PARAMETERS.items())
def test_a_removed_parameter_of_a_router_ends_in_one_line(
    parameter: str, instead: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = f"manylora: error: --router-set {parameter} was removed: {instead}\n"
    given = ("--replicas", "2", "--router", parameter.partition(".")[0], "--router-set", f"{parameter}=1")
    assert main(["serve", "m", *given]) == 2
    assert capsys.readouterr().err == expected
    file = tmp_path / "serve.yaml"
    for text in (f"'{parameter}=1'", f"['{parameter}=1']", f"{{{parameter}: 1}}"):
        file.write_text(f"model: m\nreplicas: 2\nrouter-set: {text}")
        assert main(["serve", "--config", str(file)]) == 2
        assert capsys.readouterr().err == expected
