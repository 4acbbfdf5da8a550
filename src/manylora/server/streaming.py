"""Writes server-sent events: chunks of an answer.

A chunk differs from the next in a few fields only. So the rest is encoded once per request, and chunks are
put together from bytes.
"""

from __future__ import annotations

import dataclasses

import msgspec

from manylora.text.generate import TextDelta

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Asks proxies of nginx's kind not to collect chunks.
    (b"x-accel-buffering", b"no"),
]

encode = msgspec.json.encode


@dataclasses.dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request."""

    num_prompt: int
    num_completion: int = 0
    num_cached: int = 0

    def count(self, delta: TextDelta) -> None:
        """Add a delta's tokens."""
        self.num_completion += len(delta.token_ids)
        self.num_cached += delta.timing.num_cached_tokens

    def encode(self) -> bytes:
        """Write the usage in OpenAI's shape."""
        return (
            b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,'
            b'"prompt_tokens_details":{"cached_tokens":%d}}'
            % (self.num_prompt, self.num_prompt + self.num_completion, self.num_completion, self.num_cached)
        )


class ChunkWriter:
    """A writer of the chunks of one answer. ``content`` is the JSON of a choice without its first and last
    fields."""

    def __init__(self, identity: dict[str, object]) -> None:
        self._start = b"data: " + encode(identity)[:-1] + b',"choices":['

    def chunk(
        self,
        index: int,
        content: bytes,
        delta: TextDelta,
        logprobs: dict[str, object] | None,
        usage: Usage | None,
    ) -> bytes:
        """Write a delta of one choice."""
        reason = delta.finish_reason
        return b'%b{"index":%d,%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b}]%b}\n\n' % (
            self._start,
            index,
            content,
            b"null" if logprobs is None else encode(logprobs),
            b"null" if reason is None else encode(reason),
            b"null" if delta.stop_reason is None else encode(delta.stop_reason),
            b"" if usage is None else b',"usage":' + usage.encode(),
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        """Write the last chunk, without choices, that ``stream_options.include_usage`` asks for."""
        return b'%b],"usage":%b}\n\n' % (self._start, usage.encode())
