"""What CPU workers take for adapters' products, measured before serving on pages that no adapter has yet.

Owns the sizes that are tried and the line that is laid through their times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from manylora.assist.orders import Product, ProductPart
from manylora.assist.workers import Workers, WorkersFailed
from manylora.config import MOST_CPU_TOKENS
from manylora.config.cold_start import SLICE_SHARE
from manylora.executor.cold_rows import as_numbers
from manylora.kernels.shapes import AdapterGeometry
from manylora.memory.host import HostPool

READY_S = 10.0
"""How long the workers get to begin."""
RANK = 16
TOKENS = (4, 32, 128)
REPEATS = 3
_CPU = torch.device("cpu")


def tune_workers(
    workers: Workers, geometry: AdapterGeometry, host: HostPool, device: torch.device
) -> None:
    """Set how many tokens one takes, by the geometry's first group. Leave it where the workers do not answer or
    the host's pool has too little room."""
    timed = TimedProduct(geometry, RANK, device)
    if timed.num_pages > host.num_pages or not workers.wait_ready(READY_S):
        return
    before = workers.slice_tokens
    try:
        # The least: at a start much else goes on, and one hand-over stands for those of all products.
        seconds = {tokens: timed.seconds(workers, tokens, of=min) for tokens in TOKENS}
    except WorkersFailed:
        workers.slice_tokens = before
        return
    fewest, most = TOKENS[0], TOKENS[-1]
    token_s = max(seconds[most][0] - seconds[fewest][0], 1e-9) / (most - fewest)
    read_s = max(seconds[fewest][0] - fewest * token_s, 0.0)
    handover_s = min(max(whole_s - busy_s, 0.0) for busy_s, whole_s in seconds.values())
    workers.slice_tokens = int(min(max(SLICE_SHARE * (read_s + handover_s) / token_s, 1), MOST_CPU_TOKENS))


class TimedProduct:
    """The first group's product of an adapter of ``rank`` whose rows lie one after the other in pages that hold
    nothing, for rows of ``device``. ``num_bytes``: of the adapter's rows in one layer; ``width``: of a token's
    inputs and results."""

    def __init__(self, geometry: AdapterGeometry, rank: int, device: torch.device = _CPU) -> None:
        group = geometry.groups[0]
        parts, first = [], 0
        for place, projection in enumerate(group.projections):
            of_a = rank * geometry.cells(group.in_features)
            of_b = rank * geometry.cells(projection.out_features)
            records = [(first, first + of_a, rank)]
            scales = [[1.0] * geometry.page.layers]
            parts.append(ProductPart(group.offsets[place], projection.out_features, records, scales))
            first += of_a + of_b
        self.num_pages = -(-first // geometry.cells_per_page)
        self.num_bytes = first * geometry.cell_elements * geometry.itemsize
        self.width = group.in_features + group.offsets[-1]
        self._device = device
        self._dtype = torch.float32 if geometry.itemsize == 4 else torch.bfloat16
        self.product = Product(group.in_features, group.offsets[-1], parts)
        page, cell = np.divmod(np.arange(first, dtype=np.int64), geometry.cells_per_page)
        self.offsets = np.asarray(page * geometry.page_elements + cell * geometry.cell_elements)

    def seconds(
        self,
        workers: Workers,
        tokens: int,
        num_busy: int = 1,
        of: Callable[[list[float]], float] = statistics.median,
    ) -> tuple[float, float]:
        """Of one job that so many workers share: of the busiest one, and until its results are on the device;
        each ``of`` some tries. Raises WorkersFailed."""
        busy, whole = [], []
        product = self.product
        workers.slice_tokens = -(-tokens // num_busy)
        x = torch.zeros(tokens, product.in_features, dtype=self._dtype, device=self._device)
        y = torch.zeros(tokens, product.width, dtype=self._dtype, device=self._device)
        rows = torch.arange(tokens, device=self._device)
        for _ in range(REPEATS + 1):
            step = workers.begin([tokens], [(0, 0)], [product], [self.offsets])
            if step is None:
                raise WorkersFailed("no CPU worker is free")
            began = time.perf_counter()
            # As ColdRows does it.
            step.rows(tokens, product.in_features)[:] = as_numbers(x.index_select(0, rows).cpu())
            step.post()
            found = step.take(tokens, product.width)
            y.index_add_(0, rows, torch.from_numpy(found.copy()).to(y.device, y.dtype))
            whole.append(time.perf_counter() - began)
            busy.append(step.busy_s())
            step.end()
        # The first one warms caches.
        return of(busy[1:]), of(whole[1:])
