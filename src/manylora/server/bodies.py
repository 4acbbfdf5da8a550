"""How large a request's body may be, and how much JSON it may hold: decoding it must not hold up other requests.

Does not know what the fields mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from manylora.types import EngineInfo, InvalidRequest

MAX_CONTAINERS = 2**17
MAX_STRINGS = 2**19
MAX_VALUES = 2**22
"""Lists and objects, strings and elements of a body. The most that a valid request needs: the token ids of many
prompts, a ``logit_bias`` for each token of a vocabulary."""

# Whatever a body of this size holds takes milliseconds.
_SMALL_BYTES = 2**17

_MIN_BYTES = 4 * 2**20
_BYTES_PER_TOKEN = 64  # of a prompt: as text, with escapes, or as an id
_BYTES_PER_BIAS = 24  # an entry of logit_bias

Result = TypeVar("Result")


def max_bytes(info: EngineInfo) -> int:
    """The default limit: a prompt as long as the context, biases for the whole vocabulary, and 4 MiB besides."""
    return _MIN_BYTES + _BYTES_PER_TOKEN * info.max_model_len + _BYTES_PER_BIAS * info.vocab_size


def is_large(raw: bytes) -> bool:
    """Whether handling the body may take longer than an event loop may stand still."""
    return len(raw) > _SMALL_BYTES


async def run_beside(raw: bytes, function: Callable[..., Result], *args: object) -> Result:
    """Call a function: on another thread where the body is large, so that others are answered meanwhile."""
    if is_large(raw):
        return await asyncio.to_thread(function, *args)
    return function(*args)


def check_contents(raw: bytes) -> None:
    """Raise InvalidRequest where a large body holds more than decoding may take the time for.

    Counts what is outside of strings, exactly for valid JSON. Of what is not valid, a decoder reads no more than
    the valid beginning.
    """
    if not is_large(raw):
        return
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # without quotes that end no string
    num_strings = bare.count(b'"') // 2
    if num_strings > MAX_STRINGS:
        raise InvalidRequest(f"the body holds more than {MAX_STRINGS} strings")
    outside = b"".join(bare.split(b'"')[::2])
    if outside.count(b"[") + outside.count(b"{") > MAX_CONTAINERS:
        raise InvalidRequest(f"the body holds more than {MAX_CONTAINERS} lists and objects")
    if outside.count(b",") > MAX_VALUES:
        raise InvalidRequest(f"the body holds more than {MAX_VALUES} values")
