"""Log-probabilities in OpenAI's two shapes, a prompt's in vLLM's; and how they are kept until shown."""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from manylora.engine.client import GenerationRequest
from manylora.server.streaming import encode
from manylora.text.tokenizer import Tokenizer
from manylora.types import InvalidRequest, PromptLogprobs, TokenLogprobs

# JSON has no minus infinity; this is what vLLM sends in its place.
_LOWEST = -9999.0


class TokenNames:
    """The names of tokens: their text, or ``token_id:17`` when asked or without a tokenizer."""

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

    def __init__(
        self, names: TokenNames, num_top: int, text: str = "", echo: Mapping[str, list[Any]] | None = None
    ) -> None:
        """``text``: what comes before the first token; ``echo``: what was written of it (``echoed``)."""
        self._names = names
        self._num_top = num_top
        self._offset = len(text)
        self._echo = echo

    def encode(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next tokens, whose offsets continue those of the call before; behind the echo, the first time."""
        found = self._encode(logprobs)
        if self._echo is not None:
            found, self._echo = {name: [*part, *found[name]] for name, part in self._echo.items()}, None
        return found

    def _encode(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        tokens = [self._names.text(entry.token) for entry in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [max(entry.logprob, _LOWEST) for entry in logprobs],
            "tokens": tokens,
            "top_logprobs": [_top(self._names, self._num_top, entry) for entry in logprobs],
        }


def _top(names: TokenNames, num_top: int, entry: TokenLogprobs) -> dict[str, float]:
    """The chosen token and the alternatives: up to one more than asked for, as OpenAI does."""
    top = {names.text(entry.token): max(entry.logprob, _LOWEST)}
    for token, logprob in entry.top[:num_top]:
        # Different tokens may read the same; the more probable one comes first and stays.
        top.setdefault(names.text(token), max(logprob, _LOWEST))
    return top


def echoed(
    names: TokenNames,
    num_top: int,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    scored: PromptLogprobs,
    text: str,
) -> dict[str, list[Any]]:
    """Write a prompt, echoed as ``text``, as ``CompletionLogprobs`` does. Its first token follows nothing."""
    rest = prompt[1:]
    return {
        "text_offset": _offsets(tokenizer, prompt, text),
        "token_logprobs": [None, *(max(entry.logprob, _LOWEST) for entry, _ in scored.entries(rest))],
        "tokens": [names.text(token) for token in prompt],
        # As JSON at once: all samples share it, and it takes a tenth of the memory.
        "top_logprobs": [None, *(_raw(_top(names, num_top, entry)) for entry, _ in scored.entries(rest))],
    }


def _offsets(tokenizer: Tokenizer, prompt: Sequence[int], text: str) -> list[int]:
    """Where each token begins in the text, which may leave special tokens out."""
    detokenizer, offset, offsets = tokenizer.detokenizer(skip_special_tokens=False), 0, []
    for token in prompt:
        offsets.append(offset)
        if tokenizer.is_special(token) and not text.startswith(tokenizer.decode([token], False), offset):
            continue
        added, piece = detokenizer.add(token), tokenizer.token_text(token)
        # A space that the text begins with is in it, although its tokens' text would begin without.
        offset += len(piece if not offset and text.startswith(piece) else added)
    return offsets


def prompt_entries(
    tokenizer: Tokenizer | None, num_top: int, prompt: Sequence[int], scored: PromptLogprobs
) -> list[Any]:
    """vLLM's ``prompt_logprobs``: null, then of each token an object by ids, its own first."""
    names = TokenNames(tokenizer)

    def described(token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = None if tokenizer is None else names.text(token)
        return {"logprob": max(logprob, _LOWEST), "rank": rank, "decoded_token": text}

    entries: list[Any] = [None]
    for entry, rank in scored.entries(prompt[1:]):
        known = {str(entry.token): described(entry.token, entry.logprob, rank)}
        for place, (token, logprob) in enumerate(entry.top[:num_top], 1):
            known[str(token)] = described(token, logprob, place)
        entries.append(_raw(known))
    return entries


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


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
    """Write all positions by ``writer`` as JSON. The last list, which holds the alternatives, comes first: it goes
    out as it grows, and the short ones follow."""
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


MAX_PACKED = 2**25
"""Log-probabilities of one answer that is not streamed: 256 MiB of them are kept until it is written."""

JSON_SIZE = 8
"""Those of a prompt are kept as JSON, which all its samples share, and that is so much larger."""


class PackedLogprobs:
    """The log-probabilities of one choice, 8 bytes for each: as objects each takes 130, which the collector of
    garbage looks through again and again."""

    def __init__(self) -> None:
        self._tokens = array.array("i")
        self._values = array.array("f")  # the precision in which the sampler computes them
        self._sizes = bytearray()  # of each position: one for the chosen token, and the alternatives

    def add(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Append the next positions."""
        for entry in logprobs:
            tokens, values = zip((entry.token, entry.logprob), *entry.top, strict=True)
            self._tokens.extend(tokens)
            self._values.extend(values)
            self._sizes.append(len(tokens))

    def __iter__(self) -> Iterator[TokenLogprobs]:
        pairs = zip(self._tokens, self._values, strict=True)
        for size in self._sizes:
            chosen, *top = itertools.islice(pairs, size)
            yield TokenLogprobs(*chosen, tuple(top))


def check_packed(requests: Sequence[GenerationRequest], max_model_len: int, is_streamed: bool) -> None:
    """Raise InvalidRequest where an answer may hold more log-probabilities than are kept for one: those of its
    prompts, and, where it is not streamed, of its tokens."""
    num_most = 0
    for request in requests:
        prompt, each = request.prompt, request.params
        if each.prompt_logprobs is not None:
            num_most += JSON_SIZE * (1 + each.prompt_logprobs) * len(prompt)
        if each.logprobs is not None and not is_streamed:
            most = max_model_len - len(prompt) if each.max_tokens is None else each.max_tokens
            num_most += (1 + each.logprobs) * each.n * most
    if num_most > MAX_PACKED:
        raise InvalidRequest(
            f"the answer may hold {num_most} log-probabilities, more than {MAX_PACKED}: set stream, or a smaller "
            f"max_tokens or n, or send fewer prompts (one of a prompt counts {JSON_SIZE} times)",
            "logprobs",
        )
