"""Journals of a cluster's processes, replayed, those of killed ones too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manylora_lab.sim.conformance import replay_difference

from manylora.engine.journal import REPLICA, ROUTER, JournalForm, fingerprint
from manylora.policy.replica import Replica
from manylora.router.router import Router


def replay_all(folder: Path) -> dict[Path, int]:
    """Replay every ``journal.*`` in the folder; how many events each has. Fails where one commands otherwise."""
    found = {}
    for path in sorted(folder.glob("journal.*")):
        _cut_half_a_line(path)
        if not path.stat().st_size:
            continue  # killed as it opened the file
        is_router = path.name.split(".")[1] == "router"
        form: JournalForm[Any, Any] = ROUTER if is_router else REPLICA
        machine: Any = Router if is_router else Replica
        config, answered = form.read_answered(path)
        entries = list(answered)
        assert replay_difference(config, entries, fingerprint, machine) is None, path
        found[path] = len(entries)
    return found


def _cut_half_a_line(path: Path) -> None:
    """A process that is killed may be about to write."""
    data = path.read_bytes()
    path.write_bytes(data[: data.rfind(b"\n") + 1])
