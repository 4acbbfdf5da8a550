"""Without a GPU, Triton kernels run in Triton's interpreter: chosen before anything imports triton. Properties
have no deadlines: a busy machine is no counterexample. Tests, and the processes that they start, have one thread
for torch's products unless they ask for more: matrices are tiny, and a core belongs to another worker."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

    from tests.interpreter import remember_builtins

    remember_builtins()

settings.register_profile("manylora", deadline=None)
settings.load_profile("manylora")


def pytest_collection_finish() -> None:
    """Modules and tests live until the end: the collector need not look through them, which takes it a third of a
    second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _frozen_again() -> Iterator[None]:
    """What measures in this process freezes what is there, and lets all of it go afterwards."""
    yield
    if not gc.get_freeze_count():
        pytest_collection_finish()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Adapter headers are remembered here, by subprocesses too, and not in the user's cache; matplotlib keeps its
    list of fonts where it is, which takes seconds to make. What a process has compiled of our modules the next one
    finds, whatever the environment says of that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        patch.setenv("MPLCONFIGDIR", os.environ.get("MPLCONFIGDIR", str(users / "matplotlib")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _kept_loops() -> None:
    """Loops are compiled before the first test: else the first engines wait for them."""
    from manylora.adapters import loops
    from manylora.kernels.cpu import CpuOps

    CpuOps()
    loops.prepare()


@pytest.fixture(scope="module")
def remembered_fits() -> Iterator[None]:
    """Planes are fitted once to the same steps: a fit takes a second, and is not what these tests ask about."""
    from manylora_lab.pricing import fit

    from tests.remembered import fit_planes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "fit_planes", fit_planes)
        yield
