"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from manylora.server.docs import EVENTS, JSON, Operation
from manylora.server.generation import GenerationResponse, Job, Service, StreamPlan, answer_id
from manylora.server.logprobs import ChatLogprobs, TokenNames, logprob_parts, prompt_entries
from manylora.server.models import Models, note_model
from manylora.server.requests import (
    ChatBody,
    adapter_asked,
    chat_params,
    check_supported,
    max_chat_tokens,
    read_body,
    run_beside,
)
from manylora.server.streaming import ChunkWriter, Usage, choice_parts, encode
from manylora.text.chat import render_chat
from manylora.text.deadline import within
from manylora.text.generate import TextDelta, TextOutput
from manylora.text.prompts import encode_text, fit_params, require_tokenizer
from manylora.text.tokenizer import Tokenizer
from manylora.types import InvalidRequest, PromptLogprobs, TokenLogprobs

# Rendering takes time for each; the context of no model has room for so many.
MAX_MESSAGES = 16_384

TEMPLATE_S = 2.0
"""The most that rendering may take by another template than the base's."""

_ROLE = b'"delta":{"role":"assistant","content":""}'


class ChatShape:
    """Choices with a ``message``, or with a ``delta`` after one that gives the role."""

    def __init__(self, job: Job, names: TokenNames, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._created_s = int(time.time())
        num_top = job.params[0].logprobs
        self._logprobs = None if num_top is None else ChatLogprobs(names, num_top)
        self._of_prompt: dict[str, list[Any]] = {}

    def take_prompt(self, number: int, scored: PromptLogprobs) -> None:
        """See Shape."""
        entries = prompt_entries(self._tokenizer, scored.num_top, self._job.prompts[number], scored)
        self._of_prompt["prompt_logprobs"] = entries

    def identity(self, is_chunk: bool) -> dict[str, Any]:
        """See Shape."""
        return self._of_prompt | {
            "id": self._job.id,
            "object": "chat.completion.chunk" if is_chunk else "chat.completion",
            "created": self._created_s,
            "model": self._job.chosen.name,
        }

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
        parts = logprob_parts(self._logprobs, logprobs)
        return choice_parts(index, b'"message":' + encode(message), parts, output)


def operations(service: Service, models: Models, trusts_templates: bool) -> list[Operation]:
    """Give /v1/chat/completions. ``trusts_templates``: whether requests may bring templates."""

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
        start_s = time.perf_counter()
        body, raw = await read_body(request, ChatBody)
        note_model(request, body.model)
        chosen = await models.choose(body.model, adapter_asked(body))
        note_model(request, chosen.name)
        check_supported(body)
        priority = service.priority(body)
        if body.chat_template and not trusts_templates:
            reason = "chat_template in a request needs a server with --trust-request-chat-template"
            raise InvalidRequest(reason, "chat_template")
        params = chat_params(body, chosen.text.defaults)
        tokenizer = require_tokenizer(chosen.text.tokenizer, "messages")
        if not body.chat_template and chosen.text.template == models.base_text.template:
            text = await run_beside(raw, rendered, tokenizer, body)
        else:  # not the base's template: it may be slow, or never come to an end
            text = await asyncio.to_thread(within, TEMPLATE_S, rendered, tokenizer, body)
        # The template has written the special tokens already.
        add_special_tokens = bool(body.add_special_tokens)
        prompt = await encode_text(
            tokenizer,
            text,
            add_special_tokens=add_special_tokens,
            param="messages",
            info=service.client.info,
        )
        params = fit_params(
            prompt,
            params,
            service.client.info,
            is_max_tokens_explicit=max_chat_tokens(body) is not None,
            param="messages",
        )
        scope = service.cache_scope(request, body.cache_salt)
        client = service.client_of(request)
        job = Job(
            answer_id("chatcmpl", request), chosen, [prompt], [params], start_s, scope, priority, client
        )
        names = TokenNames(tokenizer, bool(body.return_tokens_as_token_ids))
        return GenerationResponse(service, job, ChatShape(job, names, tokenizer), StreamPlan.of(body))

    summary, answers, errors = "Continue a conversation", (JSON, EVENTS), (404, 409, 429)
    return [Operation("POST", "/v1/chat/completions", chat, "generation", summary, ChatBody, answers, errors)]
