"""The one table of settings: command-line flags, config-file keys and keyword arguments of ``LLM`` alike.

Owns names, types, defaults and help texts, and builds the frozen sections of ``manylora.config`` from plain
values. Imports nothing heavy, so ``manylora --help`` stays quick.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manylora.aliases import ALIASES, Alias, adapter_pairs, check_switch
from manylora.config import (
    ADMISSIONS,
    CACHE_POLICIES,
    LARGEST_NUMBER,
    MOST_SEQS,
    AdapterSettings,
    CacheConfig,
    CacheSettings,
    ConfigError,
    EngineSettings,
    HttpSettings,
    ModelSettings,
    SchedulerSettings,
    is_import_name,
    parse_size,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """One setting. ``kind``: str, int, float, size (bytes, or text like 512MiB) or path."""

    name: str
    kind: str
    help: str
    default: Any = None
    choices: tuple[str, ...] = ()
    repeats: bool = False
    metavar: str | None = None
    is_http: bool = False

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")


FLAGS: tuple[Flag, ...] = (
    Flag(
        "served_model_name",
        "str",
        "the base model's id for clients (default: MODEL as given)",
        metavar="NAME",
    ),
    Flag(
        "adapter",
        "str",
        "serve this adapter under this name; may be repeated",
        repeats=True,
        metavar="NAME=PATH",
    ),
    Flag(
        "adapter_dir",
        "path",
        "serve every adapter found in a folder of DIR under the folder's name, and allow loading more from "
        "inside DIR at run time (off without this)",
        metavar="DIR",
    ),
    Flag("host", "str", "address to listen on", "127.0.0.1", is_http=True),
    Flag("port", "int", "port to listen on", 8000, is_http=True, metavar="N"),
    Flag(
        "device",
        "str",
        "where to run; auto takes a CUDA GPU when there is one",
        "auto",
        ("auto", "cpu", "cuda"),
    ),
    Flag(
        "dtype",
        "str",
        "type of weights, adapters and KV; auto is float32 on a CPU and the checkpoint's own on CUDA "
        "(bfloat16 for a float32 checkpoint)",
        "auto",
        ("auto", "float32", "float16", "bfloat16"),
    ),
    Flag(
        "load_format",
        "str",
        "dummy fills the base with random weights, for performance work",
        "auto",
        ("auto", "dummy"),
    ),
    Flag(
        "max_model_len",
        "int",
        "longest prompt plus answer, in tokens (default: the model's, as the pool allows)",
        metavar="N",
    ),
    Flag(
        "max_num_seqs", "int", "most sequences that run at once (default: 64 on a CPU, else 256)", metavar="N"
    ),
    Flag(
        "max_batch_tokens",
        "int",
        "most tokens that one step computes; longer prompts go in chunks",
        metavar="N",
    ),
    Flag(
        "admission",
        "str",
        "whose turn it is when there is room: the oldest, the newest, or (early-abort) whoever can still be "
        "served within --slo-ttft, others being refused with 503",
        "fcfs",
        ADMISSIONS,
    ),
    Flag(
        "slo_ttft",
        "float",
        "when a request's first token should have come, after its arrival; early-abort only",
        metavar="S",
    ),
    Flag(
        "pipeline_depth",
        "int",
        "steps in flight at most: with 2, a step is decided while the one before it runs (default: 2 on a GPU, "
        "1 on a CPU)",
        metavar="N",
    ),
    Flag(
        "page_tokens",
        "int",
        "tokens that one page of KV holds (default: 16; 32 with --cache-policy static-lru)",
        metavar="N",
    ),
    Flag(
        "device_pool",
        "size",
        "memory for KV and adapters together, such as 512MiB or 10GB (default: on a CPU min(4 GiB, 25%% of "
        "free memory), on CUDA most of what the weights leave)",
        metavar="SIZE",
    ),
    Flag(
        "host_pool",
        "size",
        "host memory for adapters that have been read and for KV that had to leave the device; 0 for none "
        "(default: on a CPU min(4 GiB, 25%% of free memory), on CUDA half of free memory)",
        metavar="SIZE",
    ),
    Flag(
        "cuda_graphs",
        "str",
        "auto captures decoding steps at start-up, which spares the host their launches; off launches every "
        "kernel each time",
        "auto",
        ("auto", "off"),
    ),
    Flag(
        "cache_policy",
        "str",
        f"what decides which adapters and KV stay on the device: {', '.join(CACHE_POLICIES)}, or module:Class for "
        "one of your own",
        "manylora",
        metavar="NAME",
    ),
    Flag(
        "cache_adapter_share",
        "float",
        "the share of device pages that static-lru keeps for adapters",
        0.2,
        metavar="SHARE",
    ),
    Flag("cache_tau", "float", "scale of the time decay of FastLibra's equation 5", 10.0, metavar="S"),
    Flag("cache_window", "float", "how long a visit counts towards a node's probability", 60.0, metavar="S"),
    Flag("trace", "path", "write every cache decision as a line that a person can read", metavar="FILE"),
    Flag("max_adapter_rank", "int", "refuse adapters of a larger rank (default: no limit)", metavar="N"),
    Flag(
        "step_timeout",
        "float",
        "seconds after which a step that has not ended, or an engine that says nothing, is taken for lost: open "
        "requests fail and the server ends with exit code 1; compiling and capturing do not count",
        300.0,
        metavar="S",
    ),
    Flag(
        "drain_timeout",
        "float",
        "seconds that running requests get to finish after SIGTERM, SIGINT or SIGHUP, which a second signal ends; "
        "the server is gone at most 5 s after them, so that the default ends before Docker kills after 10 s",
        5.0,
        is_http=True,
        metavar="S",
    ),
    Flag(
        "api_key",
        "str",
        "accept only requests that carry this key; may be repeated",
        repeats=True,
        is_http=True,
        metavar="KEY",
    ),
    Flag(
        "metrics_key",
        "str",
        "where keys are set, whether /metrics asks for one too",
        "required",
        ("required", "open"),
        is_http=True,
    ),
    Flag(
        "max_waiting",
        "int",
        "most requests that wait to be admitted; more are refused with 429",
        10_000,
        is_http=True,
        metavar="N",
    ),
    Flag(
        "max_connections",
        "int",
        "most connections at once; more are answered with 503 and closed (default: 16384, or more where "
        "--max-waiting asks for it, as the limit on open files allows)",
        is_http=True,
        metavar="N",
    ),
    Flag(
        "max_body_size",
        "size",
        "largest body of a request, such as 16MiB; a larger one is refused with 413 (default: 4 MiB and what "
        "the longest prompt may need)",
        is_http=True,
        metavar="SIZE",
    ),
    Flag(
        "journal", "path", "record every event the policy sees, to replay its decisions later", metavar="FILE"
    ),
    Flag(
        "journal_rotate",
        "size",
        "go on in FILE.1, FILE.2, ... whenever a part of the journal has this size; a replay needs all of them "
        "(default: one file)",
        metavar="SIZE",
    ),
)

_PAGE_TOKENS = {"static-lru": 32}
"""The FastLibra paper runs its vLLM baseline with blocks of 32 tokens (§2.2)."""

SMALLEST_PART = 4096
"""Bytes of a journal that are worth a file."""

_BY_NAME = {flag.name: flag for flag in FLAGS}


def canonical(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under their own names, wherever they stood under another engine's; later layers win.

    Raises ConfigError where one layer gives a setting different values under different names.
    """
    plain = {name: value for layer in layers for name, value in layer.items() if value is not None}
    bases = [str(plain[name]) for name in ("served_model_name", "model") if name in plain]
    merged: dict[str, Any] = {}
    switches: list[tuple[Alias, Any]] = []
    for layer in layers:
        own = dict(layer)
        names = {flag.name: flag.option for flag in FLAGS}
        for alias in ALIASES:
            value = own.pop(alias.name, None)
            if value is None:
                continue
            if alias.of is None:
                switches.append((alias, value))
                continue
            if alias.lists_adapters:
                value = adapter_pairs(alias, value, bases)
            flag = _BY_NAME[alias.of]
            value = convert(dataclasses.replace(flag, name=alias.name), value)
            if own.get(flag.name) is not None and convert(flag, own[flag.name]) != value:
                raise ConfigError(
                    f"{names[flag.name]} and {alias.option} are one setting and were given different values"
                )
            own[flag.name], names[flag.name] = value, alias.option
        merged.update(own)
    for alias, value in switches:
        check_switch(alias, value, merged)
    return merged


