"""A running OpenAI-compatible server as a benchmark's target: streamed ``/v1/completions``, or chats.

A chat's history needs the token ids that the server generated. vLLM sends them for ``return_token_ids``; with
``logprobs`` and ``return_tokens_as_token_ids``, which manylora knows as well, tokens are written as
``token_id:17``. Which of the two works is tried out once. Without histories no ids are asked for, and with text
for prompts, or messages of a chat, the history is text.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import time
from typing import Any, NamedTuple

import msgspec

from manylora.config.declaring import ConfigError
from manylora_lab.bench.http_client import HttpClient, HttpFailure
from manylora_lab.bench.targets import Prompt, PromptKind, TargetRequest, TargetResult


class _Way(NamedTuple):
    """How prompts of one kind are sent: where to, one to try it out with, and what to try if that fails."""

    path: str
    probe: Prompt
    hint: str


_WORDS = "time year people "
_WAYS: dict[PromptKind, _Way] = {
    "tokens": _Way("/v1/completions", (3, 4, 5, 6), "; if it takes no token ids, use --prompts text"),
    "text": _Way("/v1/completions", _WORDS, "; if it only chats, use --prompts chat"),
    "chat": _Way("/v1/chat/completions", (_WORDS,), ""),
}
_ROLES = ("user", "assistant")
_EXACT: dict[str, Any] = {"ignore_eos": True}
_ID_FIELDS: tuple[dict[str, Any], ...] = (
    {"return_token_ids": True},
    {"logprobs": 0, "return_tokens_as_token_ids": True},
)
_PREFIX = "token_id:"
_PROBE_TOKENS = 2
_PROBE_TIMEOUT_S = 10.0
"""A server that takes longer to say anything is busy, not gone."""
_CONNECT_TIMEOUT_S = 60.0


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    """What servers that take thoughts apart call them; not part of what was said."""


class _Choice(msgspec.Struct):
    text: str = ""
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """All that another process needs to use the same server. ``fields``: what each request asks for besides."""

    url: str
    api_key: str | None
    base: str
    fields: dict[str, Any]
    kind: PromptKind = "tokens"


class HttpTarget:
    """Made by ``connect``, or from another's ``access`` to send requests only."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.description: dict[str, Any] = {"kind": "server", "url": access.url}
        self.vocab_size: int | None = None
        self.max_model_len: int | None = None
        self.adapters: frozenset[str] = frozenset()
        self._client = HttpClient(access.url, access.api_key)

    @property
    def is_exact(self) -> bool:
        """See Target."""
        return "ignore_eos" in self.access.fields

    @classmethod
    async def connect(
        cls, url: str, api_key: str | None = None, needs_ids: bool = True, kind: PromptKind = "tokens"
    ) -> HttpTarget:
        """Ask the server what it serves, and what it understands; raises ConfigError.

        ``needs_ids``: of the tokens it generates, where prompts are of ids. ``kind``: of the prompts.
        """
        target = cls(Access(url, api_key, "", {}, kind))
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                page = await target._client.fetch("/v1/models")
            models = msgspec.json.decode(page)["data"]
            names = [str(model["id"]) for model in models]
            base = next((n for n, model in zip(names, models) if not model.get("parent")), names[0])
            lengths = [model["max_model_len"] for model in models if model.get("max_model_len")]
        except TimeoutError as error:
            raise ConfigError(f"no server answers at {url} within {_CONNECT_TIMEOUT_S:.0f} s") from error
        except HttpFailure as error:
            hint = " (--api-key says the server's key)" if str(error).startswith("HTTP 401") else ""
            raise ConfigError(f"no list of models from {url}: {error}{hint}") from error
        except OSError as error:
            raise ConfigError(f"no server answers at {url}: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{url}/v1/models does not answer as OpenAI's does") from error
        target.adapters = frozenset(names)
        target.max_model_len = min(lengths, default=None)
        await target._find_fields(base, needs_ids and kind == "tokens")
        asked = sorted(target.access.fields)
        target.description |= {"model": base, "asked_for": asked, "prompts": kind}
        return target

    async def _find_fields(self, base: str, needs_ids: bool) -> None:
        """The first set of fields with which a request is answered as it must be."""
        if needs_ids:
            dialects = [{**_EXACT, **fields} for fields in _ID_FIELDS]
        else:
            dialects = [_EXACT] if self.access.kind == "tokens" else [_EXACT, {}]
        prompt = _WAYS[self.access.kind].probe
        reasons = []
        for fields in dialects:
            self.access = dataclasses.replace(self.access, base=base, fields=fields)
            answer = await self.generate(TargetRequest(prompt, _PROBE_TOKENS, None))
            found = len(answer.tokens) if needs_ids else answer.num_tokens
            if answer.error is None and (found == _PROBE_TOKENS or (found and not self.is_exact)):
                return
            reasons.append(answer.error or ("no ids came" if needs_ids else f"{found} tokens came, not 2"))
        if needs_ids:
            names = " and ".join(sorted(name for fields in _ID_FIELDS for name in fields))
            raise ConfigError(
                "the server does not tell the ids of its tokens, without which no chat can be replayed but with "
                f"--prompts text ({names}: {'; '.join(reasons)})"
            )
        way = _WAYS[self.access.kind]
        raise ConfigError(
            f"the server does not answer {way.path} of 2 tokens: {'; '.join(reasons)}{way.hint}"
        )

    async def generate(self, call: TargetRequest) -> TargetResult:
        """See Target."""
        answer = TargetResult()
        body = {
            "model": self.access.base if call.adapter is None else call.adapter,
            "max_tokens": call.max_tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}, **self.access.fields,
        }  # fmt: skip
        if self.access.kind == "chat":
            said = zip(itertools.cycle(_ROLES), call.prompt)
            body["messages"] = [{"role": role, "content": text} for role, text in said]
        else:
            body["prompt"] = call.prompt

        def on_line(line: bytes) -> None:
            if line.startswith((b"data: {", b"data:{")):
                _take(answer, _decode(line[5:]))

        try:
            await self._client.send("POST", _WAYS[self.access.kind].path, msgspec.json.encode(body), on_line)
        except (OSError, HttpFailure) as error:
            answer.error = answer.error or str(error) or type(error).__name__
        except (ValueError, msgspec.MsgspecError) as error:
            answer.error = f"the server's answer cannot be read: {error}"
        if answer.first_s is None and answer.reply_length:
            answer.delivered(time.monotonic())  # tokens without a letter, such as a part of one
        return answer

    async def counters(self) -> dict[str, float]:
        """The samples of /metrics, without histograms' buckets; empty where there is no such page."""
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                page = await self._client.fetch("/metrics")
        except (OSError, ValueError, HttpFailure):
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
        return {name: value for name, value in found.items() if math.isfinite(value)}

    async def lost(self) -> str | None:
        """See Target."""
        for path in ("/health", "/v1/models"):
            try:
                async with asyncio.timeout(_PROBE_TIMEOUT_S):
                    await self._client.fetch(path)
            except TimeoutError:
                return None
            except (OSError, HttpFailure) as error:
                if path == "/health" and str(error).startswith("HTTP 4"):
                    continue  # It has no such page.
                return f"the server at {self.access.url} is gone: {error}"
            return None
        return None

    async def close(self) -> None:
        """Close the connections that are kept."""
        await self._client.close()


