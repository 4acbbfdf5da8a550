"""Which family answers to which architecture name. A new family is one file and one line here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from manylora.models import llama, mistral, opt, qwen2, qwen3
from manylora.models.fields import Fields
from manylora.models.spec import ModelConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: the architecture names it answers to, and how it reads its config.json.

    ``name`` is config.json's model_type. ``read`` raises ModelError for settings that cannot be served.
    """

    name: str
    architectures: tuple[str, ...]
    read: Callable[[Fields], ModelConfig]


FAMILIES: tuple[Family, ...] = (
    Family("llama", ("LlamaForCausalLM",), llama.read),
    Family("mistral", ("MistralForCausalLM",), mistral.read),
    Family("qwen2", ("Qwen2ForCausalLM",), qwen2.read),
    Family("qwen3", ("Qwen3ForCausalLM",), qwen3.read),
    Family("opt", ("OPTForCausalLM",), opt.read),
)

BY_ARCHITECTURE: dict[str, Family] = {
    architecture: family for family in FAMILIES for architecture in family.architectures
}
BY_MODEL_TYPE: dict[str, Family] = {family.name: family for family in FAMILIES}
