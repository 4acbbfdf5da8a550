"""Checkpoints and their references, made once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.parity.checkpoints import write_checkpoint
from tests.parity.engines import Bench
from tests.parity.reference import Reference


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices: waiting for other threads costs more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_bench(factory: pytest.TempPathFactory, family: str) -> Bench:
    checkpoint = write_checkpoint(factory.mktemp(family), family)
    return Bench(checkpoint, Reference(checkpoint.folder, checkpoint.adapters))


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The Llama that the tests of schedules share, with one adapter of every kind."""
    return make_bench(tmp_path_factory, "llama-main")
