"""Reading byte ranges of a file, and telling files apart."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from manylora.adapters.files import CONFIG_NAME, WEIGHTS_NAME, read_tensors, sampled_digest
from manylora.tensorfile import fill
from tests.adapters.tiny import make


@pytest.mark.parametrize("most_bytes", [1, 7, 1000])
def test_reads_that_return_less_than_was_asked(
    most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(file: int, targets: list[memoryview], begin: int) -> int:
        """As a signal or a network's file system cuts it."""
        part = os.pread(file, min(most_bytes, targets[0].nbytes), begin)
        targets[0][: len(part)] = part
        return len(part)

    monkeypatch.setattr(os, "preadv", short)
    content = np.random.default_rng(0).integers(0, 256, 200, dtype=np.uint8)
    (tmp_path / "file").write_bytes(content.tobytes())
    target = np.zeros((3, 33), np.uint8)
    with open(tmp_path / "file", "rb", buffering=0) as file:
        assert fill(file.fileno(), target.data, 40)
        assert target.tobytes() == content[40:139].tobytes()
        assert not fill(file.fileno(), target.data, 102)


def test_other_numbers_in_the_middle_of_any_one_tensor_are_another_digest(tmp_path: Path) -> None:
    make(tmp_path)
    path, header = tmp_path / WEIGHTS_NAME, read_tensors(tmp_path / WEIGHTS_NAME)
    data = path.read_bytes()
    digests = {sampled_digest(tmp_path / CONFIG_NAME, path, header)}
    for each in header.values():
        middle = each.begin + each.size_bytes // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        digests.add(sampled_digest(tmp_path / CONFIG_NAME, path, header))
    assert len(digests) == 1 + len(header) == 43
