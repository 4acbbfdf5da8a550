"""What is known of each served adapter's state. Does not know where it is shown."""

from __future__ import annotations

from collections.abc import Iterable

from manylora.engine.catalog import Catalog
from manylora.engine.client import AdapterLoad
from manylora.reports import AdapterUse
from manylora.types import AdapterId


class AdapterLoads:
    """Every served adapter at the moment of the newest snapshot, kept by what has changed since the one before.

    So with thousands of adapters a snapshot costs the loop what its changes cost. Written by the loop's thread
    alone; any thread may call ``all``, which relies on the GIL: there a dict's values are copied in one piece.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._loads: dict[AdapterId, AdapterLoad] = {}

    def add(self, adapter: AdapterId, num_pages: int) -> None:
        """The policy knows of it from now on; it is absent."""
        self.update((AdapterUse(adapter, "absent", num_pages, 0, 0),))

    def update(self, uses: Iterable[AdapterUse]) -> None:
        """These have changed."""
        for use in uses:
            card = self._catalog.card(use.adapter)
            if card is not None:  # neither the base nor one whose name was given up
                self._loads[use.adapter] = AdapterLoad(
                    name=card.name,
                    rank=card.rank,
                    state=use.state,
                    num_pages=use.num_pages,
                    running=use.running,
                    waiting=use.waiting,
                    host_state=use.host_state,
                    history_pages=use.history_pages,
                )

    def drop(self, adapter: AdapterId) -> None:
        """Its name was given up."""
        self._loads.pop(adapter, None)

    def all(self) -> tuple[AdapterLoad, ...]:
        """The state of every served adapter, in the order in which they were added."""
        return tuple(self._loads.values())