def _take(answer: TargetResult, chunk: _Chunk) -> None:
    if chunk.error is not None:
        answer.error = str(chunk.error.get("message") if isinstance(chunk.error, dict) else chunk.error)
    for choice in chunk.choices:
        if choice.delta is not None:
            _take_delta(answer, choice.delta)
            continue
        ids = choice.token_ids
        if ids is None and choice.logprobs is not None:
            ids = [int(token.removeprefix(_PREFIX)) for token in choice.logprobs.tokens]
        # A token may have no text: of a letter's first byte, say. The end alone is none.
        if ids or choice.text or (ids is None and choice.finish_reason is None):
            answer.delivered(time.monotonic())
            answer.tokens.extend(ids or ())
            answer.text += choice.text
    if chunk.usage is not None:
        answer.prompt_length = chunk.usage.get("prompt_tokens")
        answer.reply_length = chunk.usage.get("completion_tokens")
        details = chunk.usage.get("prompt_tokens_details") or {}
        if details.get("cached_tokens") is not None:
            answer.cached_tokens = details["cached_tokens"]


def _take_delta(answer: TargetResult, delta: _Delta) -> None:
    """A chunk with the role alone, or with the end alone, is no token."""
    if delta.content or delta.reasoning_content:
        answer.delivered(time.monotonic())
        answer.text += delta.content or ""
