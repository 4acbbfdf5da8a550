"""What a simulated device takes for what it is told: assumed rates in, seconds out."""

from __future__ import annotations

import dataclasses

from manylora.config import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Seconds and bytes per second of one device. The defaults are *assumed* for Llama-2-7B in bfloat16 on an
    H200: an eager engine's step, KV read at 4 TB/s, copies over PCIe 5, adapters read from files.

    ``kv_token_s`` counts for every position that a row attends to; ``adapter_bytes_s`` is the rate at which a
    step goes through the pages of the distinct adapters in its batch. Copies: one lane each way, in order.
    Reads: ``reads_at_once`` of them, each at ``read_bytes_s``.
    """

    step_base_s: float = 6.5e-3
    decode_row_s: float = 10e-6
    prefill_token_s: float = 22e-6
    kv_token_s: float = 0.131e-6
    adapter_bytes_s: float = 335e9
    copy_bytes_s: float = 52e9
    copy_base_s: float = 20e-6
    read_bytes_s: float = 0.9e9
    read_base_s: float = 1e-3
    reads_at_once: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{field.name} must be a number from 0, got {value}")
        for name in ("step_base_s", "adapter_bytes_s", "copy_bytes_s", "read_bytes_s", "reads_at_once"):
            if not getattr(self, name):
                raise ConfigError(f"{name} must be more than 0")

    def step_s(
        self, num_decodes: int, num_prefill_tokens: int, num_kv_tokens: int, adapter_bytes: int
    ) -> float:
        """One batch."""
        return (
            self.step_base_s
            + num_decodes * self.decode_row_s
            + num_prefill_tokens * self.prefill_token_s
            + num_kv_tokens * self.kv_token_s
            + adapter_bytes / self.adapter_bytes_s
        )

    def copy_s(self, num_bytes: int) -> float:
        """One copy between the tiers, once the lane is its own."""
        return self.copy_base_s + num_bytes / self.copy_bytes_s

    def read_s(self, num_bytes: int) -> float:
        """One adapter from its source, once a reader is free."""
        return self.read_base_s + num_bytes / self.read_bytes_s
