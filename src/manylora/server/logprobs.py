"""Writes log-probabilities in OpenAI's two shapes, and a prompt's in vLLM's; keeps them packed until then."""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from manylora.engine.client import GenerationRequest
from manylora.server.streaming import encode
from manylora.text.generate import TextOutput
from manylora.text.tokenizer import Tokenizer
from manylora.types import InvalidRequest, PromptLogprobs, TokenLogprobs

# JSON has no minus infinity; vLLM sends this number instead.
_LOWEST = -9999.0


class TokenNames:
    """The names of tokens: their text, or ``token_id:17`` where that is asked for or there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool = False) -> None:
        self._tokenizer = None if as_ids else tokenizer

    def bytes(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        return self._tokenizer.token_bytes(token) if self._tokenizer else f"token_id:{token}".encode()

    def text(self, token: int) -> str:
        """Return the token alone, as text."""
        return self.bytes(token).decode("utf-8", "replace")


class CompletionLogprobs:
    """The shape of /v1/completions: parallel lists, with offsets into the text. One writer serves one sample."""

    def __init__(
        self, names: TokenNames, num_top: int, text: str = "", echo: Mapping[str, list[Any]] | None = None
    ) -> None:
        """Start behind ``text``, the text before the first token. ``echo``: the lists of that text
        (``echoed``)."""
        self._names = names
        self._num_top = num_top
        self._offset = len(text)
        self._echo = echo

    def encode(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Write the next tokens; their offsets continue from the call before. The first call also writes the
        echo, before them."""
        tokens = [self._names.text(entry.token) for entry in logprobs]
        *offsets, self._offset = itertools.accumulate(map(len, tokens), initial=self._offset)
        found: dict[str, list[Any]] = {
            "text_offset": offsets,
            "token_logprobs": [max(entry.logprob, _LOWEST) for entry in logprobs],
            "tokens": tokens,
            "top_logprobs": [_top(self._names, self._num_top, entry) for entry in logprobs],
        }
        if self._echo is not None:
            found, self._echo = {name: [*part, *found[name]] for name, part in self._echo.items()}, None
        return found


def _top(names: TokenNames, num_top: int, entry: TokenLogprobs) -> dict[str, float]:
    """Return the log-probabilities of the chosen token and of the alternatives: up to one more than asked
    for, as OpenAI does."""
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
    """Write the lists of a prompt that is echoed as ``text``, in the shape of ``CompletionLogprobs``. Its
    first token has no log-probability."""
    rest = prompt[1:]
    return {
        "text_offset": _offsets(tokenizer, prompt, text),
        "token_logprobs": [None, *(max(entry.logprob, _LOWEST) for entry, _ in scored.entries(rest))],
        "tokens": [names.text(token) for token in prompt],
        # Encoded at once: all samples share the JSON, and it takes a tenth of the memory.
        "top_logprobs": [None, *(_raw(_top(names, num_top, entry)) for entry, _ in scored.entries(rest))],
    }


def _offsets(tokenizer: Tokenizer, prompt: Sequence[int], text: str) -> list[int]:
    """Find the place at which each token begins in the text, which may leave special tokens out."""
    detokenizer, offset, offsets = tokenizer.detokenizer(skip_special_tokens=False), 0, []
    for token in prompt:
        offsets.append(offset)
        if token in tokenizer.special_ids and not text.startswith(tokenizer.decode([token], False), offset):
            continue
        added, piece = detokenizer.add(token), tokenizer.token_text(token)
        # The text keeps a space at its beginning, which detokenizing its tokens would drop.
        offset += len(piece if not offset and text.startswith(piece) else added)
    return offsets


def prompt_entries(
    tokenizer: Tokenizer | None, num_top: int, prompt: Sequence[int], scored: PromptLogprobs
) -> list[Any]:
    """Write vLLM's ``prompt_logprobs``: null, then for each token an object by token id, with the token
    itself first."""
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
    """The shape of /v1/chat/completions: an object for each token."""

    def __init__(self, names: TokenNames, num_top: int) -> None:
        self._names = names
        self._num_top = num_top

    def encode(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Write the next tokens."""
        content = [
            self._entry(entry.token, entry.logprob)
            | {"top_logprobs": [self._entry(*pair) for pair in entry.top[: self._num_top]]}
            for entry in logprobs
        ]
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._names.bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, _LOWEST), "bytes": list(raw)}


def choice_parts(
    index: int,
    content: bytes,
    writer: CompletionLogprobs | ChatLogprobs | None,
    logprobs: Iterable[TokenLogprobs],
    output: TextOutput,
) -> Iterator[bytes]:
    """Write a choice of a whole answer, in pieces. ``content``: as for a chunk."""
    yield b'{"index":%d,%b,"logprobs":' % (index, content)
    yield from (b"null",) if writer is None else _written(writer, logprobs)
    ends = encode(output.finish_reason), encode(output.stop_reason)
    yield b',"finish_reason":%b,"stop_reason":%b}' % ends


def _written(writer: CompletionLogprobs | ChatLogprobs, logprobs: Iterable[TokenLogprobs]) -> Iterator[bytes]:
    """Write all positions as JSON. The list of alternatives is sent first, while it grows; the short lists
    follow."""
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
"""The most log-probabilities of one answer that is not streamed. They take 256 MiB until the answer is
written."""

JSON_SIZE = 8
"""The factor by which a prompt's log-probabilities are larger than packed ones. They are kept as JSON, which
all samples share."""


class PackedLogprobs:
    """The log-probabilities of one choice, in 8 bytes each. As objects each would take 130 bytes, and the
    garbage collector would scan them repeatedly."""

    def __init__(self) -> None:
        self._tokens = array.array("i")
        self._values = array.array("f")  # the precision in which the sampler computes them
        self._sizes = bytearray()  # entries of each position: the chosen token and the alternatives

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
    """Raise InvalidRequest where an answer may have more log-probabilities than are kept for one. Those of
    its prompts count, and those of its tokens where it is not streamed."""
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
