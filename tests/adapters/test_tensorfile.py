"""Reading byte ranges of a file into several places, and telling files apart."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from manylora.adapters import tensorfile
from manylora.adapters.peft import CONFIG_NAME, WEIGHTS_NAME
from manylora.adapters.tensorfile import read_header, read_into, sampled_digest
from manylora.protocol import AdapterError
from tests.adapters.tiny import make


@pytest.mark.parametrize("most_targets", [1, 2, 512])
@pytest.mark.parametrize("most_bytes", [1, 7, 1000])
def test_reads_that_return_less_than_was_asked(
    most_bytes: int, most_targets: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def short(file: int, targets: list[memoryview], begin: int) -> int:
        """As a signal or a network's file system cuts it."""
        part = os.pread(file, min(most_bytes, sum(target.nbytes for target in targets)), begin)
        left = part
        for target in targets:
            count = min(len(left), target.nbytes)
            target.cast("B")[:count] = left[:count]
            left = left[count:]
        return len(part)

    monkeypatch.setattr(tensorfile, "_MOST_TARGETS", most_targets)
    content = np.random.default_rng(0).integers(0, 256, 200, dtype=np.uint8)
    (tmp_path / "file").write_bytes(content.tobytes())
    with open(tmp_path / "file", "rb", buffering=0) as file:
        for preadv in (real, short):
            monkeypatch.setattr(os, "preadv", preadv)
            targets: list[np.ndarray] = [
                np.zeros(10, np.uint16),
                np.zeros((3, 5), np.uint8),
                np.zeros((2, 8), np.uint32),
            ]
            read_into(file, 40, [target.data for target in targets], "t")
            assert b"".join(target.tobytes() for target in targets) == content[40:139].tobytes()
            with pytest.raises(AdapterError, match="ended inside tensor t"):
                read_into(file, 102, [target.data for target in targets], "t")


def test_other_numbers_in_the_middle_of_any_one_tensor_are_another_digest(tmp_path: Path) -> None:
    make(tmp_path)
    path, header = tmp_path / WEIGHTS_NAME, read_header(tmp_path / WEIGHTS_NAME)
    data = path.read_bytes()
    digests = {sampled_digest(tmp_path / CONFIG_NAME, path, header)}
    for each in header.values():
        middle = each.begin + each.size_bytes // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        digests.add(sampled_digest(tmp_path / CONFIG_NAME, path, header))
    assert len(digests) == 1 + len(header) == 43