def convert(flag: Flag, value: Any) -> Any:
    """A value from a file or a keyword as the flag's kind; raises ConfigError."""
    if value is None:
        return None
    if flag.repeats:
        return _as_list(flag, value)
    if flag.choices and value not in flag.choices:
        raise ConfigError(f"{flag.option} must be one of {', '.join(flag.choices)}, got {value!r}")
    match flag.kind:
        case "int":
            if isinstance(value, bool) or not isinstance(value, int | str):
                raise ConfigError(f"{flag.option} must be a whole number, got {value!r}")
            try:
                return int(value)
            except ValueError:
                raise ConfigError(f"{flag.option} must be a whole number, got {value!r}") from None
        case "float":
            try:
                return float(value)
            except (TypeError, ValueError):
                raise ConfigError(f"{flag.option} must be a number, got {value!r}") from None
        case "size":
            try:
                return parse_size(value)
            except ConfigError as error:
                raise ConfigError(f"{flag.option}: {error}") from None
    if not isinstance(value, str | Path):
        raise ConfigError(f"{flag.option} must be text, got {value!r}")
    return str(value)


def _as_list(flag: Flag, value: Any) -> list[str]:
    if isinstance(value, Mapping):
        value = [f"{name}={path}" for name, path in value.items()]
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{flag.option} must be text or a list of texts, got {value!r}")
    return list(value)


