"""Handles POST /v1/completions and /v1/chat/completions: turns a body into a job, and writes the answers.

Both take the same steps. The body is read and checked, its model is chosen, its prompts are encoded, and its
parameters are fitted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from manylora.engine.client import GenerationRequest
from manylora.server import logprobs as scores
from manylora.server import requests as bodies
from manylora.server.docs import EVENTS, JSON, Operation
from manylora.server.generation import GenerationResponse, Job, Service
from manylora.server.models import Chosen, Models, note_model
from manylora.server.requests import ChatBody, CompletionBody, run_beside
from manylora.server.streaming import ChunkWriter, Usage, encode
from manylora.text.chat import render_chat, within
from manylora.text.generate import TextDelta, TextOutput
from manylora.text.prompts import check_priority, encode_texts, fit_params, require_tokenizer
from manylora.text.texts import ModelText
from manylora.text.tokenizer import Tokenizer
from manylora.types import InvalidRequest, PromptLogprobs, SamplingParams, TokenLogprobs

# Each prompt is an engine request of its own; more than this would hold up the event loop.
MAX_PROMPTS = 4096
# The samples of all prompts: each has its own text and counts.
MAX_CHOICES = 16_384
# Rendering takes time for each; no model's context has room for this many.
MAX_MESSAGES = 16_384

TEMPLATE_S = 2.0
"""The most seconds that rendering may take with a template other than the base's."""

_ROLE = b'"delta":{"role":"assistant","content":""}'

Body = TypeVar("Body", CompletionBody, ChatBody)


class CompletionShape:
    """The shape of choices with ``text``. ``echoes``: for each prompt, the text that precedes the completion."""

    def __init__(
        self, job: Job, body: CompletionBody, tokenizer: Tokenizer | None, echoes: list[str]
    ) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._num_prompt_top = body.prompt_logprobs
        self._echoed: dict[int, dict[str, list[Any]]] = {}
        self._prompts: dict[int, list[Any]] = {}
        self._unechoed = {
            prompt * job.n + sample: text for prompt, text in enumerate(echoes) for sample in range(job.n)
        }
        num_top = job.params.logprobs
        names = scores.TokenNames(tokenizer, bool(body.return_tokens_as_token_ids))
        self._logprobs = None if num_top is None else (names, num_top)
        self._writers: dict[int, scores.CompletionLogprobs] = {}

    def take_prompt(self, number: int, scored: PromptLogprobs) -> None:
        """See Shape."""
        tokens, tokenizer = self._job.requests[number].prompt, self._tokenizer
        if self._echoes and self._logprobs is not None and tokenizer is not None:
            asked = *self._logprobs, tokenizer
            self._echoed[number] = scores.echoed(*asked, tokens, scored, self._echoes[number])
        if self._num_prompt_top is not None:
            self._prompts[number] = scores.prompt_entries(tokenizer, self._num_prompt_top, tokens, scored)

    def identity(self, is_chunk: bool) -> dict[str, Any]:
        """See Shape."""
        return self._job.identity("text_completion")

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
        return scores.choice_parts(index, content, self._writer(index), logprobs, output)

    def _writer(self, index: int) -> scores.CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        writer = self._writers.get(index)
        if writer is None:
            number = index // self._job.n
            text = self._echoes[number] if self._echoes else ""
            writer = scores.CompletionLogprobs(*self._logprobs, text, self._echoed.get(number))
            self._writers[index] = writer
        return writer


def split_prompts(prompt: str | list[Any]) -> list[str] | list[list[int]]:
    """Split a text, a list of token ids, or a list of either into prompts. Raises InvalidRequest for anything
    else."""
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


