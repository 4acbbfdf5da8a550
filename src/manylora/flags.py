"""Builds settings from the names that users give them: command-line flags, config-file keys, keyword
arguments of ``LLM``.

Reads the declared settings from the sections of ``manylora.config``, builds these sections from plain values,
and adds the options of commands. Imports nothing heavy, so ``manylora --help`` stays quick.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_origin

from manylora import aliases
from manylora.aliases import ALIASES, CLUSTER_ALIASES, Alias
from manylora.config.cluster import ClusterOptions
from manylora.config.cold_start import ColdStartConfig
from manylora.config.declaring import ConfigError, UserSetting, option_of, parse_size, setting_of
from manylora.config.merging import MergeConfig
from manylora.config.policy import CacheConfig, cache_config
from manylora.config.queueing import QueueConfig
from manylora.config.sections import (
    AdapterSettings,
    CacheSettings,
    EngineSettings,
    HttpSettings,
    ModelSettings,
    SchedulerSettings,
)
from manylora.rules import fields_of

log = logging.getLogger("manylora")

_Section = TypeVar("_Section")


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """A setting, with the section and the field that hold it. ``kind``: str, int, float, bool or size (bytes,
    or text)."""

    name: str
    section: type
    field: str
    about: UserSetting
    kind: str
    default: Any
    """None where the default is nothing at all, or depends on other settings."""
    choices: tuple[str, ...]
    repeats: bool

    @property
    def option(self) -> str:
        return option_of(self.name)

    @property
    def is_http(self) -> bool:
        return self.section is HttpSettings


def _flags(section: type) -> Iterator[Flag]:
    for field in fields_of(section):
        about = setting_of(field)
        if about is None:
            continue
        repeats = get_origin(field.kind) is tuple
        yield Flag(
            name=about.name or field.name,
            section=section,
            field=field.name,
            about=about,
            kind="size" if about.is_size else "str" if repeats else field.kind.__name__,
            default=None if repeats or about.default_follows else field.default,
            choices=next((rule.choices for rule in field.rules if rule.choices), ()),
            repeats=repeats,
        )


_SECTIONS: tuple[type, ...] = (
    ModelSettings, AdapterSettings, SchedulerSettings, QueueConfig, MergeConfig, ColdStartConfig, CacheSettings,
    CacheConfig, EngineSettings, HttpSettings,
)  # fmt: skip

ALL_FLAGS = tuple(flag for section in _SECTIONS for flag in _flags(section))
"""All settings in the order of help texts, with the internal ones that only experiments set."""

FLAGS = tuple(flag for flag in ALL_FLAGS if not flag.about.is_internal)
"""The settings that users set."""

CLUSTER_FLAGS = tuple(_flags(ClusterOptions))
"""The settings of a cluster, which only ``manylora serve`` takes."""

_PAGE_TOKENS = {"static-lru": 32}
"""Page sizes in tokens by cache policy, where the default differs. The FastLibra paper runs its vLLM baseline
with blocks of 32 tokens (§2.2)."""

SIZING = (
    "device", "dtype", "load_format", "max_model_len", "max_num_seqs", "max_batch_tokens", "page_tokens",
    "device_pool", "host_pool",
)  # fmt: skip
"""The settings that give an engine's device and size. They decide which steps it takes, and how long these
last."""

_BY_NAME = {flag.name: flag for flag in ALL_FLAGS}
_INTERNAL = _BY_NAME.keys() - {flag.name for flag in FLAGS}


def canonical(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge layers of settings under our own names, also where they use another engine's names. Later layers win.

    Raises ConfigError where one layer gives a setting different values under different names.
    """
    plain = {name: value for layer in layers for name, value in layer.items() if value is not None}
    aliases.check_removed({name: value for name, value in plain.items() if name not in _INTERNAL})
    bases = {
        str(plain.get("model")),
        *convert(_BY_NAME["served_model_name"], plain.get("served_model_name", ())),
    }
    merged: dict[str, Any] = {}
    switches: list[tuple[Alias, Any]] = []
    for layer in layers:
        own = dict(layer)
        for alias in ALIASES:
            if alias.of is None and (value := own.pop(alias.name, None)) is not None:
                switches.append((alias, value))
            elif alias.lists_adapters and own.get(alias.name) is not None:
                own[alias.name] = aliases.adapter_pairs(alias, own[alias.name], bases)
        merged.update(_under_own_names(own, _BY_NAME, ALIASES))
    for alias, value in switches:
        aliases.check_switch(alias, value, merged)
    for foreign in aliases.FOREIGN:
        if (value := merged.pop(foreign.name, None)) is not None:
            foreign.check(value)
    return merged


