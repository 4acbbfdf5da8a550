"""The operator's settings of the HTTP server."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from manylora.server.connection import ConnectionLimits


@dataclasses.dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings of one server. ``served_model_name``: the base's id in answers; ``other_names``: further
    ids that clients may use for it; ``model_root``: the model as the operator named it.

    ``adapter_dir`` is the only folder that runtime loads may read; without it runtime loading is off. Without
    ``api_keys`` everyone may use /v1/* and /metrics. ``metrics_open``: everyone may use /metrics also with
    keys. ``max_body_bytes``: None: as the model's context and vocabulary need. ``trusts_templates``: whether
    requests may contain chat templates. ``root_path``: the path at which a proxy serves the app, without a
    slash at its end. ``allowed_hosts``: patterns of the host names that clients may use.
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
        """Return whether a request to the path needs one of the keys. /v1/* and /cluster need one, and
        /metrics, which names every adapter, unless ``metrics_open``."""
        if not self.api_keys:
            return False
        if path == "/metrics":
            return not self.metrics_open
        return path in ("/v1", "/cluster") or path.startswith("/v1/")

    @property
    def names(self) -> tuple[str, ...]:
        """The ids of the base, its id in answers first."""
        return (self.served_model_name, *self.other_names)
