"""Plans at fixed addresses and sizes, which a captured step is given once and which are filled before each replay.

Owns the choice between what operations offer of that kind and, where they offer none (nothing of theirs is
captured then), plans made anew each time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

from manylora.kernels.ops import AttentionRows, LoraSegments, Ops
from manylora.kernels.shapes import AdapterGeometry, PageShape


class FixedAttention(Protocol):
    """``plan``: for ``Ops.attention``; under capture its launches depend on the sizes it was made for alone."""

    @property
    def plan(self) -> Any: ...

    def fill(self, rows: AttentionRows) -> None:
        """Point the plan at these rows, at most as many as it was made for, before the next replay.

        Does not wait for the device; steps in flight are not disturbed. Tokens past the rows' get zeros.
        Raises ValueError where the rows do not fit.
        """


class FixedLora(Protocol):
    """``plan``: for ``Ops.lora_summands``; under capture its launches depend on its sizes alone."""

    @property
    def plan(self) -> Any: ...

    def fill(self, segments: LoraSegments | None, num_tokens: int) -> None:
        """Point the plan at the segments of a batch of so many tokens; None: no token has an adapter.

        Otherwise this is ``FixedAttention.fill``. The segments' cells are the table that the plan was made for.
        """


@runtime_checkable
class _FixesAttention(Protocol):
    def fixed_attention(
        self,
        num_rows: int,
        max_context: int,
        page: PageShape,
        device: torch.device,
        num_tokens: int | None = None,
    ) -> FixedAttention: ...


@runtime_checkable
class _FixesLora(Protocol):
    def fixed_lora(
        self,
        num_tokens: int,
        max_rank: int,
        geometry: AdapterGeometry,
        cells: torch.Tensor,
        device: torch.device,
        num_rows: int,
    ) -> FixedLora: ...


def has_fixed_plans(ops: Ops) -> bool:
    """Whether steps of these operations can be captured."""
    return isinstance(ops, _FixesAttention)


def fixed_attention(
    ops: Ops, num_tokens: int, num_rows: int, max_context: int, page: PageShape, device: torch.device
) -> FixedAttention:
    """A plan for up to ``num_tokens`` tokens in ``num_rows`` rows, of one token each if the two are equal, and for
    contexts of at most ``max_context`` tokens."""
    if isinstance(ops, _FixesAttention):
        of_any_length = None if num_tokens == num_rows else num_tokens
        return ops.fixed_attention(num_rows, max_context, page, device, of_any_length)
    return _MadeAnew(lambda rows: ops.plan_attention(rows, page, device))


def fixed_lora(
    ops: Ops,
    num_tokens: int,
    num_rows: int,
    max_rank: int,
    geometry: AdapterGeometry,
    cells: torch.Tensor,
    device: torch.device,
) -> FixedLora:
    """A plan for up to ``num_tokens`` tokens in ``num_rows`` rows, of one token each if the two are equal, and
    ranks up to ``max_rank``."""
    if isinstance(ops, _FixesLora):
        return ops.fixed_lora(num_tokens, max_rank, geometry, cells, device, num_rows)

    def plan(segments: LoraSegments | None, num_tokens: int) -> Any | None:
        return None if segments is None else ops.plan_lora(segments, geometry, device)

    return _MadeAnew(plan)


@dataclasses.dataclass
class _MadeAnew:
    make: Callable[..., Any]
    plan: Any = None

    def fill(self, *described: Any) -> None:
        self.plan = self.make(*described)
