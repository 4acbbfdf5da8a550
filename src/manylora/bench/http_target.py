"""A running OpenAI-compatible server as a benchmark's target: streamed ``/v1/completions``, token ids only.

Owns just enough of HTTP/1.1 for that, on asyncio's streams: a general client would cost more for each token
than the server spends on it, and none has to be installed.

A chat's history needs the token ids that the server generated. vLLM sends them for ``return_token_ids``; with
``logprobs`` and ``return_tokens_as_token_ids``, which manylora knows as well, tokens are written as
``token_id:17``. Which of the two works is tried out once.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from manylora.bench.targets import Answer, Call
from manylora.config import ConfigError

_ID_FIELDS: tuple[dict[str, Any], ...] = (
    {"return_token_ids": True},
    {"logprobs": 0, "return_tokens_as_token_ids": True},
)
_PREFIX = "token_id:"
_BUFFER_BYTES = 2**22
"""A chunk that repeats a long prompt's ids must fit into one line."""


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Refused(Exception):
    """The server answered with an error, or not in HTTP; the message is one line."""


class HttpTarget:
    """Made by ``connect``."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--url {url} is not an address: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must be like http://127.0.0.1:8000, got {url!r}")
        self._is_tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, port or (443 if self._is_tls else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        headers = {"Host": parts.netloc.rpartition("@")[2], "Connection": "close"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._id_fields: dict[str, Any] = {}
        self.description: dict[str, Any] = {"kind": "server", "url": url}
        self.vocab_size: int | None = None
        self.max_model_len: int | None = None
        self.adapters: frozenset[str] = frozenset()
        self._base = ""

    @classmethod
    async def connect(cls, url: str, api_key: str | None = None) -> HttpTarget:
        """Ask the server what it serves, and how it tells token ids; raises ConfigError."""
        target = cls(url, api_key)
        try:
            models = msgspec.json.decode(await target._fetch("GET", "/v1/models"))["data"]
            names = [str(model["id"]) for model in models]
            target._base = next((n for n, model in zip(names, models) if not model.get("parent")), names[0])
            lengths = [model["max_model_len"] for model in models if model.get("max_model_len")]
        except (OSError, _Refused) as error:
            raise ConfigError(f"no server answers at {url}: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{url}/v1/models does not answer as OpenAI's does") from error
        target.adapters = frozenset(names)
        target.max_model_len = min(lengths, default=None)
        await target._find_id_fields()
        target.description |= {"model": target._base, "token_ids_by": sorted(target._id_fields)}
        return target

    async def _find_id_fields(self) -> None:
        reasons = []
        for fields in _ID_FIELDS:
            self._id_fields = fields
            answer = await self.generate(Call((3, 4, 5, 6), 2, None))
            if answer.error is None and len(answer.tokens) == 2:
                return
            reasons.append(answer.error or "no ids came")
        raise ConfigError(
            "the server does not tell the ids of its tokens, without which no chat can be replayed "
            f"({' and '.join(sorted(name for f in _ID_FIELDS for name in f))}: {'; '.join(reasons)})"
        )

    async def generate(self, call: Call) -> Answer:
        """See Target."""
        answer = Answer()
        body = {
            "model": self._base if call.adapter is None else call.adapter,
            "prompt": call.prompt, "max_tokens": call.max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, **self._id_fields,
        }  # fmt: skip
        try:
            async for line in self._lines("POST", "/v1/completions", msgspec.json.encode(body)):
                if line.startswith(b"data: {"):
                    _take(answer, _decode(line[len(b"data: ") :]))
        except (OSError, _Refused) as error:
            answer.error = str(error) or type(error).__name__
        except (ValueError, msgspec.MsgspecError) as error:
            answer.error = f"the server's answer cannot be read: {error}"
        return answer

    async def counters(self) -> dict[str, float]:
        """The samples of /metrics, without histograms' buckets; empty where there is no such page."""
        try:
            page = await self._fetch("GET", "/metrics")
        except (OSError, ValueError, _Refused):
            return {}
        found = {}
        for line in page.decode(errors="replace").splitlines():
            name, _, value = line.rpartition(" ")
            is_number = not any(part in name for part in ("_bucket", "_created", "_info"))
            if name and is_number and not line.startswith("#"):
                try:
                    found[name] = float(value)
                except ValueError:
                    pass
        return found

    async def close(self) -> None:
        """Nothing is held between requests."""

    # ------------------------------------------------------------ HTTP

    async def _fetch(self, method: str, path: str) -> bytes:
        return b"\n".join([line async for line in self._lines(method, path)])

    async def _lines(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[bytes]:
        """The lines of the answer's body as they come; raises OSError and _Refused."""
        context = ssl.create_default_context() if self._is_tls else None
        reader, writer = await asyncio.open_connection(
            self._host, self._port, ssl=context, limit=_BUFFER_BYTES
        )
        try:
            head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n"
            writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            status, headers = await _read_head(reader)
            lines = _split_lines(_read_body(reader, headers))
            if status != 200:
                text = b" ".join([line async for line in lines]).decode(errors="replace")
                raise _Refused(f"HTTP {status}: {' '.join(text.split())[:300]}")
            async for line in lines:
                yield line
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise _Refused("the connection broke off") from error
        finally:
            writer.close()


def _take(answer: Answer, chunk: _Chunk) -> None:
    now = time.monotonic()
    if chunk.error is not None:
        answer.error = str(chunk.error)
    for choice in chunk.choices:
        ids = choice.token_ids
        if ids is None and choice.logprobs is not None:
            ids = [int(token.removeprefix(_PREFIX)) for token in choice.logprobs.tokens]
        if ids:
            if answer.first_s is None:
                answer.first_s = now
            answer.last_s = now
            answer.tokens.extend(ids)
    details = (chunk.usage or {}).get("prompt_tokens_details") or {}
    if details.get("cached_tokens") is not None:
        answer.cached_tokens = details["cached_tokens"]


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    raw = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *rest = raw.split("\r\n")
    words = first.split()
    if len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdigit():
        raise _Refused("it does not speak HTTP")
    pairs = (line.partition(":") for line in rest)
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """A body in blocks, as they come."""
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int((await reader.readuntil(b"\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        return
    left = int(headers.get("content-length", 2**62))
    while left > 0 and (block := await reader.read(min(left, 2**16))):
        left -= len(block)
        yield block
    if left > 0 and "content-length" in headers:
        raise _Refused("the connection broke off")


async def _split_lines(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    if rest:
        yield rest
