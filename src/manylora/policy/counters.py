"""What the policy did since it began, in numbers. Does not know where they are shown."""

from __future__ import annotations

import dataclasses


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
    invalid_share_sum: float = 0.0
    invalid_share_samples: int = 0

    def copied(self, num_pages: int, seconds: float, to_device: bool) -> None:
        """A copy between the tiers has landed."""
        if to_device:
            self.pages_swapped_in += num_pages
            self.swap_in_s += seconds
        else:
            self.pages_swapped_out += num_pages
            self.swap_out_s += seconds
