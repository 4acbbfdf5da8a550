"""The table by which a kernel copies pages in groups of layers (``triton/bringing``): what it copies from where to
where, and what it writes as each group lands. Owns its layout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

NUM_PROGRAMS = 16
"""More move no more over PCIe (docs/decisions.md), and take more of the device from its steps."""

MOST_WORDS = 1024
"""Of a table: head, groups, pages."""

HEAD, PER_GROUP = 4, 4


class BroughtGroup(NamedTuple):
    """Where it begins within a page, its length there, and which words say that it has landed."""

    first: int
    length: int
    first_word: int
    num_words: int


def table_words(num_groups: int, num_pages: int) -> int:
    """int64 numbers of a table."""
    return HEAD + PER_GROUP * num_groups + 2 * num_pages


def bring_table(
    number: int, groups: Sequence[BroughtGroup], targets: Sequence[int], sources: Sequence[int]
) -> list[int]:
    """int64 [``table_words``]: its length, pages, groups, the number to write; the groups; for each page where it
    begins in the target, and for each where in the source."""
    head = (table_words(len(groups), len(targets)), len(targets), len(groups), number)
    return [*head, *itertools.chain.from_iterable(groups), *targets, *sources]