class ChatShape:
    """The shape of choices with a ``message``, or with a ``delta`` after one that gives the role."""

    def __init__(self, job: Job, body: ChatBody, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        num_top = job.params.logprobs
        names = scores.TokenNames(tokenizer, bool(body.return_tokens_as_token_ids))
        self._logprobs = None if num_top is None else scores.ChatLogprobs(names, num_top)
        self._of_prompt: dict[str, list[Any]] = {}

    def take_prompt(self, number: int, scored: PromptLogprobs) -> None:
        """See Shape."""
        tokens = self._job.requests[number].prompt
        entries = scores.prompt_entries(self._tokenizer, scored.num_top, tokens, scored)
        self._of_prompt["prompt_logprobs"] = entries

    def identity(self, is_chunk: bool) -> dict[str, Any]:
        """See Shape."""
        kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return self._of_prompt | self._job.identity(kind)

    def opening(self, writer: ChunkWriter, usage: Usage | None) -> bytes:
        """See Shape."""
        return b"".join(
            writer.chunk(index, _ROLE, TextDelta(index), None, usage) for index in range(self._job.n)
        )

    def chunk(self, writer: ChunkWriter, index: int, delta: TextDelta, usage: Usage | None) -> bytes:
        """See Shape."""
        content = b'"delta":{"content":' + encode(delta.text) + b"}"
        logprobs = None if self._logprobs is None else self._logprobs.encode(delta.logprobs)
        return writer.chunk(index, content, delta, logprobs, usage)

    def choice(self, index: int, output: TextOutput, logprobs: Iterable[TokenLogprobs]) -> Iterator[bytes]:
        """See Shape."""
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return scores.choice_parts(index, b'"message":' + encode(message), self._logprobs, logprobs, output)


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked(Generic[Body]):
    """A body that was read and checked, with its model and its priority."""

    request: Request
    body: Body
    raw: bytes
    chosen: Chosen
    priority: int
    start_s: float


def operations(service: Service, models: Models, trusts_templates: bool) -> list[Operation]:
    """List the two operations. ``trusts_templates``: whether requests may contain templates."""
    info = service.client.info

    async def read(request: Request, kind: type[Body]) -> _Asked[Body]:
        start_s = time.perf_counter()
        body, raw = await bodies.read_body(request, kind)
        note_model(request, body.model)
        chosen = await models.choose(body.model, bodies.adapter_asked(body))
        note_model(request, chosen.name)
        bodies.check_supported(body)
        return _Asked(request, body, raw, chosen, check_priority(body.priority, info), start_s)

    def job_of(
        asked: _Asked[Any], prefix: str, prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]
    ) -> Job:
        state, chosen = asked.request.state, asked.chosen
        # KV is shared among requests of one API key (where keys are set) and one ``cache_salt``.
        scope = service.scopes.scope(getattr(state, "api_key", None), asked.body.cache_salt)
        answer_id = f"{prefix}-{state.request_id}"
        client, priority, ends = getattr(state, "api_key_place", 0), asked.priority, chosen.text.eos_ids
        made = functools.partial(
            GenerationRequest, adapter=chosen.adapter, cache_scope=scope, priority=priority, client=client
        )
        # Clients choose ids that repeat, and a cluster has several front ends.
        requests = [
            made(f"{answer_id}-{secrets.token_hex(8)}", prompt, its, more=number < len(prompts), eos_ids=ends)
            for number, (prompt, its) in enumerate(zip(prompts, params, strict=True), 1)
        ]
        return Job(answer_id, chosen, requests, asked.start_s)

    # ------------------------------------------------------------ completions

    def fitted(text: ModelText, body: CompletionBody, prompts: list[tuple[int, ...]]) -> list[SamplingParams]:
        params = bodies.completion_params(body, text.defaults)
        if len(prompts) * params.n > MAX_CHOICES:
            raise InvalidRequest(f"prompts times n may be at most {MAX_CHOICES}", "n")
        bodies.check_parameters(params, len(prompts))
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
        asked = await read(request, CompletionBody)
        body, text = asked.body, asked.chosen.text
        prompts = await run_beside(asked.raw, split_prompts, body.prompt)
        if isinstance(prompts[0], str):
            adds = body.add_special_tokens is not False
            token_ids = await encode_texts(text.tokenizer, prompts, add_special_tokens=adds, info=info)
        else:
            token_ids = [tuple(prompt) for prompt in prompts]
        params = await run_beside(asked.raw, fitted, text, body, token_ids)
        job = job_of(asked, "cmpl", token_ids, params)
        shape = CompletionShape(job, body, text.tokenizer, echoes(text, body, prompts))
        return GenerationResponse(service, job, shape, body)

    # ------------------------------------------------------------ chat

    def rendered(tokenizer: Tokenizer, body: ChatBody) -> str:
        if len(body.messages) > MAX_MESSAGES:
            raise InvalidRequest(f"messages may hold at most {MAX_MESSAGES} messages", "messages")
        return render_chat(
            tokenizer,
            body.messages,
            add_generation_prompt=body.add_generation_prompt
            or (body.add_generation_prompt is None and not body.continue_final_message),
            continue_final_message=bool(body.continue_final_message),
            template=body.chat_template or None,
            template_kwargs=body.chat_template_kwargs,
        )

    async def chat(request: Request) -> Response:
        asked = await read(request, ChatBody)
        body, text = asked.body, asked.chosen.text
        if body.chat_template and not trusts_templates:
            reason = "chat_template in a request needs a server with --trust-request-chat-template"
            raise InvalidRequest(reason, "chat_template")
        params = bodies.chat_params(body, text.defaults)
        tokenizer = require_tokenizer(text.tokenizer, "messages")
        if not body.chat_template and text.template == models.texts.base.template:
            written = await run_beside(asked.raw, rendered, tokenizer, body)
        else:  # another template than the base's may be slow, or never end
            written = await asyncio.to_thread(within, TEMPLATE_S, rendered, tokenizer, body)
        # The template has written the special tokens already.
        adds = bool(body.add_special_tokens)
        encoding = encode_texts(tokenizer, [written], add_special_tokens=adds, param="messages", info=info)
        (prompt,) = await encoding
        is_explicit = bodies.max_chat_tokens(body) is not None
        params = fit_params(prompt, params, info, is_max_tokens_explicit=is_explicit, param="messages")
        job = job_of(asked, "chatcmpl", [prompt], [params])
        return GenerationResponse(service, job, ChatShape(job, body, tokenizer), body)

    answers, errors = (JSON, EVENTS), (404, 409, 429)
    completions, chats = "/v1/completions", "/v1/chat/completions"
    texts = "Complete a prompt", "Continue a conversation"
    return [
        Operation("POST", completions, complete, "generation", texts[0], CompletionBody, answers, errors),
        Operation("POST", chats, chat, "generation", texts[1], ChatBody, answers, errors),
    ]
