"""What a CPU says it has free, cgroup limits included, and what a GPU is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from manylora.config.declaring import ConfigError
from manylora.devices import free_memory
from manylora.devices.device import open_device


def test_auto_takes_a_gpu_where_there_is_one() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert open_device("auto").torch_device.type == expected
    with pytest.raises(ConfigError, match="tpu"):
        open_device("tpu")


def test_free_memory_is_plausible() -> None:
    assert 2**20 < open_device("cpu").free_bytes() < 2**50


def write_group(folder: Path, limit: str, used: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def test_the_tightest_group_above_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_group(tmp_path / "a" / "b", "max", 10, 0)
    write_group(tmp_path / "a", "1000000", 400000, 150000)
    monkeypatch.setattr(free_memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(free_memory, "_own_cgroups", lambda: ["0::/a/b", "7:cpu:/x", "oops"])
    assert free_memory._cgroup_free_bytes() == [750000]
    assert open_device("cpu").free_bytes() == 750000


def test_the_older_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("900000")
    (folder / "memory.usage_in_bytes").write_text("300000")
    (folder / "memory.stat").write_text("total_inactive_file 100\n")
    monkeypatch.setattr(free_memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(free_memory, "_own_cgroups", lambda: ["5:memory:/only/the/host/sees/this"])
    assert free_memory._cgroup_free_bytes() == [600100]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_in_one_line() -> None:
    with pytest.raises(ConfigError, match="cuda was asked for") as raised:
        open_device("cuda")
    assert "\n" not in str(raised.value)
