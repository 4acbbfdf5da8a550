"""What steps take on several cards of one host that share a model by tensor parallelism, adapters sharded as
S-LoRA does it (§6) or replicated on one side as Punica does (§7.2).

Owns the communication, and what a share of a model holds; the arithmetic of each card is ``sim.analytical``'s.
``AnalyticalCosts`` of several cards, without communication, stays what stored results were simulated with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from manylora.config.declaring import ConfigError
from manylora.config.sections import LoraSharding
from manylora_lab.pricing.costs import StepWork
from manylora_lab.pricing.fit import fit_exchanges
from manylora_lab.pricing.profile import Profile
from manylora_lab.pricing.shapes import ATTENTION_MODULES, ModelShape
from manylora_lab.sim.analytical import EAGER_LAUNCH_S, AnalyticalCosts
from manylora_lab.sim.hardware import Hardware, Interconnect

COLUMN_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules whose outputs are shared out, those of one input together: their adapters' exchange is an all-gather."""
ROW_MODULES = ("o_proj", "down_proj")
"""Modules whose inputs are shared out: an all-reduce follows each."""


_LEAST_BYTE_S = 1e-15
"""Where a fit finds none: what was measured was all latency."""


def held_shape(shape: ModelShape, cards: int) -> ModelShape:
    """The sizes of what all cards hold together: with fewer KV heads than cards each head lies on several.

    Raises ConfigError where the heads cannot be shared out, with the numbers that work.
    """
    sizes = [n for n in range(1, shape.heads + 1) if _can_share(shape, n)]
    if cards not in sizes:
        raise ConfigError(
            f"{shape.name} has {shape.heads} heads and {shape.kv_heads} of keys and values: they are shared by "
            f"{', '.join(map(str, sizes))}, not by {cards}"
        )
    return dataclasses.replace(shape, kv_heads=max(shape.kv_heads, cards))


def _can_share(shape: ModelShape, cards: int) -> bool:
    return shape.heads % cards == 0 and (shape.kv_heads % cards == 0 or cards % shape.kv_heads == 0)


def adapter_pages(
    shape: ModelShape, cards: int, sharding: LoraSharding, rank: int, page_tokens: int, modules: Iterable[str]
) -> int:
    """Pages that an adapter takes on each card, where a page holds ``1 / cards`` of its bytes on each.

    Replicated, each card has all of A before modules whose outputs are shared out, all of B after the others.
    """
    held = held_shape(shape, cards)
    num_bytes = held.adapter_bytes(rank, modules)
    if sharding == "replicated":
        sizes = held.modules
        whole = sum(sizes[name][name in ROW_MODULES] for name in modules)
        num_bytes += (cards - 1) * whole * rank * held.layers * held.itemsize
    return -(-num_bytes // held.page_bytes(page_tokens))


def measured_link(profile: Profile, cards: int) -> Interconnect:
    """What so many ranks of the profile exchange by. Raises ConfigError where it is of another number, or does not
    tell."""
    profile.expect(tensor_parallel_size=cards)
    if not profile.exchanges:
        raise ConfigError("the profile has no exchanges: it was not measured with several ranks")
    base_s, byte_s = fit_exchanges(profile)
    bytes_s = 2 * (cards - 1) / cards / max(byte_s, _LEAST_BYTE_S)
    return Interconnect(f"as of {profile.machine}", base_s, bytes_s)


class ParallelCosts(AnalyticalCosts):
    """``StepCosts`` of ``shape`` on ``cards`` of ``hardware``: each does ``1 / cards`` of the work, launches are
    as on one, and a layer waits for its exchanges.

    Of a step of T tokens, N cards, hidden size h and L layers: ``2 L + 1`` all-reduces of T x h numbers, after
    attention, after the MLP, and of the embeddings. Sharded adapters of rank r exchange an all-gather of T x r
    numbers for each module of a column group, the group's together, and an all-reduce of T x r for each row
    module: ``5 (N - 1) T r / N`` a layer for q, k, v, o (S-LoRA §6.2), ``9 (N - 1) T r / N`` for all seven.
    Nothing of this is hidden behind other work. Replicated adapters exchange nothing.
    """

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        cards: int,
        modules: Iterable[str] = ATTENTION_MODULES,
        sharding: LoraSharding = "sharded",
        *,
        launch_s: float = EAGER_LAUNCH_S,
        lora_communicates: bool = True,
    ) -> None:
        """``lora_communicates``: without it tokens would be wrong; it tells what the adapters' exchange takes.
        Raises ConfigError."""
        held = held_shape(shape, cards)
        super().__init__(held, hardware, cards, launch_s=launch_s)
        link = hardware.interconnect
        if link is None:
            raise ConfigError(f"what the cards of {hardware.name} exchange by is not described")
        names = tuple(modules)
        row_bytes = shape.hidden * shape.itemsize
        self._base_s = (2 * shape.layers + 1) * link.base_s
        self._token_exchange_s = (2 * shape.layers + 1) * (link.all_reduce_s(row_bytes, cards) - link.base_s)
        self._lora_base_s = self._lora_byte_s = 0.0
        if sharding == "sharded" and lora_communicates and cards > 1:
            gathered = [sum(name in names for name in group) for group in COLUMN_GROUPS]
            reduced = sum(name in names for name in ROW_MODULES)
            exchanges = sum(map(bool, gathered)) + reduced
            a_rank_s = (
                sum(gathered) * (link.all_gather_s(shape.itemsize, cards) - link.base_s)
                + reduced * (link.all_reduce_s(shape.itemsize, cards) - link.base_s)
            ) * shape.layers
            self._lora_base_s = shape.layers * exchanges * link.base_s
            # Work tells the bytes of each token's adapter: as many times those of rank 1 as its rank is.
            self._lora_byte_s = a_rank_s / held.adapter_bytes(1, names)

    def step_s(self, work: StepWork, /) -> float:
        """See StepCosts."""
        seconds = super().step_s(work)
        if self.cards == 1:
            return seconds
        seconds += self._base_s + (work.num_decodes + work.num_prefill_tokens) * self._token_exchange_s
        if work.adapter_bytes:
            seconds += self._lora_base_s + work.adapter_token_bytes * self._lora_byte_s
        return seconds
