"""Defines what a replica reports about itself: its gauges at one moment, and its counts since its start.

Has records only. Does not know how they are read, nor where they are shown.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from manylora.types import BASE, AdapterId

Which = Literal["all", "changed"]
"""Which adapters a snapshot lists beside the base: all, or only adapters that may have changed since the
last snapshot of this kind. An adapter that was never listed has not changed since it was added: its state
is absent."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterUse:
    """One adapter at this moment: where its weights are, whether in use or idle.

    ``state`` on the device: absent, loading, resident or saving; ``host_state``: none, filling or held.
    ``num_pages``: the adapter's size when resident. ``running``, ``waiting``: its sequences; a request counts
    once for each. ``history_pages``: the device pages of idle KV that was computed with it. The engine adds
    ``name`` and ``rank``.
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
    """The service that one client received, in weighted tokens, and its fairness counter.

    ``counter``: the service divided by the client's share, plus the amounts by which the counter was lifted.
    ``client``: an adapter's id, or an API key's place in the list of keys. The engine adds ``name``: the
    adapter's, the base's, or the key's place.
    """

    client: int
    service: int
    counter: float
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class CreditUse:
    """The credit of an adapter, or of the base, under ``--merge dlora``.

    With it the adapter pays the adapters whose requests are held back for its own. ``credit_s``: the balance,
    in seconds for which one request is held back. The engine adds ``name``: the adapter's, or the base's.
    """

    adapter: AdapterId
    credit_s: float
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The gauges of a replica at one moment.

    The device pages free, running, history and adapters add up to ``pages_total``. ``pages_loading`` and
    ``pages_saving``: the device pages that are being filled, or copied to the host before eviction.
    ``invalid_pages``: device pages of idle KV whose adapter is not on the device. ``adapters``: ordered by
    id; the base is 0. ``clients``: empty unless the queue is fair to clients. ``merged``: the adapter whose
    weights are merged into the base's; BASE: none. ``merge_alpha``, ``merge_beta``, ``credits``: only with
    ``--merge dlora``.
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
    """The replica's counts since its start. Times, whose names end in ``_s``, are in seconds."""

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
    steps_unmerged: int = 0  # this and the next: counted only where merging is on
    steps_merged: int = 0
    switches_merged: int = 0
    switches_base: int = 0
    switches_failed: int = 0
    merge_switch_s: float = 0.0
    paused_s: float = 0.0
    longest_pause_s: float = 0.0

    cold_starts: dict[str, int] = dataclasses.field(default_factory=dict)
    """Requests by "mode/source". Replaced and never changed, because copies of the counters share it."""
    cold_start_stall_s: float = 0.0
    cold_start_hidden_s: float = 0.0
    cold_start_expected_s: float = 0.0
    """The expected value of ``cold_start_stall_s``, summed over steps that await copies or the CPU."""
    cold_answer_s: float = 0.0
    """From the decision how a cold request begins to the end of its first step.

    ``cold_answer_expected_s``: the forecast of this time.
    """
    cold_answer_expected_s: float = 0.0
    spoilt_rows: int = 0
    cpu_lora_s: float = 0.0

    def cold_start(self, mode: str, source: str | None) -> None:
        """Count a request that has begun, unless its adapter was on the device when the request was admitted.

        ``mode``: how it began. ``source``: where its adapter was at admission; None: on the device.
        """
        if source is None:
            return
        kind = f"{mode}/{source}"
        self.cold_starts = {**self.cold_starts, kind: self.cold_starts.get(kind, 0) + 1}

    def stalled(self, stall_s: float, expected_s: float, hidden_s: float, cpu_s: float) -> None:
        """Count a step with cold rows. All times are in seconds.

        The step stood still for ``stall_s``, where ``expected_s`` had been expected. Copies took ``hidden_s``
        while the step went on; CPU threads computed for ``cpu_s``.
        """
        self.cold_start_stall_s += stall_s
        self.cold_start_expected_s += expected_s
        self.cold_start_hidden_s += hidden_s
        self.cpu_lora_s += cpu_s

    def cold_answered(self, expected_s: float, took_s: float) -> None:
        """Count a cold request whose first step has ended, with its expected and real time in seconds."""
        self.cold_answer_expected_s += expected_s
        self.cold_answer_s += took_s

    def switched(self, ok: bool, seconds: float, to_base: bool) -> None:
        """Count a switch of the merged adapter that has taken effect (``ok``) or failed.

        ``to_base``: whether the switch was to no merged adapter.
        """
        self.switches_failed += not ok
        self.switches_base += ok and to_base
        self.switches_merged += ok and not to_base
        self.merge_switch_s += seconds

    def paused(self, seconds: float) -> None:
        """Count the seconds for which a sequence held pages but was paused for merging."""
        self.paused_s += seconds
        self.longest_pause_s = max(self.longest_pause_s, seconds)

    def copied(self, num_pages: int, seconds: float, to_device: bool) -> None:
        """Count a finished copy between the host and the device."""
        if to_device:
            self.pages_swapped_in += num_pages
            self.swap_in_s += seconds
        else:
            self.pages_swapped_out += num_pages
            self.swap_out_s += seconds
