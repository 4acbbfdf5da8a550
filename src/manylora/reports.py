"""The reports of a replica: its gauges at one moment, and its counts since the start.

Records only. Does not know their readers.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from manylora.types import BASE, AdapterId

Which = Literal["all", "changed"]
"""The adapters that a snapshot lists beside the base: all, or the ones that may have changed since the last
such snapshot. An adapter that was never listed is as it was added: absent."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterUse:
    """The state of one adapter (true residency, not activity); requests count once per sequence.

    ``state`` on the device: absent, loading, resident or saving; ``host_state``: none, filling or held.
    ``num_pages``: its pages when resident; ``history_pages``: idle KV pages on the device, computed under it.
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
    """The service of one client in weighted tokens, and its counter: service over its share, and its lifts.

    ``client``: an adapter, or the place of an API key. The engine adds ``name``: the adapter's, the base's, or
    the key's place.
    """

    client: int
    service: int
    counter: float
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class CreditUse:
    """The credit of an adapter under ``--merge dlora``, in seconds of one request held back.

    The engine adds ``name``: the adapter's, or the base's.
    """

    adapter: AdapterId
    credit_s: float
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The replica's gauges; device pages by use add up to ``pages_total``. ``adapters``: by id, the base is 0.

    ``pages_loading`` and ``pages_saving``: of these, how many are in flight. ``invalid_pages``: KV on the
    device whose adapter is not there. ``clients``: if the queue is fair to them. ``merged``: the adapter in
    the base's weights, BASE: none. ``merge_alpha``, ``merge_beta``, ``credits``: of ``--merge dlora``.
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
    """The counts since the start, of pages and tokens; times in seconds."""

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
    """The expected ``cold_start_stall_s``, of steps that await copies or the CPU."""
    cold_answer_s: float = 0.0
    """From the decision how a cold request begins to the end of its first step; beside it what was expected."""
    cold_answer_expected_s: float = 0.0
    spoilt_rows: int = 0
    cpu_lora_s: float = 0.0

    def cold_start(self, mode: str, source: str | None) -> None:
        """Count a cold start. ``source``: where the adapter was at admission; None: on the device, so none."""
        if source is None:
            return
        kind = f"{mode}/{source}"
        self.cold_starts = {**self.cold_starts, kind: self.cold_starts.get(kind, 0) + 1}

    def stalled(self, stall_s: float, expected_s: float, hidden_s: float, cpu_s: float) -> None:
        """Count the stall of a step with cold rows, and its expected stall.

        ``hidden_s``: of copies while the step went on; ``cpu_s``: of the CPU.
        """
        self.cold_start_stall_s += stall_s
        self.cold_start_expected_s += expected_s
        self.cold_start_hidden_s += hidden_s
        self.cpu_lora_s += cpu_s

    def cold_answered(self, expected_s: float, took_s: float) -> None:
        """Count the first answer of a cold request."""
        self.cold_answer_expected_s += expected_s
        self.cold_answer_s += took_s

    def switched(self, ok: bool, seconds: float, to_base: bool) -> None:
        """Count a switch of the merged adapter, or a failed one."""
        self.switches_failed += not ok
        self.switches_base += ok and to_base
        self.switches_merged += ok and not to_base
        self.merge_switch_s += seconds

    def paused(self, seconds: float) -> None:
        """Count a pause of a sequence that held pages."""
        self.paused_s += seconds
        self.longest_pause_s = max(self.longest_pause_s, seconds)

    def copied(self, num_pages: int, seconds: float, to_device: bool) -> None:
        """Count a copy between the tiers."""
        if to_device:
            self.pages_swapped_in += num_pages
            self.swap_in_s += seconds
        else:
            self.pages_swapped_out += num_pages
            self.swap_out_s += seconds
