"""Which folders are adapters, and which paths and names are allowed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manylora.adapters.sources import discover, permitted, valid_name
from manylora.protocol import AdapterError


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


@pytest.mark.parametrize("name", ["a", "llama:sql", "a.b-c_d", "ü", "x" * 200, "a b"])
def test_names_that_are_valid(name: str) -> None:
    assert valid_name(name)


@pytest.mark.parametrize("name", ["", " ", "a ", "a/b", "a\n", "a\0", "\x7f", "x" * 201, "\u202e", "\ud800"])
def test_names_that_are_not(name: str) -> None:
    assert not valid_name(name)


def test_paths_inside_the_root_are_permitted(tmp_path: Path) -> None:
    root = folder(tmp_path, "root", config=False)
    inside = folder(root, "a")
    (root / "link").symlink_to(inside)
    (tmp_path / "root link").symlink_to(root)
    for path in ("a", "./a", "a/../a", "link", str(inside), str(tmp_path / "root link" / "a")):
        assert permitted(path, root) == inside.resolve()
    assert permitted("a", tmp_path / "root link") == inside.resolve()
    assert permitted(".", root) == root.resolve()


def test_paths_outside_the_root_are_not(tmp_path: Path) -> None:
    root = folder(tmp_path, "root", config=False)
    outside = folder(tmp_path, "outside")
    folder(tmp_path, "root2")
    (root / "escape").symlink_to(outside)
    for path in (
        "..",
        "../outside",
        "escape",
        str(outside),
        "/",
        "../root2",
        "../missing",
        "/etc/../nothing",
    ):
        with pytest.raises(AdapterError) as caught:
            permitted(path, root)
        assert caught.value.status == 403, path


def test_missing_paths_are_404(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    os.symlink("loop", tmp_path / "loop")
    for path in ("nothing", "file", "file/x", "loop", "a\0b", "x" * 5000):
        with pytest.raises(AdapterError) as caught:
            permitted(path, tmp_path)
        assert caught.value.status == 404, path
