"""The inputs that operations share."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from manylora.kernels.ops import LoraSegments


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=6), st.data())
def test_segments_of_some_tokens(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    """Runs of (tokens without an adapter, tokens of the next adapter): each chosen token keeps its own."""
    adapter_of, start, length = [], [], []
    for number, (gap, count) in enumerate(runs):
        adapter_of += [-1] * gap + [number] * count
        start.append(len(adapter_of) - count)
        length.append(count)
    adapter_of += [-1]
    records = np.arange(len(runs) * 3, dtype=np.int64).reshape(-1, 1, 3)
    scales = np.arange(len(runs), dtype=np.float32).reshape(-1, 1, 1)
    segments = LoraSegments(
        np.array(start, np.int32), np.array(length, np.int32), records, scales, torch.zeros(1)
    )
    places = st.lists(st.integers(0, len(adapter_of) - 1), unique=True, min_size=1)
    tokens = np.array(sorted(data.draw(places)))
    found = segments.of_tokens(tokens)
    got = [-1] * len(tokens)
    if found is not None:
        assert found.start.dtype == found.length.dtype == np.int32
        for place, count, record, scale in zip(found.start, found.length, found.records, found.scales):
            assert np.array_equal(record, records[int(scale[0, 0])])
            for token in range(place, place + count):
                assert got[token] == -1
                got[token] = int(scale[0, 0])
    assert got == [adapter_of[token] for token in tokens]
