"""Serves thousands of LoRA adapters on one base model. Importing this package loads no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from manylora._version import VERSION

if TYPE_CHECKING:
    from manylora.llm import LLM as LLM
    from manylora.llm import AsyncLLM as AsyncLLM
    from manylora.types import SamplingParams as SamplingParams

__version__ = VERSION
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "manylora.llm", "AsyncLLM": "manylora.llm", "SamplingParams": "manylora.types"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'manylora' has no attribute {name!r}")
