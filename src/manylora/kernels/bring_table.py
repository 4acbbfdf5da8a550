"""The table by which a kernel copies pages in groups of layers (``triton/bringing``): what it copies from where to
where, and what it writes as each group lands. Owns its layout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

NUM_PROGRAMS = 16
"""More move no more over PCIe (docs/decisions.md), and take more of the device from its steps."""

MOST_WORDS = 1024
"""Of a table: head, groups, pages."""

HEAD, PER_GROUP = 4, 2


def table_words(num_groups: int, num_pages: int) -> int:
    """int64 numbers of a table."""
    return HEAD + PER_GROUP * num_groups + 2 * num_pages


def bring_table(
    number: int, groups: Sequence[tuple[int, int]], targets: Sequence[int], sources: Sequence[int]
) -> list[int]:
    """int64 [``table_words``]: its length, pages, groups, the number to write; for each group where it begins
    within a page, and its length there; for each page where it begins in the target, and for each where in the
    source."""
    head = (table_words(len(groups), len(targets)), len(targets), len(groups), number)
    return [*head, *itertools.chain.from_iterable(groups), *targets, *sources]
