"""A matrix of the base model as the operations take it: its numbers, how they are stored, and their version.

Owns the one way to change a weight. Does not know which linear it belongs to, nor why it changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Iterator

import torch


class WeightKind(enum.Enum):
    """How ``Weight.data`` holds the matrix."""

    PLAIN = "plain"
    """The matrix itself, in the dtype of the activations."""


@dataclasses.dataclass(eq=False)
class Weight:
    """``data`` ``[out, in]``, as ``kind`` says; ``version`` counts the rewrites.

    The memory stays the same for the weight's whole life: captured graphs hold its address, and operations read it
    anew at every call. An operation that keeps something derived from the numbers keeps the version beside it.
    """

    data: torch.Tensor
    kind: WeightKind = WeightKind.PLAIN
    version: int = 0

    def rewrite(self, data: torch.Tensor) -> None:
        """Copy these numbers over the weight's, ordered with the device's other work; for the weight's owner.

        Raises ValueError where shape or dtype differ from the weight's, which then stays as it is.
        """
        mine = self.data
        if data.shape != mine.shape or data.dtype != mine.dtype:
            raise ValueError(
                f"a weight of shape {list(mine.shape)} and {mine.dtype} cannot hold "
                f"shape {list(data.shape)} and {data.dtype}"
            )
        with self.rewriting():
            mine.copy_(data)

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[torch.Tensor]:
        """The memory, for its owner to write to; ordered with the device's other work. A new version afterwards,
        whether or not all went well."""
        try:
            yield self.data
        finally:
            self.version += 1
