"""What the laboratory adds to the command line; ``pyproject.toml`` has the same as entry points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manylora_lab.bench import command as bench
from manylora_lab.bench import profile_command as profile
from manylora_lab.reproduce import parser as reproduce
from manylora_lab.workloads import command as workload

COMMANDS: dict[str, Callable[[Any], None]] = {
    "bench": bench.add_parser,
    "profile": profile.add_parser,
    "reproduce": reproduce.add_parser,
    "workload": workload.add_parser,
}
