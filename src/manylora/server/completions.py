"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from manylora.server.docs import EVENTS, JSON, Operation
from manylora.server.generation import GenerationResponse, Job, Service, StreamPlan, answer_id
from manylora.server.logprobs import CompletionLogprobs, TokenNames, echoed, logprob_parts, prompt_entries
from manylora.server.models import Models, note_model
from manylora.server.requests import (
    CompletionBody,
    adapter_asked,
    check_parameters,
    check_supported,
    completion_params,
    read_body,
    run_beside,
)
from manylora.server.streaming import ChunkWriter, Usage, choice_parts, encode
from manylora.text.generate import TextDelta, TextOutput
from manylora.text.model_text import ModelText
from manylora.text.prompts import encode_texts, fit_params, require_tokenizer
from manylora.text.tokenizer import Tokenizer
from manylora.types import InvalidRequest, PromptLogprobs, SamplingParams, TokenLogprobs

# Each prompt is an engine request of its own; more than this would hold up the event loop.
MAX_PROMPTS = 4096
# Samples of all prompts: each has text and figures of its own.
MAX_CHOICES = 16_384


class CompletionShape:
    """Choices with ``text``. ``echoes`` holds, per prompt, the text that comes before the completion."""

    def __init__(
        self, job: Job, body: CompletionBody, tokenizer: Tokenizer | None, echoes: list[str]
    ) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._num_prompt_top = body.prompt_logprobs
        self._echoed: dict[int, dict[str, list[Any]]] = {}
        self._prompts: dict[int, list[Any]] = {}
        self._created_s = int(time.time())
        self._unechoed = {
            prompt * job.n + sample: text for prompt, text in enumerate(echoes) for sample in range(job.n)
        }
        num_top = job.params[0].logprobs
        names = TokenNames(tokenizer, bool(body.return_tokens_as_token_ids))
        self._logprobs = None if num_top is None else (names, num_top)
        self._writers: dict[int, CompletionLogprobs] = {}

    def take_prompt(self, number: int, scored: PromptLogprobs) -> None:
        """See Shape."""
        tokens, tokenizer = self._job.prompts[number], self._tokenizer
        if self._echoes and self._logprobs is not None and tokenizer is not None:
            asked = *self._logprobs, tokenizer
            self._echoed[number] = echoed(*asked, tokens, scored, self._echoes[number])
        if self._num_prompt_top is not None:
            self._prompts[number] = prompt_entries(tokenizer, self._num_prompt_top, tokens, scored)

    def identity(self, is_chunk: bool) -> dict[str, Any]:
        """See Shape."""
        return {
            "id": self._job.id,
            "object": "text_completion",
            "created": self._created_s,
            "model": self._job.chosen.name,
        }

    def opening(self, writer: ChunkWriter, usage: Usage | None) -> bytes:
        """See Shape."""
        return b""

    def chunk(self, writer: ChunkWriter, index: int, delta: TextDelta, usage: Usage | None) -> bytes:
        """See Shape."""
        text, names = self._unechoed.pop(index, "") + delta.text, self._writer(index)
        logprobs = None if names is None else names.encode(delta.logprobs)
        return writer.chunk(index, b'"text":' + encode(text), delta, logprobs, usage)

    def choice(self, index: int, output: TextOutput, logprobs: Iterable[TokenLogprobs]) -> Iterator[bytes]:
        """See Shape."""
        content = b'"text":' + encode(self._unechoed.pop(index, "") + output.text)
        prompt = self._prompts.get(index // self._job.n)
        if prompt is not None:
            content += b',"prompt_logprobs":' + encode(prompt)
        return choice_parts(index, content, logprob_parts(self._writer(index), logprobs), output)

    def _writer(self, index: int) -> CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        writer = self._writers.get(index)
        if writer is None:
            number = index // self._job.n
            text = self._echoes[number] if self._echoes else ""
            writer = CompletionLogprobs(*self._logprobs, text, self._echoed.get(number))
            self._writers[index] = writer
        return writer


def split_prompts(prompt: str | list[Any]) -> list[str] | list[list[int]]:
    """One text, one list of token ids, or a list of either; raises InvalidRequest for anything else."""
    prompts: list[Any] = [prompt]
    if isinstance(prompt, list):
        kinds = set(map(type, prompt))
        if kinds in ({str}, {list}):
            prompts = prompt
        elif kinds - {int}:
            raise InvalidRequest(
                "prompt must be a string, a list of token ids, a list of strings or a list of lists of "
                "token ids",
                "prompt",
            )
    if not all(prompts):
        raise InvalidRequest("prompt must not be empty", "prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt may hold at most {MAX_PROMPTS} prompts", "prompt")
    return prompts


def operations(service: Service, models: Models) -> list[Operation]:
    """Give /v1/completions."""

    async def encoded(text: ModelText, body: CompletionBody, prompts: list[Any]) -> list[tuple[int, ...]]:
        if not isinstance(prompts[0], str):
            return [tuple(prompt) for prompt in prompts]
        add_special_tokens = body.add_special_tokens is not False
        return await encode_texts(
            text.tokenizer,
            prompts,
            add_special_tokens=add_special_tokens,
            info=service.client.info,
        )

    def fitted(text: ModelText, body: CompletionBody, prompts: list[tuple[int, ...]]) -> list[SamplingParams]:
        params, info = completion_params(body, text.defaults), service.client.info
        if len(prompts) * params.n > MAX_CHOICES:
            raise InvalidRequest(f"prompts times n may be at most {MAX_CHOICES}", "n")
        check_parameters(params, len(prompts))
        is_explicit = body.max_tokens is not None
        return [fit_params(ids, params, info, is_max_tokens_explicit=is_explicit) for ids in prompts]

    def echoes(text: ModelText, body: CompletionBody, prompts: list[Any]) -> list[str]:
        if not body.echo:
            return []
        tokenizer = require_tokenizer(text.tokenizer, "echo")
        if isinstance(prompts[0], str):
            return prompts
        return [tokenizer.decode(ids, body.skip_special_tokens is not False) for ids in prompts]

    async def complete(request: Request) -> Response:
        start_s = time.perf_counter()
        body, raw = await read_body(request, CompletionBody)
        note_model(request, body.model)
        chosen = await models.choose(body.model, adapter_asked(body))
        note_model(request, chosen.name)
        check_supported(body)
        priority = service.priority(body)
        prompts = await run_beside(raw, split_prompts, body.prompt)
        token_ids = await encoded(chosen.text, body, prompts)
        params = await run_beside(raw, fitted, chosen.text, body, token_ids)
        scope = service.cache_scope(request, body.cache_salt)
        client = service.client_of(request)
        job = Job(answer_id("cmpl", request), chosen, token_ids, params, start_s, scope, priority, client)
        shape = CompletionShape(job, body, chosen.text.tokenizer, echoes(chosen.text, body, prompts))
        return GenerationResponse(service, job, shape, StreamPlan.of(body))

    summary, answers, errors = "Complete a prompt", (JSON, EVENTS), (404, 409, 429)
    return [
        Operation("POST", "/v1/completions", complete, "generation", summary, CompletionBody, answers, errors)
    ]
