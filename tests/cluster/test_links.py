"""Links: strangers, liars and the slow are shut out, frames are bounded, and what is good goes through."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from manylora._version import VERSION
from manylora.cluster import link, messages
from manylora.cluster.link import (
    Hello,
    Link,
    LinkError,
    LinkRefused,
    Listener,
    bind,
    dial,
    why_strange,
)
from manylora.engine.frames import frame

SECRET = b"s" * 32
_ping = msgspec.msgpack.Decoder(messages.ToRouterFromSupervisor)
_pong = msgspec.msgpack.Decoder(messages.ToSupervisorFromRouter)


def hello(**changes: Any) -> Hello:
    return msgspec.structs.replace(Hello(messages.SUPERVISOR, 0, 1, 1, VERSION, "model"), **changes)


class Echo:
    """A listener that answers each Ping, and notes what it has seen."""

    def __init__(self) -> None:
        self.num_met = 0
        self.links: list[Link] = []
        self.listener = Listener(
            bind(),
            SECRET,
            7,
            lambda role: _ping if role == messages.SUPERVISOR else None,
            lambda said: why_strange(said, "model"),
            self._serve,
        )

    async def _serve(self, met: Link) -> None:
        self.num_met += 1
        self.links.append(met)
        while (message := await met.receive()) is not None:
            met.send(messages.Pong(message.number))

    async def is_well(self) -> bool:
        """Whether a good peer is served."""
        found = await dial(self.listener.address, SECRET, hello(), _pong)
        found.send(messages.Ping(3))
        answer = await asyncio.wait_for(found.receive(), 5.0)
        found.abort()
        return bool(answer == messages.Pong(3))


def running(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60.0))


async def is_closed(address: tuple[str, int], data: bytes) -> bool:
    """Whether a peer that says this is shut out, at once or when its time is over."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(data)
    try:
        while await asyncio.wait_for(reader.read(65536), 5.0):
            pass
        return True
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    finally:
        writer.close()


def test_what_is_said_comes_through() -> None:
    async def work() -> None:
        echo = Echo()
        await echo.listener.start()
        found = await dial(echo.listener.address, SECRET, hello(), _pong)
        assert found.epoch == 7
        for number in range(100):
            found.send(messages.Ping(number))
        for number in range(100):
            assert await found.receive() == messages.Pong(number)
        found.close()
        assert await found.receive() is None

    running(work())


@pytest.mark.parametrize(
    ("secret", "changes", "error", "words"),
    [
        (b"t" * 32, {}, LinkError, "does not know"),
        (SECRET, {"version": "0.0.0"}, LinkRefused, "runs 0.0.0"),
        (SECRET, {"model": "other"}, LinkRefused, "files differ"),
        (SECRET, {"role": "king"}, LinkRefused, "no role"),
    ],
)
def test_a_peer_that_is_not_wanted(secret: bytes, changes: Any, error: type, words: str) -> None:
    async def work() -> None:
        echo = Echo()
        await echo.listener.start()
        with pytest.raises(error, match=words):
            await dial(echo.listener.address, secret, hello(**changes), _pong)
        assert echo.num_met == 0
        assert await echo.is_well()

    running(work())


def test_a_listener_that_lies_is_found_out() -> None:
    """One that does not know the secret gets nothing but a hello."""

    async def work() -> None:
        async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(frame({"nonce": b"n" * 32, "proof": b"p" * 32}))

        server = await asyncio.start_server(lie, "127.0.0.1", 0)
        with pytest.raises(LinkError, match="does not know the cluster's secret"):
            await dial(server.sockets[0].getsockname(), SECRET, hello(), _pong)

    running(work())


def test_random_bytes_huge_lengths_and_half_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "HANDSHAKE_S", 0.3)

    async def work() -> None:
        echo = Echo()
        await echo.listener.start()
        chance = random.Random(1)
        said = [chance.randbytes(chance.randrange(1, 2000)) for _ in range(40)]
        said += [struct.pack("<I", 2**32 - 1), struct.pack("<I", link.HANDSHAKE_BYTES + 1) + b"x" * 100]
        said += [frame(hello())[:-3], frame(hello()), frame([1, 2]), b"", b"GET / HTTP/1.1\r\n\r\n"]
        assert all(await asyncio.gather(*(is_closed(echo.listener.address, data) for data in said)))
        assert echo.num_met == 0
        assert await echo.is_well()

    running(work())


def test_what_one_peer_said_is_of_no_use_to_another() -> None:
    """A recorded handshake answers another nonce."""

    async def work() -> None:
        echo = Echo()
        await echo.listener.start()
        recorded = bytearray()

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection(*echo.listener.address)

            async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter, notes: bool) -> None:
                while data := await source.read(4096):
                    if notes:
                        recorded.extend(data)
                    to.write(data)

            await asyncio.gather(copy(reader, back, True), copy(there, writer, False))

        server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
        found = await dial(server.sockets[0].getsockname(), SECRET, hello(), _pong)
        found.send(messages.Ping(1))
        assert await found.receive() == messages.Pong(1)
        met = echo.num_met
        assert await is_closed(echo.listener.address, bytes(recorded))
        assert echo.num_met == met

    running(work())


def test_a_frame_over_the_bound_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        echo = Echo()
        await echo.listener.start()
        found = await dial(echo.listener.address, SECRET, hello(), _pong)
        found._writer.write(struct.pack("<I", link.MAX_FRAME_BYTES + 1))
        assert await asyncio.wait_for(found.receive(), 5.0) is None
        assert await echo.is_well()

    running(work())


def test_a_peer_that_does_not_read_loses_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_UNSENT_BYTES", 2**20)

    async def work() -> None:
        echo = Echo()
        await echo.listener.start()
        await dial(echo.listener.address, SECRET, hello(), _pong)
        while not echo.links:
            await asyncio.sleep(0.01)
        large = messages.StartReplicas(list(range(20_000)))
        for _ in range(1000):
            echo.links[0].send(large)
        assert not echo.links[0].is_open
        assert await echo.is_well()

    running(work())


def test_many_strangers_do_not_shut_out_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "HANDSHAKE_S", 0.5)

    async def work() -> None:
        echo = Echo()
        await echo.listener.start()
        strangers = [await asyncio.open_connection(*echo.listener.address) for _ in range(100)]
        await asyncio.sleep(0.7)
        assert await echo.is_well()
        for _, writer in strangers:
            writer.close()

    running(work())
