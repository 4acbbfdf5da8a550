"""Engines with settings that no user gives, such as the number of steps in flight."""

from __future__ import annotations

from typing import Any
from unittest import mock

from manylora import LLM, AsyncLLM


def internal_llm(*args: Any, **settings: Any) -> LLM:
    """An LLM that takes what ``manylora bench`` alone has as flags."""
    with mock.patch("manylora.llm.check_removed"):
        return LLM(*args, **settings)


def internal_async_llm(*args: Any, **settings: Any) -> AsyncLLM:
    """The same for asyncio."""
    with mock.patch("manylora.llm.check_removed"):
        return AsyncLLM(*args, **settings)
