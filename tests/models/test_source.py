"""Naming a model: a folder, a hub id (the hub itself is stood in for), or neither."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from manylora.models.source import resolve_model
from manylora.models.spec import ModelError


def with_hub(monkeypatch: pytest.MonkeyPatch, download: Any) -> None:
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_local_directory(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_hub_id_downloads_no_pickle_and_no_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def download(model: str, **options: Any) -> str:
        asked.update(options, model=model)
        return str(tmp_path)

    with_hub(monkeypatch, download)
    assert resolve_model("some-org/some.model-7B") == tmp_path
    assert asked["model"] == "some-org/some.model-7B"
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in asked["allow_patterns"])


def test_hub_package_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install 'manylora\[hub\]'"):
        resolve_model("some-org/some-model")


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(model: str, **options: Any) -> str:
        raise FileNotFoundError("Cannot find the snapshot folder.\nMore words.")

    with_hub(monkeypatch, download)
    with pytest.raises(ModelError, match=r"Cannot find the snapshot folder\.\).*give its folder") as caught:
        resolve_model("some-org/some-model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", ""])
def test_no_such_directory(name: str) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        resolve_model(name)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(path))
