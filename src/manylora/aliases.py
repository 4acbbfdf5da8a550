"""Flags of vLLM and SGLang that mean exactly what one of ours means, or what is always so here.

One table for the command line, config files and keyword arguments of ``LLM``; docs/flags.md shows it. Whatever
means something else, however slightly, is not in it and is refused as unknown.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from manylora.config import ConfigError, option_of


@dataclasses.dataclass(frozen=True, slots=True)
class Alias:
    """Another engine's name for the flag ``of``, or for what is always on (``of`` is None)."""

    name: str
    of: str | None
    engines: str
    means: str = ""
    """What is always on."""
    contradicts: tuple[str, str] | None = None
    """A flag and the value of it with which it is not on after all."""
    lists_adapters: bool = False
    switch: tuple[str, str] | None = None
    """Of a flag that is on or off there: the values of ours that these mean."""
    is_short: bool = False
    """Written with one dash."""

    @property
    def option(self) -> str:
        return option_of(self.name)[1 if self.is_short else 0 :]

    @property
    def same(self) -> str:
        """What of ours it is."""
        assert self.of is not None
        value = "" if self.switch is None else f" {self.switch[0]}"
        return option_of(self.of) + value

    def translated(self, value: Any) -> Any:
        """A value of it as one of ours."""
        if self.switch is None:
            return value
        if not isinstance(value, bool):
            raise ConfigError(f"{self.option} must be true or false, got {value!r}")
        return self.switch[0 if value else 1]


ALIASES: tuple[Alias, ...] = (
    Alias("max_num_batched_tokens", "max_batch_tokens", "vLLM"),
    Alias("max_running_requests", "max_num_seqs", "SGLang"),
    Alias("max_queued_requests", "max_waiting", "SGLang"),
    Alias("context_length", "max_model_len", "SGLang"),
    Alias("block_size", "page_tokens", "vLLM"),
    Alias("page_size", "page_tokens", "SGLang"),
    Alias("max_lora_rank", "max_adapter_rank", "vLLM, SGLang"),
    Alias("tp", "tensor_parallel_size", "vLLM", is_short=True),
    Alias("tp_size", "tensor_parallel_size", "SGLang"),
    Alias("fully_sharded_loras", "lora_sharding", "vLLM", switch=("sharded", "replicated")),
    Alias("lora_modules", "adapter", "vLLM", lists_adapters=True),
    Alias("lora_paths", "adapter", "SGLang", lists_adapters=True),
    Alias("enable_lora", None, "vLLM, SGLang", "adapters are served"),
    Alias("enable_chunked_prefill", None, "vLLM", "long prompts are computed in chunks"),
    Alias(
        "enable_prefix_caching", None, "vLLM", "KV of earlier requests is reused",
        contradicts=("cache_policy", "s-lora"),
    ),
)  # fmt: skip


def check_switch(alias: Alias, value: Any, values: Mapping[str, Any]) -> None:
    """Raise ConfigError where something that is always on is to be off, or is off by another of the settings."""
    if value is not True:
        raise ConfigError(f"{alias.option} is always on ({alias.means}) and cannot be {value!r}")
    if alias.contradicts is not None:
        name, contrary = alias.contradicts
        if values.get(name) == contrary:
            raise ConfigError(f"{alias.option} cannot be had with {option_of(name)} {contrary}")


def adapter_pairs(alias: Alias, value: Any, bases: Collection[str]) -> Any:
    """Adapters as ``NAME=PATH`` where they are given as objects, JSON or not; everything else as it is.

    ``bases``: names of the base model, which an object may repeat. Raises ConfigError.
    """
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    return [_pair(alias, item, bases) for item in value]


def _pair(alias: Alias, item: Any, bases: Collection[str]) -> Any:
    if isinstance(item, str) and item.lstrip().startswith("{"):
        try:
            item = json.loads(item)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{alias.option} is not valid JSON: {error}") from None
    if not isinstance(item, Mapping):
        return item
    fields = {key: value for key, value in item.items() if value is not None}
    name = fields.pop("name", None) or fields.pop("lora_name", None)
    path = fields.pop("path", None) or fields.pop("lora_path", None)
    if not (isinstance(name, str) and isinstance(path, str)) or "=" in name:
        raise ConfigError(
            f"{alias.option} needs a name without '=' and a path for each adapter, got {item!r}"
        )
    base = fields.pop("base_model_name", None)
    if base is not None and base not in bases:
        raise ConfigError(f"{alias.option}: {name!r} is for the base {base!r}, which is not the one served")
    if fields.pop("pinned", False):
        raise ConfigError(f"{alias.option}: {name!r} cannot be pinned")
    if fields:
        raise ConfigError(f"{alias.option}: {name!r} has the unknown field {next(iter(fields))!r}")
    return f"{name}={path}"
