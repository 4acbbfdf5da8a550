"""The second half of a LoRA product, by torch's own operations, of rows whose first half was computed elsewhere.

Owns how an adapter's B comes out of the device's pool as a matrix. For steps that run eagerly; a batch's own
adapters go through ``Ops``.
"""

from __future__ import annotations

import torch

from manylora.kernels.ops import of_adapters
from manylora.kernels.shapes import AdapterGeometry


def pieces_of(
    cells: torch.Tensor, first: int, rank: int, elements: int, geometry: AdapterGeometry
) -> torch.Tensor:
    """int64 ``[rank * pieces of a row]``: the pool's pieces of ``geometry.alignment`` elements in which layer 0 of
    a matrix ``[rank, elements]`` lies. Its cells begin at ``first`` of the table ``cells`` (see LoraSegments)."""
    piece = geometry.alignment
    begins = cells[first : first + rank * geometry.cells(elements)].div(piece, rounding_mode="floor")
    within = torch.arange(geometry.cell_elements // piece, device=cells.device)
    return (begins[:, None] + within).view(-1)


def matrix(
    pool: torch.Tensor,
    dtype: torch.dtype,
    pieces: torch.Tensor,
    layer: int,
    rank: int,
    elements: int,
    geometry: AdapterGeometry,
) -> torch.Tensor:
    """float32 ``[rank, elements]``: the matrix in that layer, of an adapter of this dtype."""
    piece = geometry.alignment
    lying = of_adapters(pool, dtype).view(-1, piece)[layer * geometry.slab_elements // piece :]
    return lying.index_select(0, pieces).view(rank, -1)[:, :elements].float()
