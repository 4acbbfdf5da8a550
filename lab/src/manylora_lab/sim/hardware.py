"""Accelerators as a few numbers: memory, its bandwidth, arithmetic, the link to the host.

Peak values are the vendors' data sheets', per card and without sparsity; what of a peak a serving engine gets is
an efficiency beside it, assumed unless a description says measured. The data sheets were not at hand when this
was written: each value was recalled, and all but the A10's arithmetic were compared with public summaries.
"""

from __future__ import annotations

import dataclasses
import math

from manylora.config.declaring import ConfigError

GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class StatedTimes:
    """Seconds that a paper's authors state for ``model`` on one card, whatever the batch: of a step where adapters
    are computed, of one where none is, and of a switch of what is merged."""

    model: str
    unmerged_s: float
    merged_s: float
    switch_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Interconnect:
    """What the cards of one host exchange by: seconds that an exchange takes however small it is, and bytes a
    second that each card sends."""

    name: str
    base_s: float
    bytes_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.base_s < float("inf") or not 0 < self.bytes_s < float("inf"):
            raise ConfigError(f"{self.name} must have base_s from 0 and bytes_s above 0")

    def all_gather_s(self, num_bytes: float, cards: int) -> float:
        """Each card has a share of ``num_bytes``, and all get the whole."""
        return self.base_s + (cards - 1) / cards * num_bytes / self.bytes_s

    def all_reduce_s(self, num_bytes: float, cards: int) -> float:
        """Each card has ``num_bytes``, and all get the sum: twice the traffic of an all-gather of so many."""
        return self.base_s + 2 * (cards - 1) / cards * num_bytes / self.bytes_s


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """One card. Rates are per second: ``flops`` dense and in 16 bits, ``link_bytes_s`` each way to the host.
    Vendors' gigabytes of memory are taken for 2**30 bytes.

    ``source``: where the peaks are from, and what of them is assumed.
    """

    name: str
    memory_bytes: int
    memory_bytes_s: float
    flops: float
    link_bytes_s: float
    source: str
    memory_efficiency: float = 0.80
    flops_efficiency: float = 0.60
    link_efficiency: float = 0.85
    adapter_efficiency: float = 0.28
    """Of ``memory_bytes_s``: what LoRA kernels read adapters at; assumed. The engine's reach 0.6 on an H200, where
    64 adapters of rank 16, 5.1 GB, add 1.8 ms to a step (docs/results/h200_steps.json)."""
    stated: StatedTimes | None = None
    """Steps and switches take this, and the card's rates hold for copies alone (``sim.stated``)."""
    interconnect: Interconnect | None = None
    """Between the cards of one host; None where no description is known."""
    loader_bytes_s: float | None = None
    """What adapters and KV reach the card at where it is not the link that bounds them, but an engine's way of
    loading: an assumption. None: the link's."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "memory_bytes_s", "flops", "link_bytes_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} of {self.name} must be more than 0, got {getattr(self, name)}")
        if self.loader_bytes_s is not None and not 0 < self.loader_bytes_s < float("inf"):
            raise ConfigError(f"loader_bytes_s of {self.name} must be more than 0, got {self.loader_bytes_s}")
        for name in ("memory_efficiency", "flops_efficiency", "link_efficiency", "adapter_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(
                    f"{name} of {self.name} must lie between 0 and 1, got {getattr(self, name)}"
                )

    @property
    def sustained_memory_bytes_s(self) -> float:
        """What steps read at."""
        return self.memory_bytes_s * self.memory_efficiency

    @property
    def sustained_flops(self) -> float:
        """What matrix products of prefill run at."""
        return self.flops * self.flops_efficiency

    @property
    def sustained_adapter_bytes_s(self) -> float:
        """What steps read the adapters in their batch at."""
        return self.memory_bytes_s * self.adapter_efficiency

    @property
    def sustained_link_bytes_s(self) -> float:
        """What the link carries, one way: copies of pages, where no loader bounds them."""
        return self.link_bytes_s * self.link_efficiency

    @property
    def sustained_load_bytes_s(self) -> float:
        """What copies of pages to the card run at."""
        return min(self.loader_bytes_s or math.inf, self.sustained_link_bytes_s)


_VENDOR = "vendor data sheet, recalled; efficiencies assumed"

_EXCHANGE_S = 20e-6
"""Of a small NCCL exchange within a host, assumed: public threads tell of 20 us and more for all-reduces of 72 KiB
to 2 MiB over NVLink. Two H200 take 6 us in a graph (docs/results/ranks_h200.json)."""
_LINK_SHARE = 0.8
NVLINK_3 = Interconnect("NVLink 3, 300 GB/s each way", _EXCHANGE_S, _LINK_SHARE * 300e9)
NVLINK_4 = Interconnect("NVLink 4, 450 GB/s each way", _EXCHANGE_S, _LINK_SHARE * 450e9)
PCIE_4 = Interconnect("PCIe 4 x16, 32 GB/s each way", _EXCHANGE_S, _LINK_SHARE * 32e9)
"""Peaks are the data sheets', recalled; what of them an exchange gets is assumed."""

