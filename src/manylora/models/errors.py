"""What the room raises about a model folder."""

from __future__ import annotations


class ModelError(ValueError):
    """A model folder that cannot be served; the message is one line meant for the operator."""
