"""Where adapters come from: folders under a root, and which names and paths are allowed.

Does not look inside an adapter.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from manylora.adapters.peft import CONFIG_NAME
from manylora.protocol import AdapterError

LONGEST_NAME = 200

_log = logging.getLogger(__name__)


def valid_name(name: str) -> bool:
    """Whether an adapter may be called this: printable, no '/', at most LONGEST_NAME characters."""
    return 0 < len(name) <= LONGEST_NAME and name.isprintable() and name == name.strip() and "/" not in name


def discover(folder: Path) -> list[tuple[str, Path]]:
    """(name, path) of every subfolder that holds an adapter's configuration or weights, by name.

    One without the other is listed as well: inspecting it says what is missing. A subfolder whose name
    cannot be an adapter's is skipped with a warning. Raises AdapterError (404) when ``folder`` is not a
    folder.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise AdapterError(f"no folder of adapters {folder}", status=404) from error
    found = []
    for name in names:
        path = folder / name
        if not _is_meant_as_adapter(path):
            continue
        if valid_name(name):
            found.append((name, path))
        else:
            _log.warning("skipped the adapter folder %r: its name cannot name an adapter", str(path))
    return found


def _is_meant_as_adapter(folder: Path) -> bool:
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(name == CONFIG_NAME or name.startswith("adapter_model.") for name in names)


def permitted(path: str, root: Path) -> Path:
    """The folder that ``path`` names, links resolved; a relative path is taken from ``root``.

    Raises AdapterError: 403 outside the root, whether or not anything is there; 404 where no folder is.
    """
    try:
        base = root.resolve()
        resolved = (base / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise AdapterError(f"no adapter folder {path!r}", status=404) from error
    if not resolved.is_relative_to(base):
        raise AdapterError(f"{path!r} is outside the folder that adapters may come from", status=403)
    try:
        is_folder = resolved.is_dir()
    except OSError:
        is_folder = False
    if not is_folder:
        raise AdapterError(f"no adapter folder {path!r}", status=404)
    return resolved
