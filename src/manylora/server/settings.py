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
    ``max_body_bytes``: None for what the model's context and vocabulary need. ``trusts_templates``: whether
    requests may bring chat templates.
    """

    served_model_name: str
    model_root: str
    version: str
    adapter_dir: Path | None = None
    api_keys: tuple[str, ...] = ()
    metrics_open: bool = False
    max_body_bytes: int | None = None
    trusts_templates: bool = False
    connections: ConnectionLimits = dataclasses.field(default_factory=ConnectionLimits)