def _under_own_names(
    layer: Mapping[str, Any], flags: Mapping[str, Flag], known: Iterable[Alias]
) -> dict[str, Any]:
    """Rename a layer's settings that use aliases. Raises ConfigError where two names of one setting have
    different values."""
    own = dict(layer)
    options = {name: flag.option for name, flag in flags.items()}
    for alias in known:
        if alias.of is None or (value := own.pop(alias.name, None)) is None:
            continue
        flag = flags[alias.of]
        value = convert(flag, alias.translated(value), alias.option)
        if own.get(flag.name) is not None and convert(flag, own[flag.name]) != value:
            raise ConfigError(
                f"{options[flag.name]} and {alias.option} are one setting and were given different values"
            )
        own[flag.name], options[flag.name] = value, alias.option
    return own


def convert(flag: Flag, value: Any, option: str | None = None) -> Any:
    """Convert a value from a file or a keyword to the flag's kind. ``option``: the name that the user wrote,
    where it is an alias. Raises ConfigError."""
    option = option or flag.option
    if value is None:
        return None
    if flag.repeats:
        return _texts(option, value)
    is_number = type(value) in (int, float)
    try:
        match flag.kind:
            case "int" if type(value) is int or isinstance(value, str):
                return int(value)
            case "float":
                return float(value)
            case "bool" if isinstance(value, bool):
                return value
            case "size":
                return parse_size(value)
            case "str" if isinstance(value, str | Path) or (flag.about.takes_numbers and is_number):
                return str(value)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(f"{option} must be {_MUST_BE[flag.kind]}, got {value!r}")


_MUST_BE = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}


def _texts(option: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, Mapping):
        value = [f"{name}={path}" for name, path in value.items()]
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{option} must be text or a list of texts, got {value!r}")
    return tuple(value)


def read_config_file(path: str) -> dict[str, Any]:
    """Read a YAML or JSON file of settings, by flag name (dashes or underscores). Raises ConfigError."""
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
    except ImportError:
        raise
    except Exception as error:  # each parser raises its own errors
        reason = " ".join(str(error).split())
        raise ConfigError(f"the config file {path} is not valid: {reason}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"the config file {path} must hold names and values")
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def build_settings(values: Mapping[str, Any]) -> tuple[EngineSettings, HttpSettings]:
    """Build the frozen sections from values by flag name (or alias), which must include ``model``. Raises
    ConfigError.

    Accepts internal settings of experiments, too; ``check_removed`` has refused these for users before.
    """
    values = canonical(values)
    unknown = sorted(set(values) - set(_BY_NAME) - {"model"})
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}")
    model = values.get("model")
    if not isinstance(model, str | Path) or not str(model):
        raise ConfigError("no model was given: name a local folder or a hub id")
    given = {name: convert(_BY_NAME[name], value) for name, value in values.items() if name in _BY_NAME}
    given = {name: value for name, value in given.items() if value is not None}
    if "adapter" in given:
        given["adapter"] = _adapters(given["adapter"])
    if given.get("cache_policy") in _PAGE_TOKENS:
        given.setdefault("page_tokens", _PAGE_TOKENS[given["cache_policy"]])
    cache_policy = given.get("cache_policy", _BY_NAME["cache_policy"].default)
    policy = cache_config(cache_policy, given.get("cache_set", ()), trace="trace" in given)
    engine = _section(
        EngineSettings,
        given,
        model=_section(ModelSettings, given, model=str(model)),
        cache=_section(CacheSettings, given, policy=policy),
        scheduler=_section(
            SchedulerSettings,
            given,
            queue=_section(QueueConfig, given),
            merge=_section(MergeConfig, given),
            cold_start=_section(ColdStartConfig, given, follows_device="cold_start" not in given),
        ),
        adapters=_section(AdapterSettings, given),
    )
    http = _http(given)
    if {"device_pool", "gpu_memory_utilization"} <= given.keys():
        raise ConfigError("--device-pool and --gpu-memory-utilization both size the pool: give one of them")
    if engine.scheduler.queue.fair_by == "key" and not http.api_keys:
        raise ConfigError("--fair-by key needs API keys: give --api-key")
    folder = engine.adapters.adapter_dir
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--adapter-dir {folder} is not a folder")
    return engine, http


def build_http(values: Mapping[str, Any]) -> HttpSettings:
    """Build the section of the HTTP server from values by flag name. Raises ConfigError."""
    given = {name: convert(_BY_NAME[name], value) for name, value in values.items()}
    return _http({name: value for name, value in given.items() if value is not None})


