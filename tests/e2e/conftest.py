"""One large server, for everything that leaves it as it was, and its adapters."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.process import REPOSITORY, Server


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the shipped adapters, a root that tests may add folders to."""
    root = tmp_path_factory.mktemp("e2e") / "adapters"
    return Path(shutil.copytree(REPOSITORY / "demo" / "adapters", root))


@pytest.fixture(scope="session")
def names(adapters: Path) -> list[str]:
    """The shipped adapters' names."""
    return sorted(folder.name for folder in (REPOSITORY / "demo" / "adapters").iterdir())


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's cache directory in which the registry is damaged."""
    cache = tmp_path_factory.mktemp("cache")
    (cache / "manylora").mkdir()
    (cache / "manylora" / "adapters.sqlite").write_bytes(b"SQLite format 3\x00" + b"damage" * 1000)
    return cache


@pytest.fixture(scope="session")
def server(adapters: Path, names: list[str], cache: Path) -> Iterator[Server]:
    """All shipped adapters with room for all of them at once."""
    args = ("--adapter-dir", str(adapters), "--device-pool", "128MiB", "--max-adapter-rank", "64")
    with Server(*args, env={"XDG_CACHE_HOME": str(cache)}) as started:
        yield started.wait_ready()


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did to the large server, afterwards nothing runs and no page is held."""
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").wait_quiet()


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60.0) as client:
        yield client
