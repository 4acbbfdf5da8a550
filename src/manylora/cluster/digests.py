"""Digests by which two processes tell that they have the same files. Does not know what the files hold."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_CHUNK_BYTES = 1 << 20
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def model_digest(folder: Path) -> str:
    """Of a model's folder: the content of its small files, and names and sizes of its weights."""
    state = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            state.update(f"{path.name} {path.stat().st_size}\0".encode("utf-8", "replace"))
        elif path.suffix in (".json", ".jinja") and path.is_file():
            state.update(
                f"{path.name}\0".encode("utf-8", "replace") + hashlib.sha256(path.read_bytes()).digest()
            )
    return state.hexdigest()


def adapter_digest(folder: Path) -> str:
    """Of what is read of an adapter's folder, whole. "" where that cannot be read."""
    state = hashlib.sha256()
    try:
        for name in ADAPTER_FILES:
            with (folder / name).open("rb") as file:
                state.update(f"{name} {os.fstat(file.fileno()).st_size}\0".encode())
                while chunk := file.read(_CHUNK_BYTES):
                    state.update(chunk)
    except OSError:
        return ""
    return state.hexdigest()
