"""Which family answers to which architecture name. A new family is one file and one entry here."""

from __future__ import annotations

from manylora.models import llama, mistral, opt, qwen2, qwen3
from manylora.models.spec import Family

FAMILIES: tuple[Family, ...] = (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY, opt.FAMILY)

BY_ARCHITECTURE: dict[str, Family] = {
    architecture: family for family in FAMILIES for architecture in family.architectures
}
BY_MODEL_TYPE: dict[str, Family] = {family.name: family for family in FAMILIES}
