"""Checkpoints and their references, made once for all tests of this folder."""

from __future__ import annotations

import pytest

from tests.parity.checkpoints import write_checkpoint
from tests.parity.engines import Bench
from tests.parity.reference import Reference


def make_bench(factory: pytest.TempPathFactory, family: str) -> Bench:
    checkpoint = write_checkpoint(factory.mktemp(family), family)
    return Bench(checkpoint, Reference(checkpoint.folder, checkpoint.adapters))


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The Llama that the tests of schedules share, with one adapter of every kind."""
    return make_bench(tmp_path_factory, "llama-main")
