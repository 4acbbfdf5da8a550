"""Which folders are adapters, and which names are allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from manylora.adapters.sources import discover
from manylora.protocol.executor import AdapterError
from manylora.types import adapter_name_fault


def folder(root: Path, name: str, config: bool = True) -> Path:
    path = root / name
    path.mkdir(parents=True)
    if config:
        (path / "adapter_config.json").write_text("{}")
    return path


def test_discover_lists_adapter_folders_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("b", "a:1", "with space", "Z"):
        folder(tmp_path, name)
    folder(tmp_path, "no config", config=False)
    folder(tmp_path, "bad\nname")
    folder(tmp_path / "no config", "too deep")
    (tmp_path / "file").write_text("")
    assert discover(tmp_path) == [(name, tmp_path / name) for name in ("Z", "a:1", "b", "with space")]
    assert "cannot name" in caplog.text
    with pytest.raises(AdapterError) as caught:
        discover(tmp_path / "nothing")
    assert caught.value.status == 404


def test_a_training_run_and_its_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = folder(tmp_path, "RUN")
    checkpoints = [folder(run, f"checkpoint-{number}") for number in (1000, 500)]
    other = folder(run, "german")
    folder(run, "runs", config=False)
    expected = [(f"RUN/{path.name}", path) for path in checkpoints]
    assert discover(run) == [("RUN", run), *expected, ("german", other)]
    monkeypatch.chdir(run)
    assert [name for name, _ in discover(Path("."))] == [name for name, _ in discover(run)]
    (run / "adapter_config.json").unlink()
    assert [name for name, _ in discover(run)] == ["checkpoint-1000", "checkpoint-500", "german"]


def test_a_cache_of_the_hub(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def snapshots(repository: str, *revisions: str, main: str | None = None) -> Path:
        for revision in revisions:
            folder(tmp_path / repository / "snapshots", revision)
        if main is not None:
            folder(tmp_path / repository, "refs", config=False)
            (tmp_path / repository / "refs" / "main").write_text(main)
        return tmp_path / repository / "snapshots"

    one = snapshots("models--org--one", "abc", "def", main="def\n")
    two = snapshots("models--two", "abc")
    for name, main in (("a", None), ("b", "gone"), ("c", "../../models--two/snapshots/abc"), ("d", "")):
        snapshots(f"models--org--{name}", "abc", "def", main=main)
    folder(tmp_path / "models--org--base" / "snapshots", "abc", config=False)
    folder(tmp_path, "models--empty", config=False)
    folder(tmp_path, "datasets--org--x", config=False)
    assert discover(tmp_path) == [("org/one", one / "def"), ("two", two / "abc")]
    assert discover(one.parent) == [("org/one", one / "def")]
    assert caplog.text.count("refs/main names none") == 4


def test_a_folder_without_adapters_says_what_was_looked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder(tmp_path, "runs", config=False)
    assert discover(tmp_path) == []
    for part in (str(tmp_path), "adapter_config.json", "adapter_model.*", "snapshots"):
        assert part in caplog.text


@pytest.mark.parametrize("name", ["a", "llama:sql", "a.b-c_d", "ü", "x" * 200, "a b", "team/a"])
def test_names_that_are_valid(name: str) -> None:
    assert adapter_name_fault(name) is None


@pytest.mark.parametrize("name", ["", " ", "a ", "a\n", "a\0", "\x7f", "x" * 201, "\u202e", "\ud800"])
def test_names_that_are_not(name: str) -> None:
    assert adapter_name_fault(name)
