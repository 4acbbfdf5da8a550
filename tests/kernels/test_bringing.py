"""The kernel that copies pages in groups of layers writes what plain copies do, and a group's words after it."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from manylora.kernels.ops import (
    BRING_PROGRAMS,
    MOST_WORDS,
    bring_table,
    table_words,
)
from manylora.kernels.triton.cold import bring_groups

DEVICE = "cpu"


def bring(
    target: torch.Tensor, source: torch.Tensor, groups: list[tuple[int, int]], targets: list[int],
    sources: list[int], words: torch.Tensor, number: int, done: torch.Tensor,
) -> None:  # fmt: skip
    table = bring_table(number, groups, targets, sources)
    assert len(table) == table_words(len(groups), len(targets)) == table[0]
    scratch = torch.zeros((BRING_PROGRAMS, MOST_WORDS), dtype=torch.int64, device=target.device)
    bring_groups(target, source, torch.tensor(table, device=target.device), scratch, words, done)


@given(data=st.data())
def test_pages_in_any_groups(data: st.DataObject) -> None:
    """Each page's parts where they belong, nothing else; a word for each group that has one; counts back at 0."""
    layers, slab = data.draw(st.integers(1, 5)), data.draw(st.sampled_from((1, 3, 700, 2048, 2500)))
    page, num_pages = layers * slab, 6
    edges = sorted({0, layers, *data.draw(st.lists(st.integers(0, layers), max_size=3))})
    ranges = data.draw(st.permutations([(a, b) for a, b in itertools.pairwise(edges) if a < b]))
    chosen = data.draw(st.integers(0, 4))
    targets = data.draw(st.permutations(range(num_pages)))[:chosen]
    sources = data.draw(st.permutations(range(num_pages)))[:chosen]
    source = torch.arange(1, 1 + page * num_pages, device=DEVICE)
    target = torch.full((page * num_pages,), -7, dtype=torch.int64, device=DEVICE)
    words = torch.zeros((layers, 2), dtype=torch.int64, device=DEVICE)
    done = torch.zeros(layers, dtype=torch.int32, device=DEVICE)
    groups = [(a * slab, (b - a) * slab) for a, b in ranges]
    expected = target.clone()
    for to, of in zip(targets, sources, strict=True):
        expected[to * page : (to + 1) * page] = source[of * page : (of + 1) * page]
    bring(
        target, source, groups, [t * page for t in targets], [s * page for s in sources], words[:, 1], 5, done
    )
    assert torch.equal(target, expected)
    assert words.tolist() == [*[[0, 5]] * len(groups), *[[0, 0]] * (layers - len(groups))]
    assert not done.any()
