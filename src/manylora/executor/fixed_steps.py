"""From limits to steps at fixed sizes, captured where the device can: room in the tables first, then the captures.

Of one rank, which may capture more while it serves, or of several, which may not.
"""

from __future__ import annotations

import functools
import logging

from manylora.devices.peers import Peers
from manylora.executor.forward import Forward
from manylora.executor.graphs import GraphLimits, Progress, Rehearse, StepGraphs
from manylora.executor.ranked_graphs import RankedGraphs
from manylora.executor.tables import AdapterTables
from manylora.memory.gates import LandedWords

_log = logging.getLogger(__name__)

_MOST_CELLS = 2**22
"""Cells that the table has room for from the start where it may still grow: 32 MiB."""


def steps_of_fixed_sizes(
    forward: Forward,
    tables: AdapterTables,
    limits: GraphLimits,
    scratch_page: int,
    words: LandedWords | None,
    *,
    progress: Progress | None = None,
    rehearse: Rehearse | None = None,
    peers: Peers | None = None,
) -> StepGraphs | None:
    """See ``Worker.use_graphs``. None, with a warning, where the operations offer none. Raises CapturingFailed."""
    arena, geometry, device = forward.arena, forward.geometry, forward.device
    kind = StepGraphs if peers is None else functools.partial(RankedGraphs, peers=peers)
    try:
        graphs = kind(forward, tables, geometry, device, limits, scratch_page, words)
    except ValueError as error:
        _log.warning("decoding steps run eagerly: %s", error)
        return None
    num_cells = arena.num_pages * geometry.cells_per_page
    if peers is not None:
        tables.fix(num_cells)
    elif device.captures:
        # A table that moves must be captured again: make room for all that the pool can hold, within reason.
        tables.reserve(min(num_cells, _MOST_CELLS))
    else:
        return graphs
    if rehearse is not None:
        decoder = forward.decoder.rehearsal()
        rehearse(*graphs.rehearsals(Forward(decoder, arena, geometry, device, forward.ranked)))
    graphs.capture_all(progress)
    return graphs
