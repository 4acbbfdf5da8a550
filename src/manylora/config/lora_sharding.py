"""How adapters are cut among several ranks, the one rule of the engine and of the simulator."""

from typing import Literal

LoraSharding = Literal["sharded", "replicated"]
LORA_SHARDINGS: tuple[LoraSharding, ...] = ("sharded", "replicated")


def lora_sharding_of(wanted: str, count: int) -> LoraSharding:
    """How ``--lora-sharding`` is meant with so many ranks. ``auto``: two replicate, which costs no exchange and a
    third more bytes; more shard, since replicated adapters would take more than twice the memory."""
    if wanted == "auto":
        return "sharded" if count > 2 else "replicated"
    return "sharded" if wanted == "sharded" else "replicated"