def read_config_file(path: str) -> dict[str, Any]:
    """A YAML or JSON file of settings, by flag name (dashes or underscores); raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from None
    try:
        if path.endswith(".json"):
            values = json.loads(text)
        else:
            import yaml

            values = yaml.safe_load(text)
    except Exception as error:  # each parser has its own errors
        reason = " ".join(str(error).split())
        raise ConfigError(f"the config file {path} is not valid: {reason}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"the config file {path} must hold names and values")
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def build_settings(values: Mapping[str, Any]) -> tuple[EngineSettings, HttpSettings]:
    """The frozen sections from values by flag name (or alias), ``model`` among them; raises ConfigError."""
    values = canonical(values)
    unknown = sorted(set(values) - set(_BY_NAME) - {"model"})
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}")
    model = values.get("model")
    if not isinstance(model, str | Path) or not str(model):
        raise ConfigError("no model was given: name a local folder or a hub id")
    got = {
        flag.name: flag.default if values.get(flag.name) is None else convert(flag, values[flag.name])
        for flag in FLAGS
    }
    _check(got)
    engine = EngineSettings(
        model=ModelSettings(
            str(model),
            got["served_model_name"],
            got["device"],
            got["dtype"],
            got["load_format"],
            got["max_model_len"],
        ),
        cache=CacheSettings(
            got["page_tokens"] or _PAGE_TOKENS.get(got["cache_policy"], 16),
            got["device_pool"],
            got["host_pool"],
            CacheConfig(
                policy=got["cache_policy"],
                adapter_share=got["cache_adapter_share"],
                tau_s=got["cache_tau"],
                window_s=got["cache_window"],
                trace=got["trace"] is not None,
            ),
            got["trace"],
        ),
        scheduler=SchedulerSettings(
            got["max_num_seqs"],
            got["max_batch_tokens"],
            got["admission"],
            got["slo_ttft"],
            got["pipeline_depth"],
        ),
        adapters=AdapterSettings(
            _adapters(got["adapter"] or []), got["adapter_dir"], got["max_adapter_rank"]
        ),
        journal=got["journal"],
        journal_part_bytes=got["journal_rotate"],
        cuda_graphs=got["cuda_graphs"],
        step_timeout_s=got["step_timeout"],
    )
    http = HttpSettings(
        got["host"],
        got["port"],
        got["drain_timeout"],
        tuple(got["api_key"] or ()),
        got["metrics_key"],
        got["max_waiting"],
        got["max_connections"],
        got["max_body_size"],
    )
    return engine, http


def _adapters(pairs: list[str]) -> tuple[tuple[str, str], ...]:
    adapters: dict[str, str] = {}
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"--adapter must be NAME=PATH, got {pair!r}")
        if name in adapters:
            raise ConfigError(f"--adapter names {name!r} twice")
        adapters[name] = path
    return tuple(adapters.items())


def _check(got: Mapping[str, Any]) -> None:
    for name in (
        "max_model_len", "max_num_seqs", "max_batch_tokens", "page_tokens", "max_adapter_rank", "max_waiting",
        "max_connections", "max_body_size",
    ):  # fmt: skip
        if got[name] is not None and got[name] < 1:
            raise ConfigError(f"{_BY_NAME[name].option} must be at least 1, got {got[name]}")
        largest = MOST_SEQS if name == "max_num_seqs" else LARGEST_NUMBER
        if got[name] is not None and got[name] > largest:
            raise ConfigError(f"{_BY_NAME[name].option} must be at most {largest}, got {got[name]}")
    for name in ("cache_tau", "cache_window", "step_timeout"):
        if not 0 < got[name] < float("inf"):
            raise ConfigError(f"{_BY_NAME[name].option} must be more than 0, got {got[name]}")
    if got["cache_policy"] not in CACHE_POLICIES and not is_import_name(got["cache_policy"]):
        known = ", ".join(CACHE_POLICIES)
        raise ConfigError(
            f"--cache-policy must be one of {known}, or module:Class, got {got['cache_policy']!r}"
        )
    if not 0 < got["cache_adapter_share"] < 1:
        raise ConfigError(f"--cache-adapter-share must lie between 0 and 1, got {got['cache_adapter_share']}")
    if not 0 <= got["port"] <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, got {got['port']}")
    if not 0 <= got["drain_timeout"] < float("inf"):
        raise ConfigError(f"--drain-timeout must be at least 0, got {got['drain_timeout']}")
    if got["journal_rotate"] is not None:
        if got["journal"] is None:
            raise ConfigError("--journal-rotate needs --journal")
        if got["journal_rotate"] < SMALLEST_PART:
            raise ConfigError(
                f"--journal-rotate must be at least {SMALLEST_PART} bytes, got {got['journal_rotate']}"
            )
    if got["adapter_dir"] is not None and not Path(got["adapter_dir"]).is_dir():
        raise ConfigError(f"--adapter-dir {got['adapter_dir']} is not a folder")
    if not all(key.strip() for key in got["api_key"] or ()):
        # Such as from an unset variable. It would let in every client that sends an empty key.
        raise ConfigError("--api-key must not be empty")
