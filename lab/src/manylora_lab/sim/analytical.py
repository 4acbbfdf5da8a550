"""What a model's steps take on a described piece of hardware, by arithmetic: a roofline for each part."""

from __future__ import annotations

from manylora.config.declaring import ConfigError
from manylora_lab.pricing.costs import EVEN, StepWork
from manylora_lab.pricing.shapes import ModelShape
from manylora_lab.sim.hardware import Hardware

EAGER_LAUNCH_S = 3e-3
"""What a step takes beside its device work in an engine that launches its kernels one by one; assumed. Captured
steps leave an H200 idle for some 20 us (docs/results/h200_steps.json)."""

_CARDS = (1, 2, 4, 8)


def check_cards(cards: int, name: str = "cards") -> None:
    """How many may share a model; raises ConfigError, which calls the number ``name``."""
    if cards not in _CARDS:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, _CARDS))}, got {cards}")


class AnalyticalCosts:
    """``StepCosts`` of ``shape`` on ``cards`` of ``hardware``, split ideally: every rate and the memory times
    ``cards``, no communication, and the launch as on one.

    A step takes::

        launch_s
        + max(weight bytes / B, 2 x tokens x layer parameters / F)      the linear layers, and the logits' matrix
        + kv tokens x kv bytes / B + 4 x layers x heads x head_dim x pairs / F                        attention
        + max(adapter bytes / A, 2 x (adapter_token_bytes / itemsize) / F)                                 LoRA

    with B the sustained bytes and F the sustained FLOPs per second, A the bytes per second at which LoRA kernels
    go through adapters. Tokens are prefill's and decode's; pairs are
    the positions that prefill tokens attend to; attention's two terms are added, since decoding rows are bound
    by the one and prefill by the other. A token's LoRA arithmetic is 2 FLOPs for each number of its adapter, so
    it grows with the rank. Logits are counted as bytes only: few tokens of a step are sampled. Copies take
    ``copy_base_s`` and the link's time; reads ``read_base_s`` and their bytes at ``read_bytes_s``, assumed, like
    an engine that packs rows on host threads.
    """

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        cards: int = 1,
        *,
        launch_s: float = EAGER_LAUNCH_S,
        between_s: float = 0.0,
        copy_base_s: float = 20e-6,
        read_bytes_s: float = 0.9e9,
        read_base_s: float = 1e-3,
        reads_at_once: int = 2,
    ) -> None:
        """``between_s``: the policy's and the driver's time between two steps. Raises ConfigError."""
        if cards < 1:
            raise ConfigError(f"cards must be at least 1, got {cards}")
        for name, value in (
            ("launch_s", launch_s), ("between_s", between_s), ("copy_base_s", copy_base_s),
            ("read_base_s", read_base_s),
        ):  # fmt: skip
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name} must be a number from 0, got {value}")
        if not 0 < read_bytes_s < float("inf") or reads_at_once < 1:
            raise ConfigError("read_bytes_s and reads_at_once must be more than 0")
        self.shape = shape
        self.hardware = hardware
        self.cards = cards
        self.reads_at_once = reads_at_once
        self.wake_s = 0.0
        self.answer_s = 0.0
        self.copy_drag = 0.0
        self.spread = EVEN
        self._launch_s = launch_s
        self._between_s = between_s
        byte_s = 1 / (cards * hardware.sustained_memory_bytes_s)
        flop_s = 1 / (cards * hardware.sustained_flops)
        self._weights_s = shape.itemsize * (shape.layer_parameters + shape.head_parameters) * byte_s
        self._token_s = 2 * shape.layer_parameters * flop_s
        self._kv_token_s = shape.kv_token_bytes * byte_s
        self._pair_s = 4 * shape.layers * shape.heads * shape.head_dim * flop_s
        self._adapter_byte_s = 1 / (cards * hardware.sustained_adapter_bytes_s)
        self._adapter_token_byte_s = 2 / shape.itemsize * flop_s
        self._copy_base_s = copy_base_s
        self._copy_byte_s = 1 / (cards * hardware.sustained_link_bytes_s)
        self._load_byte_s = 1 / (cards * hardware.sustained_load_bytes_s)
        self._read_base_s = read_base_s
        self._read_byte_s = 1 / read_bytes_s

    def step_s(self, work: StepWork, /) -> float:
        """See StepCosts."""
        linear_s = (work.num_decodes + work.num_prefill_tokens) * self._token_s
        lora_s = work.adapter_bytes * self._adapter_byte_s
        lora_flops_s = work.adapter_token_bytes * self._adapter_token_byte_s
        return (
            self._launch_s
            + (linear_s if linear_s > self._weights_s else self._weights_s)
            + work.num_kv_tokens * self._kv_token_s
            + work.num_prefill_pairs * self._pair_s
            + (lora_flops_s if lora_flops_s > lora_s else lora_s)
        )

    def overhead_s(self, num_rows: int, num_new: int, /) -> float:
        """See StepCosts; the same for all."""
        return self._between_s

    def copy_s(self, num_bytes: int, to_device: bool = True, /) -> float:
        """See StepCosts; both ways alike, but for a loader that is slower than the link."""
        return self._copy_base_s + num_bytes * (self._load_byte_s if to_device else self._copy_byte_s)

    def read_s(self, num_bytes: int, to_device: bool = False, /) -> float:
        """See StepCosts; both tiers alike."""
        return self._read_base_s + num_bytes * self._read_byte_s

    def pool_bytes(self, memory_share: float = 0.9) -> int:
        """What ``memory_share`` of all cards' memory leaves for KV and adapters beside the weights.

        Raises ConfigError when nothing is left.
        """
        if not 0 < memory_share <= 1:
            raise ConfigError(f"memory_share must lie between 0 and 1, got {memory_share}")
        left = int(memory_share * self.cards * self.hardware.memory_bytes) - self.shape.weight_bytes
        if left <= 0:
            cards = f"{self.cards} x {self.hardware.name}"
            raise ConfigError(f"{self.shape.name} does not fit on {cards}: {-left / 1e9:.1f} GB are missing")
        return left
