"""Which folders are adapters, and which names are allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from manylora.adapters.sources import discover
from manylora.protocol import AdapterError
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


@pytest.mark.parametrize("name", ["a", "llama:sql", "a.b-c_d", "ü", "x" * 200, "a b", "team/a"])
def test_names_that_are_valid(name: str) -> None:
    assert adapter_name_fault(name) is None


@pytest.mark.parametrize("name", ["", " ", "a ", "a\n", "a\0", "\x7f", "x" * 201, "\u202e", "\ud800"])
def test_names_that_are_not(name: str) -> None:
    assert adapter_name_fault(name)