def _http(given: Mapping[str, Any]) -> HttpSettings:
    """Build the section, with the keys of --api-key-file. Raises ConfigError."""
    keys = given.get("api_key", ())
    if "api_key_file" in given:
        keys = (*keys, *_keys_in(given["api_key_file"]))
    if "uds" in given and {"host", "port"} & given.keys():
        log.warning("--host and --port do nothing beside --uds")
    return _section(HttpSettings, {**given, "api_key": keys})


def _keys_in(path: str) -> list[str]:
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"cannot read --api-key-file {path}: {reason}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key")
    return keys


def key_of_environment(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setting from MANYLORA_API_KEY where no layer gives keys, else nothing. Raises ConfigError
    where it is empty."""
    key = os.environ.get("MANYLORA_API_KEY")
    if key is None or any(layer.get(name) for layer in layers for name in ("api_key", "api_key_file")):
        return {}
    if not key.strip():
        raise ConfigError("MANYLORA_API_KEY must not be empty: unset it to serve without a key")
    return {"api_key": key}


def split_cluster(*layers: Mapping[str, Any]) -> tuple[ClusterOptions | None, list[dict[str, Any]]]:
    """Split the layers into the cluster's settings and the rest of each layer; later layers win. The
    cluster's settings are None where only ``replicas=1``, or nothing, is given. Raises ConfigError."""
    flags = {flag.name: flag for flag in CLUSTER_FLAGS}
    names = flags.keys() | {alias.name for alias in CLUSTER_ALIASES}
    given: dict[str, Any] = {}
    for layer in layers:
        options = {name: value for name, value in layer.items() if name in names and value is not None}
        options = _under_own_names(options, flags, CLUSTER_ALIASES)
        given |= {name: convert(flags[name], value) for name, value in options.items()}
    rest = [{name: value for name, value in layer.items() if name not in names} for layer in layers]
    if set(given) <= {"replicas"} and given.get("replicas", 1) == 1:
        return None, rest
    return ClusterOptions(**{flags[name].field: value for name, value in given.items()}), rest


def _section(section: type[_Section], given: Mapping[str, Any], **parts: Any) -> _Section:
    """Build a section from the given values of its settings and its other parts. A setting without a value
    gets its default."""
    own = (flag for flag in ALL_FLAGS if flag.section is section and flag.name in given)
    return section(**parts, **{flag.field: given[flag.name] for flag in own})


def _adapters(pairs: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    adapters: dict[str, str] = {}
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"--adapter must be NAME=PATH, got {pair!r}")
        if name in adapters:
            raise ConfigError(f"--adapter names {name!r} twice")
        adapters[name] = path
    return tuple(adapters.items())


# ---------------------------------------------------------------- options of a command

_METAVARS = {"int": "N", "float": "S", "size": "SIZE"}


def add_flag(parser: argparse._ActionsContainer, flag: Flag) -> None:
    """Add a setting and its aliases to a parser.

    Values stay text, and absent ones None, so that values of the command line and of a config file convert
    alike.
    """
    is_switch = flag.kind == "bool"
    shown = "" if flag.default is None or is_switch else f" (default: {flag.default})"
    metavar = flag.about.metavar or _METAVARS.get(flag.kind)
    options: dict[str, Any] = {"help": flag.about.help + shown, "default": None, "dest": flag.name}
    if flag.repeats:
        options["action"] = "append"
    if flag.about.takes_several:
        options |= {"action": "extend", "nargs": "+"}
    if is_switch:
        options["action"] = "store_true"
    elif flag.choices:
        removed = (value for name, value in aliases.REMOVED_VALUES if name == flag.name)
        options["choices"] = (*flag.choices, *removed)
        options["metavar"] = f"{{{','.join(flag.choices)}}}"
    elif metavar:
        options["metavar"] = metavar
    parser.add_argument(flag.option, **options)
    for alias in (*ALIASES, *CLUSTER_ALIASES):
        if alias.of == flag.name:
            also = options | {"dest": alias.name, "help": f"{alias.engines}: the same as {alias.same}"}
            if alias.lists_adapters:
                also |= {"action": "extend", "nargs": "+"}
            if alias.switch is not None:
                also = {"dest": alias.name, "help": also["help"], "action": argparse.BooleanOptionalAction}
            parser.add_argument(alias.option, **also)


def add_settings(parser: argparse._ActionsContainer, names: Container[str]) -> None:
    """Add the named settings of the engine to a parser."""
    for flag in ALL_FLAGS:
        if flag.name in names:
            add_flag(parser, flag)


def settings_of(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Collect the named settings that were given. Raises ConfigError where two names of one setting have
    different values."""
    wanted = set(names)
    wanted |= {alias.name for alias in ALIASES if alias.of in wanted}
    return canonical(
        {name: value for name, value in vars(args).items() if name in wanted and value is not None}
    )
