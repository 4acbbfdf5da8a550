"""Finds adapters in a folder of adapters, in a training run with its checkpoints, or in a cache of the hub.

Does not look inside an adapter.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from manylora.adapters.files import CONFIG_NAME
from manylora.protocol.executor import AdapterError
from manylora.types import adapter_name_fault

_CHECKPOINT = "checkpoint-"
_HUB_MODEL = "models--"

_log = logging.getLogger(__name__)


def discover(folder: Path) -> list[tuple[str, Path]]:
    """Return (name, path) of every adapter in ``folder``, sorted by the names of the folders.

    An adapter is a subfolder that holds a configuration or weights. A subfolder with only one of the two is
    listed as well, since inspection reports the missing file. ``folder`` itself may be an adapter: it is
    listed first, under its own name, which also prefixes the names of its checkpoints. A repository of a hub
    cache ("models--ORG--NAME") is named "ORG/NAME"; its path is the revision in its refs/main, or the only
    revision. ``folder`` may be such a repository, too.

    A folder whose name no adapter may have is skipped with a warning. A warning is also logged where no
    adapter is found at all. Raises AdapterError (404) when ``folder`` is not a folder.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise AdapterError(f"no folder of adapters {folder}", status=404) from error
    own, place = _named(folder)
    is_adapter = _is_meant_as_adapter(place)
    candidates = [(own, place)] if is_adapter else []
    for name, path in (_named(folder / entry) for entry in names):
        if is_adapter and name.startswith(_CHECKPOINT):
            name = f"{own}/{name}"
        if _is_meant_as_adapter(path):
            candidates.append((name, path))
    found = []
    for name, path in candidates:
        if fault := adapter_name_fault(name):
            _log.warning("skipped the folder %r: it cannot name an adapter, for a name %s", str(path), fault)
        else:
            found.append((name, path))
    if not candidates:
        _log.warning(
            "no adapter was found in %s: %s or adapter_model.* was looked for in it, in its subfolders, and in "
            "%s*/snapshots/* of a hub cache",
            folder, CONFIG_NAME, _HUB_MODEL,
        )  # fmt: skip
    return found


def _named(folder: Path) -> tuple[str, Path]:
    """Return the name of the folder's adapter, and the path of its files."""
    name = os.path.basename(os.path.abspath(folder))
    if name.startswith(_HUB_MODEL):
        return name.removeprefix(_HUB_MODEL).replace("--", "/"), _snapshot(folder)
    return name, folder


def _snapshot(repository: Path) -> Path:
    """Return the folder of the revision that is served, or the repository's own folder where no revision can
    be chosen."""
    try:
        revisions = os.listdir(repository / "snapshots")
        main = repository / "refs" / "main"
        chosen = [main.read_text().strip()] if main.is_file() else revisions
    except (OSError, ValueError):
        return repository
    if len(chosen) == 1 and chosen[0] in revisions:
        return repository / "snapshots" / chosen[0]
    _log.warning("skipped %r: its refs/main names none of its snapshots", str(repository))
    return repository


def _is_meant_as_adapter(folder: Path) -> bool:
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(name == CONFIG_NAME or name.startswith("adapter_model.") for name in names)
