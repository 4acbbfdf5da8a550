"""A cable between a listener and those that dial it, which can be cut without a word to either."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class Cable:
    """``is_cut``: nothing passes, and nobody is told. ``start`` says what to dial."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self.is_cut = False

    async def start(self) -> tuple[str, int]:
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        address: tuple[str, int] = server.sockets[0].getsockname()
        return address

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection(*self._to)
            await asyncio.gather(self._copy(reader, back), self._copy(there, writer))

    async def _copy(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        is_lost = False
        try:
            while data := await source.read(4096):
                is_lost = is_lost or self.is_cut
                if not is_lost:
                    to.write(data)
        finally:
            if not (is_lost or self.is_cut):
                to.close()


@contextlib.contextmanager
def cable_to(port: int) -> Iterator[tuple[Cable, int]]:
    """One to this port, with a thread of its own; and the port to dial."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        cable = Cable(("127.0.0.1", port))
        _, mine = asyncio.run_coroutine_threadsafe(cable.start(), loop).result()
        yield cable, mine
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
