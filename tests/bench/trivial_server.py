"""A server that streams OpenAI completions as fast as it can and computes nothing; a process of its own.

``python -m tests.bench.trivial_server [SECONDS]`` prints its port. SECONDS pass before the first token and between
tokens. Prompts are token ids or words; a reply's ids count up from the prompt's length. A prompt that holds the
id or the word 999999 ends the process at once, in the midst of its reply.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

FATAL = 999_999
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n"
_MODELS = {"data": [{"id": "base"}, *({"id": f"adapter-{i}", "parent": "base"} for i in range(8))]}


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class _Peer(asyncio.Protocol):
    """One connection, requests one after the other."""

    delay_s = 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, end, rest = self.buffer.partition(b"\r\n\r\n")
        length = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0] or 0)
        if not end or len(rest) < length:
            return
        self.buffer = rest[length:]
        if head.startswith(b"POST /v1/completions "):
            self.reply(json.loads(rest[:length]))
        elif head.startswith(b"GET /v1/models "):
            body = json.dumps(_MODELS).encode()
            self.transport.write(_HEAD % b"application/json" + _chunk(body) + _chunk(b""))
        else:
            self.transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    def reply(self, body: dict[str, Any]) -> None:
        prompt = body["prompt"]
        words = prompt.split() if isinstance(prompt, str) else prompt
        is_fatal = FATAL in words or str(FATAL) in words
        tokens = [len(words) + i for i in range(body["max_tokens"])]
        self.transport.write(_HEAD % b"text/event-stream")
        self.step(body, words, tokens, 0, is_fatal)

    def step(
        self, body: dict[str, Any], words: list[Any], tokens: list[int], at: int, is_fatal: bool
    ) -> None:
        if is_fatal and at == 2:
            os._exit(1)
        if self.transport.is_closing():
            return
        if at < len(tokens):
            ids = b',"token_ids":[%d]' % tokens[at] if body.get("return_token_ids") else b""
            event = b'{"choices":[{"index":0,"text":"w%d "%b,"finish_reason":null}]}' % (tokens[at], ids)
            self.transport.write(_chunk(b"data: " + event + b"\n\n"))
            loop = asyncio.get_running_loop()
            loop.call_later(self.delay_s, self.step, body, words, tokens, at + 1, is_fatal)
            return
        usage = b'{"prompt_tokens":%d,"completion_tokens":%d}' % (len(words), len(tokens))
        end = b'data: {"choices":[],"usage":%b}\n\ndata: [DONE]\n\n' % usage
        self.transport.write(_chunk(end) + _chunk(b""))


async def main() -> None:
    if len(sys.argv) > 1:
        _Peer.delay_s = float(sys.argv[1])
    server = await asyncio.get_running_loop().create_server(_Peer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
