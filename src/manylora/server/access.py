"""The access log: one line a request, at its end."""

from __future__ import annotations

import logging

logger = logging.getLogger("manylora.server.access")


def log_request(
    request_id: str, model: str | None, status: int, duration_s: float, method: str, path: str
) -> None:
    """Write the line. A request that could not be read has no method and no path: "-"."""
    logger.info(
        "id=%s model=%r status=%d duration=%.3fs %s %r", request_id, model, status, duration_s, method, path
    )
