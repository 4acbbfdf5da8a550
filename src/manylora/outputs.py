"""Defines the results of ``LLM`` and ``AsyncLLM``: complete results, and parts of results that grow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from manylora.engine.client import GenerationRequest
from manylora.text.generate import TextOutput
from manylora.text.tokenizer import Tokenizer
from manylora.types import PromptLogprobs, TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability. ``rank`` counts from 1, or is None where the token is not among the top."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None

    @staticmethod
    def all_at(
        position: TokenLogprobs, text: Callable[[int], str | None], rank: int | None = None
    ) -> dict[int, Logprob]:
        """Return the log-probabilities at a position by token id. ``rank``: the rank of the position's own
        token, where it is known beyond the top."""
        top = enumerate(position.top, start=1)
        found = {token: Logprob(logprob, place, text(token)) for place, (token, logprob) in top}
        found.setdefault(position.token, Logprob(position.logprob, rank, text(position.token)))
        return found

    @staticmethod
    def of_prompt(
        prompt: Sequence[int], scored: Iterable[PromptLogprobs | None], text: Callable[[int], str | None]
    ) -> list[dict[int, Logprob] | None] | None:
        """Return the log-probabilities of each token of a prompt, in the form of ``RequestOutput``. Takes the
        first of ``scored`` that is known; returns None where none is."""
        known = next((each for each in scored if each is not None), None)
        if known is None:
            return None
        return [None, *(Logprob.all_at(entry, text, rank) for entry, rank in known.entries(prompt[1:]))]


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished sample. ``logprobs``: per token, token id -> Logprob, the chosen token included."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt's results: ``n`` samples, in order. ``adapter`` is None for the base model.

    ``prompt_logprobs``, where asked for: None for the first token, which follows nothing. For each further
    token a mapping of token id -> Logprob, its own included.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    adapter: str | None
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class StreamOutput:
    """The new part of one sample of one prompt while it runs, without the earlier parts.

    Only a prompt's first part gives the number of its reused tokens, and its waits in seconds: for admission,
    then for its adapter, then for its cached KV.
    """

    request_id: str
    prompt_index: int
    sample: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    adapter_s: float = 0.0
    kv_s: float = 0.0


def result_of(
    request: GenerationRequest, prompt: str | None, outputs: Sequence[TextOutput], tokenizer: Tokenizer | None
) -> RequestOutput:
    """Build the result of a request. ``prompt``: its prompt where that was text, else None."""
    text: Callable[[int], str | None] = tokenizer.token_text if tokenizer is not None else lambda token: None
    has_logprobs = request.params.logprobs is not None
    samples = []
    for each in outputs:
        logprobs = [Logprob.all_at(position, text) for position in each.logprobs] if has_logprobs else None
        ends = each.finish_reason, each.stop_reason
        samples.append(CompletionOutput(each.index, each.text, each.token_ids, logprobs, *ends))
    scored = Logprob.of_prompt(request.prompt, [each.prompt_logprobs for each in outputs], text)
    return RequestOutput(
        request.id, prompt, list(request.prompt), request.adapter, samples, prompt_logprobs=scored
    )
