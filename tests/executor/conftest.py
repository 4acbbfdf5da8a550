"""One tiny model and a few adapters of mixed ranks, written once for all tests of this folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.executor.drive import Rig
from tests.executor.tiny import Reference, write_adapter, write_model


@dataclasses.dataclass(frozen=True)
class Files:
    """``adapters``: by the id under which the rig serves them."""

    model: Path
    adapters: dict[int, Path]
    reference: Reference

    def path(self, adapter: int) -> Path | None:
        """None for the base model."""
        return self.adapters.get(adapter)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("executor")
    model = write_model(folder / "model")
    adapters = {
        1: write_adapter(folder / "all-r4", model, rank=4, seed=1),
        2: write_adapter(folder / "some-r9", model, rank=9, seed=2, modules=("q_proj", "down_proj")),
        3: write_adapter(
            folder / "pattern", model, rank=6, seed=3, rank_pattern={"q_proj": 2}, layers_to_transform=[0, 2]
        ),
    }
    return Files(model, adapters, Reference(model))


@pytest.fixture
def rig(files: Files, tmp_path: Path) -> Iterator[Rig]:
    """A worker with all adapters resident."""
    made = Rig(files.model, tmp_path, num_pages=200, page_bytes=3072)
    for adapter, path in files.adapters.items():
        made.serve(adapter, path)
    yield made
    made.worker.close()
