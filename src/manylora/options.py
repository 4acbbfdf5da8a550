"""Settings of the engine as options of a command, added and read back by name."""

from __future__ import annotations

import argparse
from collections.abc import Container, Iterable
from typing import Any

from manylora.aliases import ALIASES, REMOVED_VALUES
from manylora.flags import ALL_FLAGS, Flag, canonical

SIZING = (
    "device", "dtype", "load_format", "max_model_len", "max_num_seqs", "max_batch_tokens", "page_tokens",
    "device_pool", "host_pool",
)  # fmt: skip
"""Settings that say where an engine runs and how large it is: what decides which steps it takes, and how long."""


def add_flag(parser: argparse._ActionsContainer, flag: Flag) -> None:
    """Adds a setting with its aliases.

    Values stay text, and absent ones None, so that a config file and the command line convert alike.
    """
    is_switch = flag.kind == "bool"
    shown = "" if flag.default is None or is_switch else f" (default: {flag.default})"
    options: dict[str, Any] = {"help": flag.help + shown, "default": None, "dest": flag.name}
    if flag.repeats:
        options["action"] = "append"
    if flag.takes_several:
        options |= {"action": "extend", "nargs": "+"}
    if is_switch:
        options["action"] = "store_true"
    elif flag.choices:
        options["choices"] = (*flag.choices, *(value for name, value in REMOVED_VALUES if name == flag.name))
        options["metavar"] = f"{{{','.join(flag.choices)}}}"
    elif flag.metavar:
        options["metavar"] = flag.metavar
    parser.add_argument(flag.option, **options)
    for alias in ALIASES:
        if alias.of == flag.name:
            also = options | {"dest": alias.name, "help": f"{alias.engines}: the same as {alias.same}"}
            if alias.lists_adapters:
                also |= {"action": "extend", "nargs": "+"}
            if alias.switch is not None:
                also = {"dest": alias.name, "help": also["help"], "action": argparse.BooleanOptionalAction}
            parser.add_argument(alias.option, **also)


def add_settings(parser: argparse._ActionsContainer, names: Container[str]) -> None:
    """Adds those of the engine's settings that are named."""
    for flag in ALL_FLAGS:
        if flag.name in names:
            add_flag(parser, flag)


def settings_of(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of these settings that were given, by name. Raises ConfigError where two names of one differ."""
    wanted = set(names)
    wanted |= {alias.name for alias in ALIASES if alias.of in wanted}
    return canonical(
        {name: value for name, value in vars(args).items() if name in wanted and value is not None}
    )
