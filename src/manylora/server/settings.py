"""What the operator decides about the HTTP server."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from manylora.server.connection import ConnectionLimits


@dataclasses.dataclass(frozen=True, slots=True)
class ServerSettings:
    """``served_model_name`` is the base's id for clients, ``model_root`` where it came from.

    ``adapter_dir`` is the only folder that runtime loads may read; without it runtime loading is off.
    Without ``api_keys`` everyone may use /v1/* and /metrics; ``metrics_open``: with them, too, /metrics.
    ``max_body_bytes``: None for what the model's context and vocabulary need. ``allowed_hosts``: patterns of the
    names that clients may call it by.
    """

    served_model_name: str
    model_root: str
    version: str
    adapter_dir: Path | None = None
    api_keys: tuple[str, ...] = ()
    metrics_open: bool = False
    max_body_bytes: int | None = None
    connections: ConnectionLimits = dataclasses.field(default_factory=ConnectionLimits)
    allowed_hosts: tuple[str, ...] = ("*",)
