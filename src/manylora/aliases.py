"""Lists flags of vLLM and SGLang, with what each means here, and settings of our own that were removed.

An ``Alias`` means exactly what one of our flags means, or a feature that is always on here. A ``Foreign``
flag occurs in copied commands; it does nothing here, or is refused. The tables serve the command line, config
files and keyword arguments of ``LLM``; docs/flags.md shows them. A flag in neither table is refused as
unknown.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from manylora.config.declaring import ConfigError, option_of

log = logging.getLogger("manylora")


@dataclasses.dataclass(frozen=True, slots=True)
class Alias:
    """Another engine's name for the flag ``of``, or for a feature that is always on (``of`` is None)."""

    name: str
    of: str | None
    engines: str
    means: str = ""
    """The feature that is always on."""
    contradicts: tuple[str, str] | None = None
    """A flag and its value with which the feature is off after all."""
    lists_adapters: bool = False
    switch: tuple[str, str] | None = None
    """For a flag that is on or off in the other engine: our flag's values for on and for off."""
    is_short: bool = False
    """Whether the flag is written with one dash."""
    values: tuple[tuple[str, str], ...] = ()
    """Pairs of the other engine's value and ours, where these differ."""

    @property
    def option(self) -> str:
        return option_of(self.name)[1 if self.is_short else 0 :]

    @property
    def same(self) -> str:
        """The flag of ours, with its value, for people."""
        assert self.of is not None
        value = "" if self.switch is None else f" {self.switch[0]}"
        return option_of(self.of) + value

    def translated(self, value: Any) -> Any:
        """Translate a value of the other engine's flag to ours. Raises ConfigError where a switch is neither
        true nor false."""
        if self.switch is None:
            return next((own for theirs, own in self.values if value == theirs), value)
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
    Alias("enforce_eager", "cuda_graphs", "vLLM", switch=("off", "auto")),
    Alias("disable_cuda_graph", "cuda_graphs", "SGLang", switch=("off", "auto")),
    Alias("lora_modules", "adapter", "vLLM", lists_adapters=True),
    Alias("lora_paths", "adapter", "SGLang", lists_adapters=True),
    Alias("enable_lora", None, "vLLM, SGLang", "adapters are served"),
    Alias("enable_chunked_prefill", None, "vLLM", "long prompts are computed in chunks"),
    Alias(
        "enable_prefix_caching", None, "vLLM", "KV of earlier requests is reused",
        contradicts=("cache_policy", "s-lora"),
    ),
)  # fmt: skip


CLUSTER_ALIASES: tuple[Alias, ...] = (
    Alias("data_parallel_size", "replicas", "vLLM"),
    Alias("api_server_count", "frontends", "vLLM"),
    Alias("data_parallel_backend", "launcher", "vLLM", values=(("mp", "local"),)),
)
"""The aliases of a cluster's settings."""


@dataclasses.dataclass(frozen=True, slots=True)
class Foreign:
    """A flag of another engine that has no counterpart here."""

    name: str
    engines: str
    because: str
    """The reason why it does nothing, or is refused."""
    harmless: tuple[str, ...] | None = None
    """The values, in lower case, that ask for our fixed behaviour; any other is refused. None: every value is
    accepted with a note."""
    is_switch: bool = False

    @property
    def option(self) -> str:
        return option_of(self.name)

    def check(self, value: Any) -> None:
        """Accept a value, with a note where it does nothing. Raises ConfigError where it asks for something
        that does not exist here."""
        if self.harmless is None:
            log.warning("%s does nothing here: %s", self.option, self.because)
        elif str(value).lower() not in self.harmless:
            given = self.option if self.is_switch else f"{self.option} {value}"
            raise ConfigError(f"{given} cannot be had: {self.because}")


_NO_SLOTS = (
    "there are no adapter slots, adapters take pages of one pool; --adapter-batch-limit bounds a batch"
)
_LOG = "the log has a line for each request, without its text"
_LEVEL = "MANYLORA_LOG_LEVEL sets what is logged"
_NO_TLS = "the server speaks plain HTTP; TLS is for a proxy before it"
_ONLY_TEXT = "what is served is text generation"
_OFF = ("false",)

