"""The sizes of a model that its costs and its pools follow from: no weights, no files.

Owns the arithmetic from a shape to bytes of weights, KV and adapters. Sizes of the named shapes are those of the
models' published config.json.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable

from manylora.config.declaring import ConfigError
from manylora.models.spec import ModelConfig

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_MODULES = (*ATTENTION_MODULES, "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder. ``itemsize``: bytes of one number of weights, KV and adapters.

    ``is_gated``: the MLP has a gate beside its first matrix. ``is_tied``: one matrix embeds and gives logits.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    itemsize: int = 2
    is_gated: bool = True
    is_tied: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("is_gated", "is_tied"):
                if not isinstance(value, bool):
                    raise ConfigError(f"{field.name} of a model must be true or false, got {value!r}")
            elif field.name == "name":
                if not isinstance(value, str) or not value:
                    raise ConfigError(f"name of a model must be text, got {value!r}")
            elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{field.name} of a model must be a whole number from 1, got {value!r}")

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """A layer's linear modules by name, with inputs and outputs. A plain MLP has ``up_proj`` and
        ``down_proj`` here, whatever its family calls them."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = {
            "q_proj": (self.hidden, q),
            "k_proj": (self.hidden, kv),
            "v_proj": (self.hidden, kv),
            "o_proj": (q, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }
        if not self.is_gated:
            del sizes["gate_proj"]
        return sizes

    @property
    def layer_parameters(self) -> int:
        """The parameters of all layers' linear modules: what every token is multiplied with."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.modules.values())

    @property
    def layer_bytes(self) -> int:
        """What these take: all that an adapter can change."""
        return self.layer_parameters * self.itemsize

    @property
    def head_parameters(self) -> int:
        """The parameters of the matrix that gives logits."""
        return self.vocab * self.hidden

    @property
    def weight_bytes(self) -> int:
        """What the weights take of memory; norms and biases, about 1 in 10,000, are left out."""
        return self.itemsize * (self.layer_parameters + self.head_parameters * (1 if self.is_tied else 2))

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one position in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize

    def page_bytes(self, page_tokens: int) -> int:
        """One page of the pool."""
        return page_tokens * self.kv_token_bytes

    def adapter_bytes(self, rank: int, modules: Iterable[str] = ATTENTION_MODULES) -> int:
        """An adapter's numbers, without what its last page leaves empty. Raises ConfigError."""
        sizes = self.modules
        names = tuple(modules)
        unknown = [name for name in names if name not in sizes]
        if unknown:
            raise ConfigError(f"{self.name} has no module {unknown[0]!r}: use {', '.join(sizes)}")
        if rank < 1:
            raise ConfigError(f"an adapter's rank must be at least 1, got {rank}")
        return rank * self.layers * sum(sum(sizes[name]) for name in names) * self.itemsize

    def adapter_pages(self, rank: int, page_tokens: int, modules: Iterable[str] = ATTENTION_MODULES) -> int:
        """Pages that an adapter takes. The engine's cells can need up to 5 % more (``kernels.shapes``)."""
        return -(-self.adapter_bytes(rank, modules) // self.page_bytes(page_tokens))

    @property
    def fingerprint(self) -> str:
        """A digest that is equal for equal sizes, whatever the name."""
        sizes = {name: value for name, value in dataclasses.asdict(self).items() if name != "name"}
        return hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.layers} layers of {self.hidden}, {self.heads}/{self.kv_heads} heads, "
            f"{8 * self.itemsize}-bit, {self.fingerprint})"
        )


def shape_of(config: ModelConfig, name: str, itemsize: int) -> ModelShape:
    """The sizes of a model from its config, with ``itemsize`` bytes a number."""
    return ModelShape(
        name=name,
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        itemsize=itemsize,
        is_gated=all(layer.mlp.is_gated for layer in config.layers),
        is_tied=config.tie_embeddings,
    )


SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
        ModelShape("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000),
        ModelShape("codellama-34b", 48, 8192, 64, 8, 128, 22016, 32000),
        ModelShape("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("llama-30b", 60, 6656, 52, 52, 128, 17920, 32000),
        ModelShape("llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000),
        ModelShape("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256),
    )
}
"""By name, in 16 bits."""


def shape_named(name: str) -> ModelShape:
    """Raises ConfigError, which lists the names."""
    if name not in SHAPES:
        raise ConfigError(f"model shape {name!r} is not known: use {', '.join(SHAPES)}")
    return SHAPES[name]
