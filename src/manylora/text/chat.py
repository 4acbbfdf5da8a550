"""Chat messages to prompt text, by the Jinja template that a model brings.

Renders as transformers' ``apply_chat_template`` does, in a sandbox: the template comes with the model, the
messages from anyone.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from manylora.text.tokenizer import Tokenizer
from manylora.types import InvalidRequest

Message = Mapping[str, Any]


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks what an assistant wrote, for training; here it only passes its body on."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares a mutable set)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text for a conversation; encode it without special tokens, the template writes them.

    Raises InvalidRequest for malformed messages, for a model without a template, and for what the
    template itself refuses.
    """
    source = tokenizer.chat_templates.get("default")
    if source is None:
        raise InvalidRequest("this model has no chat template: use /v1/completions", "messages")
    variables = {
        **tokenizer.special_tokens,
        **(template_kwargs or {}),
        "messages": plain_messages(messages),
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return _compiled(source).render(variables)
    except Exception as error:
        # Whatever a template trips over (a missing key, a role it refuses, a wrong type) lies in its input.
        raise InvalidRequest(
            f"the chat template cannot render these messages: {error}", "messages"
        ) from error


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content as one string, absent keys instead of null ones."""
    if not messages:
        raise InvalidRequest("messages must hold at least one message", "messages")
    return [_plain_message(message, index) for index, message in enumerate(messages)]


def _plain_message(message: Message, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"messages[{index}] must be an object", "messages")
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"messages[{index}].role must be a string", "messages")
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list | tuple):
        plain["content"] = "\n".join(_part_text(part, index) for part in content)
    elif content is None:
        # An assistant message that only calls tools has no content; any other without it is a mistake.
        if "tool_calls" not in plain:
            raise InvalidRequest(f"messages[{index}].content is missing", "messages")
    elif not isinstance(content, str):
        raise InvalidRequest(
            f"messages[{index}].content must be a string or a list of text parts", "messages"
        )
    return plain


def _part_text(part: Any, index: int) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(kind) if kind in ("text", "refusal") else None
    if not isinstance(text, str):
        raise InvalidRequest(
            f"messages[{index}].content may hold parts of type 'text' only, as strings", "messages"
        )
    return text
