"""Reads a model folder's config.json (and generation_config.json) into a ``ModelConfig``. Loads no torch.

Owns the table of model families, and refuses the settings that no family supports. A family like Llama needs
one function in ``rotary_families`` and one line here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from manylora.models import opt
from manylora.models.fields import Fields
from manylora.models.gemma import read_gemma2, read_gemma3
from manylora.models.rotary_families import read_llama, read_mistral, read_qwen2, read_qwen3
from manylora.models.spec import ModelConfig, ModelError


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: its architecture's name, and the function that reads its config.json.

    ``name`` is config.json's model_type. ``read`` raises ModelError for settings that cannot be served.
    """

    name: str
    architecture: str
    read: Callable[[Fields], ModelConfig]


FAMILIES: tuple[Family, ...] = (
    Family("llama", "LlamaForCausalLM", read_llama),
    Family("mistral", "MistralForCausalLM", read_mistral),
    Family("qwen2", "Qwen2ForCausalLM", read_qwen2),
    Family("qwen3", "Qwen3ForCausalLM", read_qwen3),
    Family("gemma2", "Gemma2ForCausalLM", read_gemma2),
    Family("gemma3_text", "Gemma3ForCausalLM", read_gemma3),
    Family("opt", "OPTForCausalLM", opt.read),
)

_BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}
_BY_MODEL_TYPE = {family.name: family for family in FAMILIES}


def read_model_config(folder: Path) -> ModelConfig:
    """Read the folder's JSON files, filling in missing fields as transformers does.

    Accepts the on-disk layouts of transformers 4 and 5. End-of-sequence ids are taken from
    generation_config.json if it names any, as in transformers' generate, else from config.json.
    Raises ModelError, with a one-line message, when the model cannot be served.
    """
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(f"{folder}: holds a LoRA adapter (adapter_config.json), not a base model")
        raise ModelError(f"{folder}: not a model folder, config.json is missing")
    fields = Fields.of_file(path)
    family = _family(fields)
    if "quantization_config" in fields:
        method = fields.object_or_none("quantization_config")
        name = method.text("quant_method", "unknown method") if method else "unknown method"
        fields.fail(f"quantized checkpoints are not supported ({name}); use the unquantized model")
    config = family.read(fields)
    generation_path = folder / "generation_config.json"
    eos_ids = config.eos_ids
    if generation_path.is_file():
        eos_ids = Fields.of_file(generation_path).token_ids("eos_token_id", ()) or eos_ids
    dtype = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    return dataclasses.replace(config, eos_ids=eos_ids, dtype=dtype)


def _family(fields: Fields) -> Family:
    architectures = fields.texts_or_none("architectures") or ()
    for name in architectures:
        if name in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[name]
    model_type = fields.text("model_type", "")
    if not architectures and model_type in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[model_type]
    given = ", ".join(architectures) or model_type or "none given"
    fields.fail(f"architecture not supported: {given} (supported: {', '.join(_BY_ARCHITECTURE)})")
