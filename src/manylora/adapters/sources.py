"""Where adapters come from: folders under a root.

Does not look inside an adapter.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from manylora.adapters.peft import CONFIG_NAME
from manylora.protocol import AdapterError
from manylora.types import adapter_name_fault

_log = logging.getLogger(__name__)


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
        if fault := adapter_name_fault(name):
            _log.warning("skipped the folder %r: it cannot name an adapter, for a name %s", str(path), fault)
        else:
            found.append((name, path))
    return found


def _is_meant_as_adapter(folder: Path) -> bool:
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(name == CONFIG_NAME or name.startswith("adapter_model.") for name in names)
