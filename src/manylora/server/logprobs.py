"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from manylora.server.streaming import encode
from manylora.text.tokenizer import Tokenizer
from manylora.types import TokenLogprobs

# JSON has no minus infinity; this is what vLLM sends in its place.
_LOWEST = -9999.0


class TokenNames:
    """How tokens are written: as their text, or as ``token_id:17`` when asked or without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool = False) -> None:
        self._tokenizer = None if as_ids else tokenizer

    def bytes(self, token: int) -> bytes:
        """The bytes of a token: perhaps a part of a character."""
        return self._tokenizer.token_bytes(token) if self._tokenizer else f"token_id:{token}".encode()

    def text(self, token: int) -> str:
        """The token alone, as text."""
        return self.bytes(token).decode("utf-8", "replace")


class CompletionLogprobs:
    """/v1/completions: parallel lists, with offsets into the text. One for each sample."""

    def __init__(self, names: TokenNames, num_top: int) -> None:
        self._names = names
        self._num_top = num_top
        self._offset = 0

    def encode(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next tokens, whose offsets continue those of the call before."""
        tokens = [self._names.text(entry.token) for entry in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [max(entry.logprob, _LOWEST) for entry in logprobs],
            "tokens": tokens,
            "top_logprobs": [self._top(entry) for entry in logprobs],
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The chosen token and the alternatives: up to one more than asked for, as OpenAI does."""
        top = {self._names.text(entry.token): max(entry.logprob, _LOWEST)}
        for token, logprob in entry.top[: self._num_top]:
            # Different tokens may read the same; the more probable one comes first and stays.
            top.setdefault(self._names.text(token), max(logprob, _LOWEST))
        return top


class ChatLogprobs:
    """/v1/chat/completions: an object for each token."""

    def __init__(self, names: TokenNames, num_top: int) -> None:
        self._names = names
        self._num_top = num_top

    def encode(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next tokens."""
        content = [
            self._entry(entry.token, entry.logprob)
            | {"top_logprobs": [self._entry(*pair) for pair in entry.top[: self._num_top]]}
            for entry in logprobs
        ]
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._names.bytes(token)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": max(logprob, _LOWEST),
            "bytes": list(raw),
        }


def logprob_parts(
    writer: CompletionLogprobs | ChatLogprobs | None, logprobs: Iterable[TokenLogprobs]
) -> Iterator[bytes]:
    """What ``writer`` makes of all positions, as JSON. The last list, which holds the alternatives, comes first:
    it goes out as it grows, and the short ones follow."""
    if writer is None:
        yield b"null"
        return
    lists = writer.encode(())
    name, last = lists.popitem()
    yield b'{"%b":[%b' % (name.encode(), encode(last)[1:-1])
    comma = b"," if last else b""
    for entry in logprobs:
        more = writer.encode([entry])
        yield comma + encode(more[name])[1:-1]
        comma = b","
        for key, values in lists.items():
            values.extend(more[key])
    yield b"]"
    for key, values in lists.items():
        yield b',"%b":%b' % (key.encode(), encode(values))
    yield b"}"
