"""What CPU workers take for adapters' products, measured before serving on pages that no adapter has yet.

Owns the sizes that are tried and the lines that are laid through their times. Gives what the policy is told.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from manylora.assist.orders import Product, ProductPart
from manylora.assist.workers import Workers, WorkersFailed
from manylora.config import MOST_CPU_TOKENS, CpuRates
from manylora.kernels.shapes import AdapterGeometry
from manylora.memory.host import HostPool

READY_S = 10.0
"""How long the workers get to begin."""
RANK = 16
TOKENS = (4, 32, 128)
REPEATS = 3
_SLICE_TIMES = 2.0
"""A core takes so many tokens that their arithmetic takes as long as this many hand-overs and readings."""


def measure_workers(workers: Workers, geometry: AdapterGeometry, host: HostPool) -> CpuRates:
    """Of one core, in the geometry's first group; what is assumed, where the workers do not answer or the host's
    pool has too little room."""
    group = geometry.groups[0]
    cells = RANK * sum(
        geometry.cells(group.in_features) + geometry.cells(p.out_features) for p in group.projections
    )
    elements = cells * geometry.cell_elements
    num_pages = -(-cells // geometry.cells_per_page)
    if num_pages > host.num_pages or not workers.wait_ready(READY_S):
        return CpuRates()
    offsets = _offsets(geometry, cells)
    product = _product(geometry, cells)
    seconds: dict[int, tuple[float, float]] = {}
    try:
        for tokens in TOKENS:
            seconds[tokens] = _time(workers, tokens, product, offsets)
    except WorkersFailed:
        return CpuRates()
    busy = {tokens: pair[0] for tokens, pair in seconds.items()}
    num_bytes = elements * geometry.itemsize
    token_byte_s = max(busy[TOKENS[-1]] - busy[TOKENS[0]], 1e-9) / ((TOKENS[-1] - TOKENS[0]) * num_bytes)
    byte_s = max(busy[TOKENS[0]] / num_bytes - TOKENS[0] * token_byte_s, 0.0)
    handover_s = max(min(whole - alone for alone, whole in seconds.values()), 0.0)
    num_jobs = sum(len(groups) for groups in geometry.layers)
    fixed_tokens = (byte_s * num_bytes + handover_s) / (token_byte_s * num_bytes)
    slice_tokens = int(min(max(_SLICE_TIMES * fixed_tokens, 1), MOST_CPU_TOKENS))
    workers.slice_tokens = slice_tokens
    return CpuRates(num_jobs * handover_s, byte_s, token_byte_s, slice_tokens)


def _time(workers: Workers, tokens: int, product: Product, offsets: np.ndarray) -> tuple[float, float]:
    """Seconds of one job that one worker computes alone, and until its results are taken: medians."""
    busy, whole = [], []
    workers.slice_tokens = tokens
    for _ in range(REPEATS + 1):
        step = workers.begin([tokens], [(0, 0)], [product], [offsets])
        if step is None:
            raise WorkersFailed("no CPU worker is free")
        began = time.perf_counter()
        step.rows(tokens, product.in_features)[:] = 0
        step.post()
        step.take(tokens, product.width)
        whole.append(time.perf_counter() - began)
        busy.append(step.busy_s())
        step.end()
    # The first one warms caches.
    return statistics.median(busy[1:]), statistics.median(whole[1:])


def _offsets(geometry: AdapterGeometry, cells: int) -> np.ndarray:
    page, cell = np.divmod(np.arange(cells, dtype=np.int64), geometry.cells_per_page)
    return np.asarray(page * geometry.page_elements + cell * geometry.cell_elements)


def _product(geometry: AdapterGeometry, cells: int) -> Product:
    """The first group's, of an adapter whose rows lie one after the other."""
    group = geometry.groups[0]
    parts, first = [], 0
    for place, projection in enumerate(group.projections):
        of_a = RANK * geometry.cells(group.in_features)
        of_b = RANK * geometry.cells(projection.out_features)
        records = [(first, first + of_a, RANK)]
        scales = [[1.0] * geometry.page.layers]
        parts.append(ProductPart(group.offsets[place], projection.out_features, records, scales))
        first += of_a + of_b
    assert first == cells
    return Product(group.in_features, group.offsets[-1], parts)
