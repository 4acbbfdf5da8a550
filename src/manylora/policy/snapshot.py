"""What a replica's gauges are."""

from __future__ import annotations

import dataclasses

from manylora.types import AdapterId


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterUse:
    """One adapter at this moment; requests count once per sequence."""

    adapter: AdapterId
    state: str
    num_pages: int
    running: int
    waiting: int
    host_state: str = "none"
    history_pages: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The replica's gauges; device pages by use add up to ``pages_total``. ``adapters`` includes the base (0).

    ``pages_loading`` and ``pages_saving``: of these, how many are in flight. ``invalid_pages``: history on the
    device whose adapter is not there.
    """

    num_running: int
    num_waiting: int
    pages_total: int
    pages_free: int
    pages_running: int
    pages_history: int
    pages_adapters: int
    pages_loading: int
    pages_saving: int
    invalid_pages: int
    host_pages_total: int
    host_pages_free: int
    host_pages_history: int
    host_pages_adapters: int
    adapters: tuple[AdapterUse, ...]
