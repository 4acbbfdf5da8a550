"""Renders chat messages to prompt text, with the Jinja template of a model.

Renders as transformers' ``apply_chat_template`` does, in a sandbox: the template comes with the model, and
anyone may have written the messages.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from manylora.text.tokenizer import Tokenizer
from manylora.types import InvalidRequest

Message = Mapping[str, Any]
_Result = TypeVar("_Result")


class _GenerationBlock(jinja2.ext.Extension):
    """The block ``{% generation %}``, which marks an assistant's words for training. Here it only renders its
    body."""

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


@functools.lru_cache(maxsize=256)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment.from_string(source)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Return the prompt text for a conversation. Encode it without special tokens, since the template writes
    them.

    ``continue_final_message``: the text ends with the last message's text, which the answer continues.
    ``template``: a template to render instead of the model's. Raises InvalidRequest for malformed messages,
    for a model without a template, and for whatever the template itself refuses.
    """
    source = tokenizer.chat_templates.get("default") if template is None else template
    if source is None:
        raise InvalidRequest("this model has no chat template: use /v1/completions", "messages")
    if continue_final_message and add_generation_prompt:
        fault = "continue_final_message and add_generation_prompt contradict each other"
        raise InvalidRequest(fault, "continue_final_message")
    if not messages:
        raise InvalidRequest("messages must hold at least one message", "messages")
    plain = [_plain_message(message, index) for index, message in enumerate(messages)]
    final = _mark_end(plain) if continue_final_message else ""
    variables = {
        **tokenizer.special_tokens,
        **(template_kwargs or {}),
        "messages": [_readable(message) for message in plain],
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        text = _compiled(source).render(variables)
    except Exception as error:
        # Every error of a template (a missing key, a refused role, a wrong type) is caused by its input.
        fault = f"the chat template cannot render these messages: {error}"
        raise InvalidRequest(fault, "messages") from error
    return _cut_at_mark(text, final) if continue_final_message else text


_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""The same mark as in transformers, so that a template that trims texts treats it in the same way."""


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's text, and return that text. Raises InvalidRequest where there is
    none."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + _MARK
        return content
    for part in reversed(content or []):
        if "text" in part:
            text: str = part["text"]
            part["text"] += _MARK
            return text
    raise InvalidRequest("continue_final_message: the final message has no text to continue", "messages")


def _cut_at_mark(text: str, final: str) -> str:
    where = text.rfind(_MARK.strip())
    if where < 0 or final.strip() not in text:
        fault = "the final message is not in what the chat template makes of it"
        raise InvalidRequest(f"continue_final_message: {fault}", "messages")
    # A template that trimmed the mark's space would also have trimmed the space at the end of the text itself.
    return text[:where] if text.startswith(_MARK, where) else text[:where].rstrip()


_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names under which clients send an answer's reasoning. Templates find it under the first two, as in
transformers."""


def _plain_message(message: Message, index: int) -> dict[str, Any]:
    """Check and copy a message; keys whose value is null are left out. Raises InvalidRequest."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"messages[{index}] must be an object", "messages")
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"messages[{index}].role must be a string", "messages")
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list | tuple):
        plain["content"] = [_plain_part(part, index) for part in content]
    elif content is None:
        # An assistant message that only calls tools has no content; any other without it is a mistake.
        if "tool_calls" not in plain:
            raise InvalidRequest(f"messages[{index}].content is missing", "messages")
    elif not isinstance(content, str):
        fault = "must be a string or a list of text parts"
        raise InvalidRequest(f"messages[{index}].content {fault}", "messages")
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain_part(part: Any, index: int) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
        fault = "may hold parts of type 'text' only, as strings"
        raise InvalidRequest(f"messages[{index}].content {fault}", "messages")
    return {**part, "type": "text", "text": part[kind]}  # templates know no refusals


def _readable(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message in a form that serves any template: for text or for parts, for objects or for
    JSON."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, str):
        message["content"] = Text(content)
    elif content is not None:
        message["content"] = Parts(content)
    if isinstance(calls, list | tuple):
        message["tool_calls"] = [_readable_call(call) for call in calls]
    return message


def _readable_call(call: Any) -> Any:
    """Decode a call's arguments, which are JSON in OpenAI's API and objects in templates."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    text = "" if function["arguments"] is None else function["arguments"]
    if not isinstance(text, str):
        return call
    try:
        decoded = json.loads(text.strip() or "{}")
    except (ValueError, RecursionError):
        return call
    if isinstance(decoded, list):
        return {**call, "function": {**function, "arguments": ArgumentList(decoded, text)}}
    if not isinstance(decoded, dict | None):
        return call
    return {**call, "function": {**function, "arguments": Arguments(decoded or {}, text)}}


# Templates disagree about the types of their input, so these values can be read in either of two ways.
# Sandboxed templates cannot reach names that begin with an underscore.


class Text(str):
    """A message's text. A template that iterates over it for parts finds a single text part, as in vLLM."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        yield {"type": "text", "text": str(self)}


class Parts(list[Any]):
    """A message's parts. A template that uses them as text finds the joined text, as in transformers."""

    def __str__(self) -> str:
        return " ".join(part["text"] for part in self)

    def __add__(self, other: Any) -> Any:
        return (str(self) if isinstance(other, str) else list(self)) + other

    def __radd__(self, other: Any) -> Any:
        return other + (str(self) if isinstance(other, str) else list(self))

    def __contains__(self, item: Any) -> bool:
        return item in str(self) if isinstance(item, str) else super().__contains__(item)

    def __getattr__(self, name: str) -> Any:
        return getattr(str(self), name)  # such as ``strip`` and ``split``


class _Written:
    """A value that a client sent as JSON. A template that uses it as text finds that JSON."""

    def __init__(self, decoded: Any, text: str) -> None:
        super().__init__(decoded)  # type: ignore[call-arg]  # of the dict or list beside this class
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


class Arguments(_Written, dict[str, Any]):
    """A call's arguments as an object."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            raise AttributeError(name)  # Jinja then looks it up as an item
        return getattr(self._text, name)


class ArgumentList(_Written, list[Any]):  # type: ignore[misc]  # joins text, not lists
    """A call's arguments, where they are a list."""


# ---------------------------------------------------------------- a time limit for templates


class _TooLate(BaseException):
    """An exception that another thread raises in the working thread. It is a BaseException, so that ``except
    Exception`` in the work does not catch it."""


def within(seconds: float, work: Callable[..., _Result], *args: Any) -> _Result:
    """Call ``work`` on this thread, which must not be the main one. Raises InvalidRequest where the work,
    which must be Python code, takes longer than ``seconds``."""
    thread, lock, is_over = threading.get_ident(), threading.Lock(), False

    def end() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TooLate))

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        try:
            return work(*args)
        finally:
            with lock:
                is_over = True
            timer.cancel()
    except _TooLate:
        raise InvalidRequest(f"the chat template takes longer than {seconds:g} s", "messages") from None
