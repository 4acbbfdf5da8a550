"""The operator's settings of the HTTP server."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from manylora.server.connection import ConnectionLimits


@dataclasses.dataclass(frozen=True, slots=True)
class ServerSettings:
    """``served_model_name`` is the base's id in answers, ``other_names`` are others that clients may give it, and
    ``model_root`` is where it came from.

    ``adapter_dir`` is the only folder that runtime loads may read; without it runtime loading is off.
    Without ``api_keys`` everyone may use /v1/* and /metrics; ``metrics_open``: with them, too, /metrics.
    ``max_body_bytes``: None for what the model's context and vocabulary need. ``trusts_templates``: whether
    requests may bring chat templates. ``root_path``: where a proxy serves the app, without a slash at its end.
    ``allowed_hosts``: patterns of the names that clients may call it by.
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
    other_names: tuple[str, ...] = ()
    root_path: str = ""
    allowed_hosts: tuple[str, ...] = ("*",)

    def asks_key(self, path: str) -> bool:
        """Whether a request to the path needs one of the keys: /v1/*, /cluster, and /metrics, which names every
        adapter, unless ``metrics_open``."""
        if not self.api_keys:
            return False
        if path == "/metrics":
            return not self.metrics_open
        return path in ("/v1", "/cluster") or path.startswith("/v1/")

    @property
    def names(self) -> tuple[str, ...]:
        """The ids of the base."""
        return (self.served_model_name, *self.other_names)
