"""What the operator decides about the HTTP server."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class ServerSettings:
    """``served_model_name`` is the base's id for clients, ``model_root`` where it came from.

    ``adapter_dir`` is the only folder that runtime loads may read; without it runtime loading is off.
    Without ``api_keys`` everyone may use /v1/*.
    """

    served_model_name: str
    model_root: str
    version: str
    adapter_dir: Path | None = None
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20
