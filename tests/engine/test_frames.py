"""Frames on asyncio's streams: what a process said before its stream broke."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest

from manylora.engine.wire import Failed, frame, open_stream, read_message


@pytest.mark.parametrize("breaks_by", ["unread questions", "a write after its end"])
def test_last_words_are_read(breaks_by: str) -> None:
    async def listen() -> list[Failed | None]:
        ours, theirs = socket.socketpair()
        reader, writer = await open_stream(ours)
        if breaks_by == "unread questions":
            writer.write(b"anyone there?")
        theirs.sendall(frame(Failed("no such model", is_user_error=True)))
        theirs.close()
        if breaks_by != "unread questions":
            writer.write(b"anyone there?")
        for _ in range(10):  # both the words and the break have been seen
            await asyncio.sleep(0.01)
        decoder = msgspec.msgpack.Decoder(Failed)
        said = [await read_message(reader, decoder) for _ in range(2)]
        writer.close()
        return said

    assert asyncio.run(listen()) == [Failed("no such model", is_user_error=True), None]
