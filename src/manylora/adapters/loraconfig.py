"""PEFT's adapter_config.json: what is refused, and how rank, alpha and targets resolve for a module.

Follows PEFT 0.21 (LoraConfig, get_pattern_key, check_target_module_exists). A setting either does not touch
inference, or is honoured, or is refused with its reason; nothing is silently dropped. Knows module names,
not tensors. No torch here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from manylora.adapters.patterns import NamePatterns
from manylora.adapters.tensorfile import stamp_of
from manylora.protocol import AdapterError

LARGEST_CONFIG_BYTES = 2**20
"""One that names every module of a 126-layer model three times takes 0.1 MiB."""

_MOST_LAYERS_NAMES = 20
_LAYERS_NAME = re.compile(r"[\w.]{1,200}")

_REFUSED = {
    "use_dora": "DoRA (use_dora) is not supported",
    "modules_to_save": "modules_to_save is not supported: whole layers trained beside LoRA cannot be served",
    "lora_bias": "lora_bias is not supported",
    "trainable_token_indices": "new or retrained tokens (trainable_token_indices) are not supported",
    "target_parameters": "LoRA on bare parameters (target_parameters) is not supported",
    "layer_replication": "layer_replication is not supported: it changes the base model's layers",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens) is not supported",
    "use_qalora": "QALoRA (use_qalora) is not supported: it pools the inputs",
    "arrow_config": "Arrow routing (arrow_config) is not supported",
    "use_bdlora": "block-diagonal LoRA (use_bdlora) is not supported",
    "kasa_config": "KaSA (kasa_config) is not supported: it needs modified base weights",
    "monteclora_config": "Monte Carlo LoRA (monteclora_config) is not supported",
    "megatron_config": "Megatron layers (megatron_config) are not supported",
    "fan_in_fan_out": "fan_in_fan_out is not supported: the base model's layers are Linear, not Conv1D",
    "enable_lora": "merged linears (enable_lora, of early PEFT) are not supported",
}  # fmt: skip

# Settings of training, of initialisation, or of bookkeeping: the forward pass of a trained adapter does not
# read them. velora_config swaps the backward pass only; dropout is off at inference; megatron_core,
# qalora_group_size and the *_config of initialisations act only together with settings refused elsewhere.
_WITHOUT_EFFECT = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "lora_dropout", "qalora_group_size", "megatron_core", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "velora_config", "runtime_config", "ensure_weight_tying",
    "merge_weights",
})  # fmt: skip

_HONOURED = frozenset({
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "bias", "init_lora_weights",
})  # fmt: skip

_Number = TypeVar("_Number", int, float)

# These initialisations subtract the adapter's start from the base weights (loftq: quantise them), and PEFT
# does so again when it loads such an adapter. A base model shared by all adapters cannot be modified for one.
_BASE_CHANGING_INITS = ("pissa", "corda", "olora", "loftq", "lora_ga")
_BASE_KEEPING_INITS = ("gaussian", "eva", "orthogonal", "mica", "true", "false")


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """A checked adapter_config.json.

    ``target_modules``, ``exclude_modules``: names, or one regex; None: all, and none. ``rank_pattern``,
    ``alpha_pattern``: in the file's order, of which the first match counts, over the whole module name or a dotted
    end of it. ``layers_patterns``: each finds a layer's number in a module's name, as ``idx``.
    """

    base_model: str | None
    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: NamePatterns[int]
    alpha_pattern: NamePatterns[float]
    target_modules: _Modules | None
    exclude_modules: _Modules | None
    layers_to_transform: frozenset[int]
    layers_patterns: tuple[re.Pattern[str], ...]

    def rank(self, module: str) -> int:
        """The rank that PEFT gives a module ("model.layers.0.self_attn.q_proj")."""
        return self.rank_pattern.get(module, self.r)

    def scale(self, module: str, rank: int) -> float:
        """What (x A) B is multiplied by, for a module of this rank."""
        alpha = self.alpha_pattern.get(module, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, module: str) -> bool:
        """Whether PEFT would adapt this module; True for all when the file names no targets."""
        if self.exclude_modules is not None and _are_meant(self.exclude_modules, module):
            return False
        if self.target_modules is None:
            return True
        if not isinstance(self.target_modules, frozenset):
            return self.target_modules.get(module, False)
        if module in self.target_modules:
            return True
        return _are_meant(self.target_modules, module) and self._transforms(module)

    def _transforms(self, module: str) -> bool:
        if not self.layers_to_transform:
            return True
        for pattern in self.layers_patterns:
            match = pattern.match(module)
            if match:
                return int(match["idx"]) in self.layers_to_transform
        return False


_Modules = NamePatterns[bool] | frozenset[str]
"""A regex, or names."""


def _are_meant(wanted: _Modules, module: str) -> bool:
    """Of names: whether one is the module's, or a dotted end of it."""
    if not isinstance(wanted, frozenset):
        return wanted.get(module, False)
    parts = module.split(".")
    return any(".".join(parts[first:]) in wanted for first in range(len(parts)))


