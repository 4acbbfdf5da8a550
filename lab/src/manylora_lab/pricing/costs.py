"""What a simulated device takes for what it is told: seconds by the numbers that a step, copy or read has.

``StepCosts`` is what the simulator asks. It is answered by ``DeviceCosts`` from assumed rates (here), by
``pricing.fit.FittedCosts`` from a profile that ``manylora profile`` measured, and by
``AnalyticalCosts`` from a hardware's data sheet and by others that derive from it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

from manylora.config.declaring import ConfigError


class StepWork(NamedTuple):
    """What one batch has to do.

    ``num_decodes``: rows of one token; ``num_prefill_tokens``: tokens of all longer rows. ``num_kv_tokens``:
    positions that the rows' ends stand at, summed: what attention reads. ``adapter_bytes``, of the
    ``num_adapters`` distinct ones in the batch. ``num_prefill_pairs``: how many positions each prefill token
    attends to, summed (``prefill_pairs``). ``adapter_token_bytes``: each token's adapter's bytes, summed over all
    tokens: the adapters' arithmetic.
    """

    num_decodes: int
    num_prefill_tokens: int
    num_kv_tokens: int
    adapter_bytes: int = 0
    num_adapters: int = 0
    num_prefill_pairs: int = 0
    adapter_token_bytes: int = 0


step_work: Callable[[tuple[int, int, int, int, int, int, int]], StepWork]
step_work = functools.partial(tuple.__new__, StepWork)
"""Makes a StepWork of a tuple of its fields in half the time: there is one a step."""

IDLE_S = 0.02
"""A device without a step for so long has gone cold: its host's caches and clocks, for the most part."""


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """How what a device takes varies: values as likely as each other, one of which is drawn each time; none where
    it does not vary. Tails are made of this: a 99th percentile of what takes its mean each time is too short.

    ``decodes``, ``prefills``: of a step without and with prefill, as shares of ``step_s``; ``reads``: of a read,
    as shares of ``read_s``; ``landings``: seconds from the end of a copy until the engine learns of it.
    """

    decodes: tuple[float, ...] = ()
    prefills: tuple[float, ...] = ()
    reads: tuple[float, ...] = ()
    landings: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not all(0 <= value < float("inf") for value in getattr(self, field.name)):
                raise ConfigError(f"each of {field.name} must be a number from 0")


EVEN = Spread()
"""Everything takes its mean each time, and the engine is told at once."""


class StepCosts(Protocol):
    """Seconds of one device, never less for more work. Asked once a simulated step: numbers in, a few
    multiplications, a number out. All byte counts are whole pages, as the pools hold them."""

    @property
    def reads_at_once(self) -> int:
        """How many adapters are read side by side."""

    @property
    def wake_s(self) -> float:
        """What a step takes besides, if the device was idle for ``IDLE_S`` before."""

    @property
    def answer_s(self) -> float:
        """The time from a step's end until the client has its tokens."""

    @property
    def copy_drag(self) -> float:
        """Seconds that a step takes longer for each second of a copy beside it."""

    @property
    def spread(self) -> Spread:
        """How all this varies."""

    def step_s(self, work: StepWork, /) -> float:
        """One batch, from its start to its tokens, where others came just before."""

    def overhead_s(self, num_rows: int, num_new: int, /) -> float:
        """Before a step of so many rows, of which so many sequences were just taken up: the policy's and the
        driver's time."""

    def copy_s(self, num_bytes: int, to_device: bool = True, /) -> float:
        """One copy between the tiers, once the lane is its own."""

    def read_s(self, num_bytes: int, to_device: bool = False, /) -> float:
        """One adapter from its source into pages of the host, or of the device, once a reader is free."""


def prefill_pairs(start: int, num_tokens: int) -> int:
    """Positions that tokens ``start`` to ``start + num_tokens`` attend to, themselves included, summed."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


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
    wake_s: float = 0.0
    answer_s: float = 0.0
    copy_drag: float = 0.0
    spread: Spread = EVEN

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "spread" and not 0 <= value < float("inf"):
                raise ConfigError(f"{field.name} must be a number from 0, got {value}")
        for name in ("step_base_s", "adapter_bytes_s", "copy_bytes_s", "read_bytes_s", "reads_at_once"):
            if not getattr(self, name):
                raise ConfigError(f"{name} must be more than 0")

    def step_s(self, work: StepWork, /) -> float:
        """See StepCosts; the last three cost nothing here."""
        return (
            self.step_base_s
            + work.num_decodes * self.decode_row_s
            + work.num_prefill_tokens * self.prefill_token_s
            + work.num_kv_tokens * self.kv_token_s
            + work.adapter_bytes / self.adapter_bytes_s
        )

    def overhead_s(self, num_rows: int, num_new: int, /) -> float:
        """Part of ``step_base_s`` here."""
        return 0.0

    def copy_s(self, num_bytes: int, to_device: bool = True, /) -> float:
        """See StepCosts; both ways alike."""
        return self.copy_base_s + num_bytes / self.copy_bytes_s

    def read_s(self, num_bytes: int, to_device: bool = False, /) -> float:
        """See StepCosts; both tiers alike."""
        return self.read_base_s + num_bytes / self.read_bytes_s