# Flags that can be refused come first, so that no note precedes an error.
FOREIGN: tuple[Foreign, ...] = (
    Foreign("trust_remote_code", "vLLM, SGLang", "code from a checkpoint is never run", _OFF, True),
    Foreign("enable_auto_tool_choice", "vLLM", "answers are not searched for tool calls yet", _OFF, True),
    Foreign("tool_call_parser", "vLLM, SGLang", "answers are not searched for tool calls yet", ()),
    Foreign("reasoning_parser", "vLLM, SGLang", "reasoning is not told from the answer", ()),
    Foreign("quantization", "vLLM, SGLang", "weights are float32, float16 or bfloat16 (--dtype)", ("none",)),
    Foreign("kv_cache_dtype", "vLLM, SGLang", "KV has the type of the weights (--dtype)", ("auto",)),
    Foreign("lora_dtype", "vLLM", "adapters have the type of the weights (--dtype)", ("auto",)),
    Foreign("tokenizer_mode", "vLLM, SGLang", "tokenizers are read from tokenizer.json", ("auto", "hf")),
    Foreign("distributed_executor_backend", "vLLM", "ranks are processes of one host", ("mp",)),
    Foreign("pipeline_parallel_size", "vLLM", "--tensor-parallel-size alone cuts a model", ("1",)),
    Foreign("cpu_offload_gb", "vLLM, SGLang", "weights stay on the device", ("0", "0.0")),
    Foreign("mem_fraction_static", "SGLang", "its share leaves steps out: see --gpu-memory-utilization", ()),
    Foreign(
        "disable_radix_cache", "SGLang",
        "KV is reused by every --cache-policy but s-lora; with a cache_salt of its own a request reuses none",
        _OFF, True,
    ),
    Foreign("ssl_keyfile", "vLLM, SGLang", _NO_TLS, ()),
    Foreign("ssl_certfile", "vLLM, SGLang", _NO_TLS, ()),
    Foreign("task", "vLLM", _ONLY_TEXT, ("auto", "generate")),
    Foreign("runner", "vLLM", _ONLY_TEXT, ("auto", "generate")),
    Foreign("revision", "vLLM, SGLang", "the hub gives its default revision; a folder may hold another", ()),
    Foreign("max_loras", "vLLM", _NO_SLOTS),
    Foreign("max_cpu_loras", "vLLM", "adapters that have been read take pages of --host-pool"),
    Foreign("max_loras_per_batch", "SGLang", _NO_SLOTS),
    Foreign("max_loaded_loras", "SGLang", "adapters that have been read take pages of --host-pool"),
    Foreign("swap_space", "vLLM", "KV that leaves the device goes to --host-pool"),
    Foreign("download_dir", "vLLM, SGLang", "files of the hub lie where HF_HOME says"),
    Foreign("max_logprobs", "vLLM", "requests may ask for up to 20"),
    Foreign("disable_log_requests", "vLLM", _LOG, is_switch=True),
    Foreign("enable_log_requests", "vLLM", _LOG, is_switch=True),
    Foreign("disable_log_stats", "vLLM", "figures are at /metrics, and not in the log", is_switch=True),
    Foreign("disable_uvicorn_access_log", "vLLM", _LEVEL, is_switch=True),
    Foreign("uvicorn_log_level", "vLLM", _LEVEL),
)  # fmt: skip


_CARASERVE = "manylora profile prints the --router-set caraserve.KEY=VALUE that stand for it"
_CACHES = (
    "keep TRITON_CACHE_DIR and FLASHINFER_WORKSPACE_BASE in one folder and copy it (docs/performance.md)"
)
_DLORA = "--merge dlora has its authors' number; manylora bench simulate has this flag"

