"""Finds the folder of a model that the operator named: a local directory, else one from the Hugging Face Hub.

Downloads only the files that serving reads (safetensors, JSON, tokenizer files), never a pickle file or code.
"""

from __future__ import annotations

import re
from pathlib import Path

from manylora.models.spec import ModelError
from manylora.types import first_line

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w-][\w.-]*")
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_UNWANTED = ("original/*", "consolidated*", "onnx/*", "*/*.safetensors")


def resolve_model(model: str) -> Path:
    """Return the folder of a model given by path or hub id, downloading a hub model unless it is cached.

    Raises ModelError when there is no such folder and no download is possible. The message says what to do.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if path.is_file():
        raise ModelError(f"{model}: is a file; name the folder that holds config.json")
    if not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise ModelError(f"{model}: no such directory")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            f"{model}: no such directory, and downloading it from the hub needs huggingface_hub: "
            "pip install 'manylora[hub]'"
        ) from error
    try:
        folder = snapshot_download(model, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED))
    except Exception as error:
        # The hub client lets errors of its HTTP package through, so any type is possible. They span several
        # paragraphs; the first line says what happened.
        reason = first_line(error)
        raise ModelError(
            f"{model}: no such directory, and the hub download failed ({reason}); check the name, the "
            "network and HF_TOKEN, or download the model elsewhere and give its folder"
        ) from error
    return Path(folder)
