"""Log-probabilities between the step that gave them and the answer that shows them."""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterator, Sequence

from manylora.types import InvalidRequest, SamplingParams, TokenLogprobs

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


def check_packed(
    prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], max_model_len: int, is_streamed: bool
) -> None:
    """Raise InvalidRequest where an answer may hold more log-probabilities than are kept for one: those of its
    prompts, and, where it is not streamed, of its tokens."""
    num_most = 0
    for prompt, each in zip(prompts, params, strict=True):
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
