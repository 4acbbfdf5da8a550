"""The LoRA operators that Punica compares SGMV with (§7.1), in plain torch: Loop, Gather, BMM, Gather-BMM.

Every operator adds x[i] A_m B_m to y[i], with m the model of input i; inputs of one model are adjacent. Weights
are dense here, ``a [n, h1, rank]`` and ``b [n, rank, h2]``; SGMV (the engine's kernels) reads them from pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def loop(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, counts: Sequence[int]) -> None:
    """One model after the other: two products each. Copies no weights."""
    start = 0
    for model, count in enumerate(counts):
        rows = slice(start, start + count)
        y[rows].addmm_(x[rows] @ a[model], b[model])
        start += count


def gather(a: torch.Tensor, b: torch.Tensor, models: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each input's own copy of its model's matrices. ``models`` int64: of each input."""
    return a.index_select(0, models), b.index_select(0, models)


def bmm(y: torch.Tensor, x: torch.Tensor, a_of_each: torch.Tensor, b_of_each: torch.Tensor) -> None:
    """Batched products with what ``gather`` gave; their cost does not depend on which rows share a model."""
    y += torch.bmm(torch.bmm(x[:, None], a_of_each), b_of_each)[:, 0]


def gather_bmm(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, models: torch.Tensor
) -> None:
    """Both, one after the other: two copies, two batched products."""
    bmm(y, x, *gather(a, b, models))


def weight_elements(operator: str, counts: Sequence[int], rows: int) -> int:
    """Elements of weights that an operator moves at least, reads and writes; ``rows``: rank * (h1 + h2), one
    model's. Of Gather-BMM the paper says 2 * inputs * h_i * h_o more than SGMV (§7.1)."""
    models, inputs = len(counts), sum(counts)
    moved = {"sgmv": models, "loop": models, "gather": models + inputs, "bmm": inputs}
    moved["gather-bmm"] = moved["gather"] + moved["bmm"]
    return moved[operator] * rows