CARASERVE_LOADER_BYTES_S = 4e9
"""Assumed, of CaraServe's baselines: its text has "a few to tens of milliseconds" for adapters of up to 100 MiB
(§2.3), and loads that take 20 % of the time of requests at 9 requests a second, each of which would take 22 ms
at least."""

NPU_MEMORY_BYTES_S = 1.2e12
"""Assumed: the FastLibra paper names no bandwidth, and no model. What follows from that is in
docs/results/npu_bandwidth.md, which varies it."""

NPU_MEMORY_CHOICES = (0.8e12, 1.2e12, 1.6e12)


def fastlibra_npu(memory_bytes_s: float = NPU_MEMORY_BYTES_S) -> Hardware:
    """The FastLibra paper's card (§2.2, its table of specifications): 64 GB, 256 TFLOPS in FP16, PCIe 4 x16,
    with an assumed memory bandwidth, which its name has where it is not the usual one: ``fastlibra-npu-800``."""
    varied = "" if memory_bytes_s == NPU_MEMORY_BYTES_S else f"-{memory_bytes_s / 1e9:g}"
    return Hardware(
        f"fastlibra-npu{varied}", 64 * GIB, memory_bytes_s, 256e12, 32e9,
        f"FastLibra §2.2; memory bandwidth assumed to be {memory_bytes_s / 1e12:g} TB/s; efficiencies assumed",
    )  # fmt: skip


HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        Hardware("a10", 24 * GIB, 600e9, 125e12, 32e9, _VENDOR, interconnect=PCIE_4),
        Hardware(
            "a10-caraserve", 24 * GIB, 600e9, 125e12, 32e9,
            f"{_VENDOR}; adapters reach the card at an assumed {CARASERVE_LOADER_BYTES_S / 1e9:g} GB/s, whatever "
            "the link carries",
            interconnect=PCIE_4, loader_bytes_s=CARASERVE_LOADER_BYTES_S,
        ),
        Hardware("a100-40", 40 * GIB, 1555e9, 312e12, 32e9, _VENDOR + " (SXM)", interconnect=NVLINK_3),
        Hardware("a100-80", 80 * GIB, 2039e9, 312e12, 32e9, _VENDOR + " (SXM)", interconnect=NVLINK_3),
        Hardware("h100", 80 * GIB, 3350e9, 989.4e12, 64e9, _VENDOR + " (SXM)", interconnect=NVLINK_4),
        Hardware("h200", 141 * GIB, 4800e9, 989.4e12, 64e9, _VENDOR + " (SXM)", interconnect=NVLINK_4),
        Hardware(
            "h200-measured", 141 * GIB, 4800e9, 989.4e12, 64e9,
            "data sheet as for h200; ceilings measured (docs/results/cache_h200_pinned.json, within 1 %): device "
            "copy 4.30 TB/s, 16-bit matrix product 808 TFLOP/s, host link 55.5 GB/s",
            4.303 / 4.8, 807.9 / 989.4, 55.5 / 64, interconnect=NVLINK_4,
        ),
        *map(fastlibra_npu, NPU_MEMORY_CHOICES),
        Hardware(
            "dlora-a800", 80 * GIB, 2039e9, 312e12, 32e9,
            "steps of 15 ms merged and 27 ms unmerged and switches of 20 ms: constants in dLoRA's published "
            "scheduler, for Llama-2-7B; the rest: data sheet, recalled, of the A100 that the A800 is but for its "
            "links between cards",
            stated=StatedTimes("llama-2-7b", unmerged_s=27e-3, merged_s=15e-3, switch_s=20e-3),
        ),
    )
}  # fmt: skip
"""Hardware by name. ``h200-measured`` has what single large operations reached, an upper limit for a model's; the
others' assumed efficiencies are about what a 7B model's steps reached on an H200
(docs/results/h200_steps.json)."""


def hardware_named(name: str) -> Hardware:
    """Raises ConfigError, which lists the names."""
    if name not in HARDWARE:
        raise ConfigError(f"hardware {name!r} is not known: use {', '.join(HARDWARE)}")
    return HARDWARE[name]
