"""Messages as frames that can follow one another on a stream: a length in four bytes, then msgpack."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")
encoder = msgspec.msgpack.Encoder()


def frame(message: Any) -> bytes:
    """The message, a msgspec type, with its length before it."""
    try:
        body = encoder.encode(message)
    except UnicodeEncodeError:
        # A broken file's own words, or a path that is not UTF-8: half a character must not end the conversation.
        body = encoder.encode(_without_surrogates(msgspec.to_builtins(message)))
    return LENGTH.pack(len(body)) + body


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {key: _without_surrogates(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(inner) for inner in value]
    return value
