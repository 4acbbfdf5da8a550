"""The record of a copy in flight, node by node."""

from __future__ import annotations

import dataclasses

from manylora.policy.tree import Node
from manylora.types import PageId


@dataclasses.dataclass(eq=False, slots=True)
class Move:
    """One node's part of a copy. It owns what its node has let go of meanwhile, until the copy has ended."""

    node: Node
    to_device: bool
    pages: tuple[PageId, ...]
    host_pages: tuple[PageId, ...]
    owns_pages: bool = False
    owns_host_pages: bool = False
