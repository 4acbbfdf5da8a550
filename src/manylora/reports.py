"""What a replica reports of itself: its gauges at one moment, and its counts since it began.

Records only. Does not know how they are read, nor where they are shown.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from manylora.types import BASE, AdapterId

Which = Literal["all", "changed"]
"""Which adapters a snapshot lists beside the base: all, or those that may have changed since the last snapshot of
this kind. Of an adapter that was never listed nothing has changed since it was added: it is absent."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterUse:
    """One adapter at this moment (true residency, not activity); requests count once per sequence.

    ``state`` on the device: absent, loading, resident or saving; ``host_state``: none, filling or held.
    ``num_pages``: what it takes when resident; ``history_pages``: idle KV pages on the device, computed under it.
    The engine adds ``name`` and ``rank``.
    """

    adapter: AdapterId
    state: str
    num_pages: int
    running: int
    waiting: int
    host_state: str = "none"
    history_pages: int = 0
    name: str = ""
    rank: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ClientUse:
    """The service of a client, in weighted tokens, and its counter: service over its share, and what it was
    lifted by. ``client``: an adapter, or the place of an API key. The engine adds ``name``: the adapter's, the
    base's, or the key's place."""

    client: int
    service: int
    counter: float
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class CreditUse:
    """The credit of an adapter, or its debt, under ``--merge dlora``: seconds for which one request is
    held back. The engine adds ``name``: the adapter's, or the base's."""

    adapter: AdapterId
    credit_s: float
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The replica's gauges; device pages by use add up to ``pages_total``. ``adapters``: by id, the base is 0.

    ``pages_loading`` and ``pages_saving``: of these, how many are in flight. ``invalid_pages``: KV on the
    device whose adapter is not there. ``clients``: where the queue is fair to them. ``merged``: whose weights are
    merged into the base's, BASE: none's. ``merge_alpha``, ``merge_beta``, ``credits``: of ``--merge dlora``.
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
    clients: tuple[ClientUse, ...] = ()
    merged: AdapterId = BASE
    merge_alpha: float | None = None
    merge_beta: float | None = None
    credits: tuple[CreditUse, ...] = ()


@dataclasses.dataclass(slots=True)
class Counters:
    """Counts since the start. Pages and tokens; times in seconds."""

    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    kv_hit_tokens_device: int = 0
    kv_hit_tokens_host: int = 0
    adapter_hits_device: int = 0
    adapter_hits_host: int = 0
    adapter_misses: int = 0
    preemptions: int = 0
    adapter_reads: int = 0
    adapter_evictions: int = 0
    history_evictions: int = 0
    history_drops: int = 0
    host_evictions: int = 0
    prefetches: int = 0
    pages_swapped_in: int = 0
    pages_swapped_out: int = 0
    swap_in_s: float = 0.0
    swap_out_s: float = 0.0
    swaps_failed: int = 0
    adapter_limit_overtaken: int = 0
    invalid_share_sum: float = 0.0
    invalid_share_samples: int = 0
    steps_unmerged: int = 0  # with the next one: of a replica that may merge
    steps_merged: int = 0
    switches_merged: int = 0
    switches_base: int = 0
    switches_failed: int = 0
    merge_switch_s: float = 0.0
    paused_s: float = 0.0
    longest_pause_s: float = 0.0

    cold_starts: dict[str, int] = dataclasses.field(default_factory=dict)
    """By mode and source with a slash between; replaced, never changed."""
    cold_start_stall_s: float = 0.0
    cold_start_hidden_s: float = 0.0
    cold_start_expected_s: float = 0.0
    """What ``cold_start_stall_s`` was expected to be, of steps that await copies or the CPU."""
    cold_answer_s: float = 0.0
    """From the decision how a cold request begins to the end of its first step; beside it what was expected."""
    cold_answer_expected_s: float = 0.0
    spoilt_rows: int = 0
    cpu_lora_s: float = 0.0

    def cold_start(self, mode: str, source: str | None) -> None:
        """A request has begun; ``source``: where its adapter was when it was admitted, None: on the device."""
        if source is None:
            return
        kind = f"{mode}/{source}"
        self.cold_starts = {**self.cold_starts, kind: self.cold_starts.get(kind, 0) + 1}

    def stalled(self, stall_s: float, expected_s: float, hidden_s: float, cpu_s: float) -> None:
        """A step with cold rows stood still for ``stall_s`` where ``expected_s`` had been expected; copies took
        ``hidden_s`` while it went on, and the CPU ``cpu_s``."""
        self.cold_start_stall_s += stall_s
        self.cold_start_expected_s += expected_s
        self.cold_start_hidden_s += hidden_s
        self.cpu_lora_s += cpu_s

    def cold_answered(self, expected_s: float, took_s: float) -> None:
        """The first step of a cold request has ended."""
        self.cold_answer_expected_s += expected_s
        self.cold_answer_s += took_s

    def switched(self, ok: bool, seconds: float, to_base: bool) -> None:
        """A change of the adapter that is merged has taken effect, or failed."""
        self.switches_failed += not ok
        self.switches_base += ok and to_base
        self.switches_merged += ok and not to_base
        self.merge_switch_s += seconds

    def paused(self, seconds: float) -> None:
        """A sequence that held pages could not run for so long."""
        self.paused_s += seconds
        self.longest_pause_s = max(self.longest_pause_s, seconds)

    def copied(self, num_pages: int, seconds: float, to_device: bool) -> None:
        """A copy between the tiers has landed."""
        if to_device:
            self.pages_swapped_in += num_pages
            self.swap_in_s += seconds
        else:
            self.pages_swapped_out += num_pages
            self.swap_out_s += seconds
