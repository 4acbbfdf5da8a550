"""The forms that callers of ``LLM`` write: one prompt or many, one value for all prompts or one for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from manylora.types import InvalidRequest, SamplingParams

Prompt = str | Sequence[int]


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list; raises InvalidRequest."""
    if isinstance(prompts, str):
        return [_prompt(prompts)]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray | memoryview | Mapping):
        raise _no_prompt(prompts)
    listed = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]
    return [_prompt(item) for item in listed]


def _prompt(item: Any) -> Prompt:
    """Text or a sequence of token ids, whose values are checked later."""
    if isinstance(item, str) and not item:
        raise InvalidRequest("prompt must not be empty", "prompt")
    if not isinstance(item, str | Sequence) or isinstance(item, bytes | bytearray | memoryview):
        raise _no_prompt(item)
    return item


def _no_prompt(found: Any) -> InvalidRequest:
    kind = type(found).__name__
    return InvalidRequest(f"prompts must be text, token ids or a list of either, got {kind}", "prompt")


def spread(value: Any, count: int, name: str) -> list[Any]:
    """One value for all, or one for each."""
    if value is None or isinstance(value, str | int | SamplingParams):
        return [value] * count
    if not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} must be one for all prompts or a list, got {value!r}", name)
    listed = list(value)
    if len(listed) != count:
        raise InvalidRequest(f"{name} has {len(listed)} entries for {count} prompts", name)
    return listed


class Given(NamedTuple):
    """What a call gives beside its prompts, each one for all of them or a list of one for each."""

    params: Any
    adapter: Any
    cache_salt: Any
    priority: Any

    def spread(self, count: int) -> list[tuple[Any, Any, Any, Any]]:
        """For each of so many prompts; raises InvalidRequest."""
        return list(zip(*(spread(value, count, name) for name, value in zip(self._fields, self))))
