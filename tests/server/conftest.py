"""The app over a fake engine: in process, or on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from starlette.applications import Starlette

from manylora.server.app import create_app
from manylora.server.connection import ServerSettings
from manylora.server.lifecycle import serve
from manylora.text.texts import ModelText, Texts
from manylora.text.tokenizer import Tokenizer
from tests.server.fakes import FakeEngine
from tests.text import made

BASE = "org/base"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.from_folder(made.layout_5(Path(folder)))


def make_app(engine: FakeEngine, text: Texts | Tokenizer | None, **settings: Any) -> Starlette:
    texts = text if isinstance(text, Texts) else Texts(ModelText(text))
    return create_app(engine, texts, ServerSettings(BASE, "/models/base", version="1.2.3", **settings))


@contextlib.asynccontextmanager
async def client_of(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the app; exceptions of the app show as 500, as they would outside."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=JSON) as client:
        yield client


class RunningServer:
    """``serve`` on a thread with an event loop of its own.

    ``send_bytes``: what the system may hold of an answer that is not read; by default megabytes. ``sock``: what it
    listens on, where that is no port of its own.
    """

    def __init__(
        self,
        app: Starlette,
        engine: FakeEngine,
        drain_timeout_s: float = 60.0,
        send_bytes: int | None = None,
        sock: socket.socket | None = None,
    ) -> None:
        self.app, self.engine = app, engine
        self.exit_code: int | None = None
        if sock is None:
            sock = socket.socket()
            if send_bytes is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
            sock.bind(("127.0.0.1", 0))
        self._socket = sock
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._drain_timeout_s = drain_timeout_s
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._main()), daemon=True)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        serving = asyncio.create_task(serve(self.app, self._socket, self.engine, self._drain_timeout_s))
        while True:
            await asyncio.sleep(0.01)
            with contextlib.suppress(OSError), socket.socket(self._socket.family) as probe:
                probe.setblocking(False)
                await self.loop.sock_connect(probe, self._socket.getsockname())
                break
        self._started.set()
        self.exit_code = await serving

    def call(self, function: Any, *args: Any) -> None:
        self.loop.call_soon_threadsafe(function, *args)

    def wait(self) -> int | None:
        self._thread.join(60)
        return self.exit_code

    def __enter__(self) -> RunningServer:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            # Twice: what a test left open need not drain.
            self.call(self.app.state.lifecycle.stop)
            self.call(self.app.state.lifecycle.stop)
            self._thread.join(60)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def running(engine: FakeEngine, tokenizer: Tokenizer, tmp_path: Path) -> Iterator[RunningServer]:
    with RunningServer(make_app(engine, tokenizer, adapter_dir=tmp_path), engine) as server:
        yield server