REMOVED: Mapping[str, str] = {
    "profile": _CARASERVE,
    "handover": "each --router has its own: punica's drop the token in flight, all others wait for it",
    "slo_tpot": "give seconds, as --router-set caraserve.slo_s=0.05",
    "adapter_store": "adapters are always read from their own files",
    "adapter_store_size": "adapters are always read from their own files",
    "export": _CACHES,
    "import": _CACHES,
    "merge_mixed_16bit": "it allowed --merge-minority mixed, which was removed; use --merge-minority unmerge",
    **dict.fromkeys((f"merge_{name}" for name in ("alpha", "beta", "dec", "mul", "window")), _DLORA),
    "cache_adapter_share": "use --cache-set adapter_share=SHARE with --cache-policy static-lru",
    "cache_tau": "use --cache-set tau_s=SECONDS with --cache-policy fastlibra",
    "cache_window": "use --cache-set window_s=SECONDS with --cache-policy fastlibra or manylora",
    "kept_share": "copies that a router places take at most 0.1 of the device's pages",
    "pipeline_depth": "it is 2 on a GPU and 1 on a CPU; manylora bench and profile have this flag",
    "copy_limit": "copies go as fast as the link; manylora bench simulate --copy-limit simulates a slower one",
}
"""Settings of earlier releases, by their name in a config file, with the advice to give. A row stays for one
release."""

REMOVED_VALUES: Mapping[tuple[str, str], str] = {
    ("merge_minority", "mixed"): "use --merge-minority unmerge (or wait)",
}
"""Removed values of settings that still exist, by name and value, with the advice to give."""

REMOVED_PARAMETERS: Mapping[str, str] = {
    f"{router}.{key}": "its default holds; manylora bench simulate has it"
    for router, keys in (
        ("punica-consolidate", "cooldown_s"),
        ("caraserve", "penalty_s"),
        ("dlora-proactive", "half_life_s reserve"),
        ("dlora", "half_life_s reserve check_s solve_interval_s solve_wait_s most_kv_use most_delay_ratio"),
        ("dlora", "least_delay_s most_replicas eta_steps"),
        ("manylora", "idle_candidates holder_candidates prefix_candidates"),
        ("manylora", "home_half_life_s balance_s most_moves"),
    )
    for key in keys.split()
}
"""Removed parameters of --router-set, by ROUTER.KEY, with the advice to give."""


def check_switch(alias: Alias, value: Any, values: Mapping[str, Any]) -> None:
    """Raise ConfigError where a feature that is always on should be off, or is off because of another setting."""
    if value is not True:
        raise ConfigError(f"{alias.option} is always on ({alias.means}) and cannot be {value!r}")
    if alias.contradicts is not None:
        name, contrary = alias.contradicts
        if values.get(name) == contrary:
            raise ConfigError(f"{alias.option} cannot be had with {option_of(name)} {contrary}")


def adapter_pairs(alias: Alias, value: Any, bases: Collection[str]) -> Any:
    """Return adapters that are given as objects, JSON or not, as ``NAME=PATH``, and everything else unchanged.

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


def check_removed(values: Mapping[str, Any]) -> None:
    """Raise ConfigError where a setting, a value, a router's parameter or an environment variable was removed."""
    for name, value in values.items():
        if value is not None and name in REMOVED:
            raise ConfigError(f"{option_of(name)} was removed: {REMOVED[name]}")
        if isinstance(value, str) and (name, value) in REMOVED_VALUES:
            raise ConfigError(f"{option_of(name)} {value} was removed: {REMOVED_VALUES[name, value]}")
    given = values.get("router_set")
    for text in [given] if isinstance(given, str) else given if isinstance(given, Iterable) else ():
        parameter = str(text).partition("=")[0]
        if parameter in REMOVED_PARAMETERS:
            raise ConfigError(f"--router-set {parameter} was removed: {REMOVED_PARAMETERS[parameter]}")
    for name, instead in REMOVED.items():
        if (variable := f"MANYLORA_{name.upper()}") in os.environ:
            raise ConfigError(f"{variable} was removed: {instead}")


def add_removed(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Add hidden options, with or without a value, so that ``check_removed`` can refuse them."""
    for name in names:
        parser.add_argument(option_of(name), dest=name, nargs="?", const="", help=argparse.SUPPRESS)
