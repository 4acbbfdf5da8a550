"""The cell table: ranges never overlap, and an adapter's entry is what its layout and pages say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.adapters.pack import AdapterLayout
from manylora.devices.device import Device
from manylora.executor.tables import AdapterTables, RangeAllocator
from manylora.kernels.shapes import PageShape, Projection, ProjectionGroup, adapter_geometry
from manylora.types import BASE

NUM_LAYERS = 3
PAGE = PageShape(layers=NUM_LAYERS, page_tokens=4, kv_heads=1, head_dim=8, itemsize=4)
PAIR = ProjectionGroup("pair", (Projection("p", 40, 24), Projection("q", 40, 8)))
GEOMETRY = adapter_geometry(PAGE, ((PAIR,),) * NUM_LAYERS)


def first_fit(used: set[int], capacity: int, length: int) -> int | None:
    for start in range(capacity - length + 1):
        if not any(place in used for place in range(start, start + length)):
            return start
    return None


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "grow"]), st.integers(1, 9)), max_size=60))
def test_ranges_against_a_set_of_places(operations: list[tuple[str, int]]) -> None:
    ranges = RangeAllocator(12)
    taken: list[tuple[int, int]] = []
    used: set[int] = set()
    for operation, number in operations:
        if operation == "take":
            start = ranges.take(number)
            assert start == first_fit(used, ranges.capacity, number)
            if start is not None:
                taken.append((start, number))
                used.update(range(start, start + number))
        elif operation == "give" and taken:
            start, length = taken.pop(number % len(taken))
            ranges.give(start, length)
            used.difference_update(range(start, start + length))
        elif operation == "grow" and ranges.capacity < 60:
            ranges.grow(ranges.capacity + number)
    for start, length in taken:
        ranges.give(start, length)
    assert ranges.take(ranges.capacity) == 0, "what was given back is one range again"


def layout(num_cells: int, seed: int) -> AdapterLayout:
    """Two projections, the second not adapted for odd seeds."""
    random = np.random.default_rng(seed)
    records = np.array([[0, num_cells // 2, 3], [num_cells - 2, num_cells - 1, 1]], dtype=np.int64)
    if seed % 2:
        records[1] = 0
    return AdapterLayout(num_cells, 1, records, random.random((2, NUM_LAYERS), dtype=np.float32))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6), st.integers(4, 3000)), min_size=1, max_size=40))
def test_entries_survive_their_neighbours(operations: list[tuple[bool, int, int]]) -> None:
    tables = AdapterTables(Device(), GEOMETRY)
    held: dict[int, tuple[AdapterLayout, np.ndarray]] = {}
    for step, (is_put, adapter, num_cells) in enumerate(operations):
        version = tables.version
        if is_put:
            entry = layout(num_cells, step), np.random.default_rng(step).integers(0, 2**50, num_cells)
            tables.put(adapter, *entry)
            held[adapter] = entry
            assert tables.version > version
        else:
            tables.drop(adapter)
            assert (tables.version > version) == (held.pop(adapter, None) is not None)
        if step % 3 == 0:
            tables.send()
    check_entries(tables, held)


def check_entries(tables: AdapterTables, held: dict[int, tuple[AdapterLayout, np.ndarray]]) -> None:
    """Each is what its layout and its cells say."""
    tables.send()
    adapters = sorted(held)
    assert all(adapter in tables for adapter in adapters)
    records, scales = tables.entries(tables.rows(adapters))
    for index, adapter in enumerate(adapters):
        expected, offsets = held[adapter]
        assert (scales[index] == expected.scales).all()
        base = int(records[index, 0, 0])
        assert (tables.cells[base : base + len(offsets)].numpy() == offsets).all()
        shifted = expected.records + np.array([base, base, 0])
        assert (records[index] == np.where(expected.records[:, 2:3] > 0, shifted, 0)).all()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(4, 2500)), min_size=1, max_size=40)
)
def test_a_fixed_table_stays_where_it_is(operations: list[tuple[int, int, int]]) -> None:
    """And has room for all that it was made for, however entries come and go; what is more is refused."""
    tables = AdapterTables(Device(), GEOMETRY)
    tables.fix(room := 6000)
    cells = tables.cells
    held: dict[int, tuple[AdapterLayout, np.ndarray]] = {}
    for step, (is_put, adapter, num_cells) in enumerate(operations):
        held.pop(adapter, None)
        if not is_put:
            tables.drop(adapter)
            continue
        entry = layout(num_cells, step), np.random.default_rng(step).integers(0, 2**50, num_cells)
        if sum(len(offsets) for _, offsets in held.values()) + num_cells > room:
            with pytest.raises(RuntimeError, match="no room"):
                tables.put(adapter, *entry)
            assert adapter not in tables
        else:
            tables.put(adapter, *entry)
            held[adapter] = entry
        assert tables.cells is cells
        if step % 3 == 0:
            check_entries(tables, held)
    check_entries(tables, held)


def test_what_is_merged_changes_the_version_and_ends_with_its_adapter() -> None:
    tables = AdapterTables(Device(), GEOMETRY)
    tables.put(1, layout(8, 1), np.arange(8))
    seen = [tables.version]
    for merged in (1, 1, BASE, 1):
        tables.merge(merged)
        seen.append(tables.version)
    assert len(set(seen)) == 4
    tables.drop(1)
    assert tables.merged == BASE