def read_config(path: Path) -> LoraSettings:
    """Read and check adapter_config.json. Raises AdapterError saying what is wrong or unsupported."""
    stamp_of(path)  # a pipe would be waited for
    try:
        with open(path, "rb") as file:
            raw = file.read(LARGEST_CONFIG_BYTES + 1)
        if len(raw) > LARGEST_CONFIG_BYTES:
            raise AdapterError(f"{path.name} is larger than {LARGEST_CONFIG_BYTES} bytes")
        config = json.loads(raw.decode("utf-8"))
    except OSError as error:
        raise AdapterError(f"cannot read {path.name}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{path.name} is not a JSON object")
    _refuse_unsupported(config)
    return _settings(config)


def _refuse_unsupported(config: dict[str, Any]) -> None:
    peft_type = config.get("peft_type")
    if peft_type != "LORA":
        raise AdapterError(f"peft_type {str(peft_type)[:60]!r} is not supported, only 'LORA'")
    for key, reason in _REFUSED.items():
        if config.get(key):
            raise AdapterError(reason)
    if config.get("bias", "none") not in ("none", None):
        raise AdapterError(f"bias {str(config['bias'])[:60]!r} is not supported, only 'none'")
    _refuse_initialisation(config.get("init_lora_weights"))
    for key in config.keys() - _REFUSED.keys() - _WITHOUT_EFFECT - _HONOURED:
        value = config[key]
        # A later PEFT's numbers tune a feature that something else switches on (qalora_group_size is one),
        # and they come with non-zero defaults; a switch, a list, a mapping or a name may be that something.
        if value and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise AdapterError(f"setting {str(key)[:60]!r} is unknown and may change the result")


def _refuse_initialisation(init: Any) -> None:
    if not isinstance(init, str):
        return
    name = init.lower()
    if name.startswith(_BASE_CHANGING_INITS):
        raise AdapterError(
            f"init_lora_weights {init[:60]!r} is not supported: it needs modified base weights; save the "
            "adapter with PEFT's path_initial_model_for_weight_conversion to make it a plain LoRA adapter"
        )
    if name not in _BASE_KEEPING_INITS:
        raise AdapterError(f"unknown init_lora_weights {init[:60]!r}")


def _settings(config: dict[str, Any]) -> LoraSettings:
    base = config.get("base_model_name_or_path")
    layers = config.get("layers_to_transform")
    if isinstance(config.get("target_modules"), str) and layers is not None:
        raise AdapterError("layers_to_transform cannot be used when target_modules is a string")
    return LoraSettings(
        base_model=base if isinstance(base, str) else None,
        r=_rank(config.get("r", 8), "r"),
        lora_alpha=_alpha(config.get("lora_alpha", 8), "lora_alpha"),
        use_rslora=_flag(config, "use_rslora"),
        rank_pattern=_patterns(config, "rank_pattern", _rank),
        alpha_pattern=_patterns(config, "alpha_pattern", _alpha),
        target_modules=_modules(config, "target_modules"),
        exclude_modules=_modules(config, "exclude_modules"),
        layers_to_transform=_layers(layers),
        layers_patterns=_layers_patterns(config.get("layers_pattern")),
    )


def _flag(config: dict[str, Any], key: str) -> bool:
    value = config.get(key) or False
    if not isinstance(value, bool):
        raise AdapterError(f"{key} must be true or false, not {str(value)[:60]!r}")
    return value


def _rank(value: Any, key: str) -> int:
    if type(value) is not int or value < 1:
        raise AdapterError(f"{key} must hold a positive integer, not {str(value)[:60]!r}")
    return value


def _alpha(value: Any, key: str) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e30:
        raise AdapterError(f"{key} must hold a finite number, not {str(value)[:60]!r}")
    return float(value)


def _patterns(
    config: dict[str, Any], key: str, checked: Callable[[Any, str], _Number]
) -> NamePatterns[_Number]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"{key} must be a mapping")
    return NamePatterns({p: checked(value, key) for p, value in patterns.items()}, key, ends=True)


def _modules(config: dict[str, Any], key: str) -> _Modules | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, str):
        # PEFT looks for this name among targets only, and takes no empty exclusion for one.
        if key == "target_modules" and value.lower() == "all-linear":
            return None
        return NamePatterns({value: True}, key) if value or key == "target_modules" else None
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return frozenset(value)
    raise AdapterError(f"{key} must be a string or a list of strings")


def _layers(value: Any) -> frozenset[int]:
    layers = [] if value is None else [value] if type(value) is int else value
    if isinstance(layers, list) and all(type(layer) is int for layer in layers):
        return frozenset(layers)
    raise AdapterError("layers_to_transform must be an integer or a list of integers")


def _layers_patterns(value: Any) -> tuple[re.Pattern[str], ...]:
    """Of names of lists of layers, such as "layers": ``re`` finds these at once, which it would not any regex."""
    names = [value] if isinstance(value, str) else value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise AdapterError("layers_pattern must be a string or a list of strings")
    names = [name for name in names if name]
    if len(names) > _MOST_LAYERS_NAMES:
        raise AdapterError(f"layers_pattern holds over {_MOST_LAYERS_NAMES} names")
    for name in names:
        if not _LAYERS_NAME.fullmatch(name):
            raise AdapterError(f"layers_pattern: {name[:60]!r} is not a name of layers, such as 'layers'")
    patterns = [rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\." for name in names]
    return tuple(map(re.compile, patterns or [r".*?\.[^.]*\.(?P<idx>\d+)\."]))
