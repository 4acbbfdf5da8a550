"""Reads PEFT's adapter_config.json: which settings are refused, and how rank, alpha and targets resolve for a
module.

Follows PEFT 0.21 (LoraConfig, get_pattern_key, check_target_module_exists). A setting has no effect on
inference, or is honoured, or is refused with its reason; none is silently dropped. Knows module names, not
tensors. Imports no torch.

Anyone may have written the file, and ``re`` backtracks: an expression with thirty optional characters runs
for hours and holds the interpreter's lock. So a process of its own (``matching``) matches all but plain
names, and is ended where it takes too long.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from manylora.adapters import matching
from manylora.adapters.files import stamp_of
from manylora.protocol.executor import AdapterError
from manylora.tensorfile import shown

LARGEST_CONFIG_BYTES = 2**20
"""The largest configuration that is read. A configuration that names every module of a 126-layer model three
times takes 0.1 MiB."""

MOST_PATTERNS = 1024
MOST_CHARACTERS = 2**16
"""The limit for all expressions of one setting. One expression for each module of a 126-layer model makes 882
expressions of 30,000 characters."""

_PLAIN = re.compile(r"[\w.]*", re.ASCII)
_MOST_PLAIN = 64
_MOST_WALL_S = 60.0  # long, because the matching process has a low priority on a busy machine

_MOST_SHOWN_KEYS = 8

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
# read them. velora_config changes only the backward pass; dropout is off at inference; megatron_core,
# qalora_group_size and the *_config of initialisations act only together with settings that are refused.
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

# These initialisations subtract the adapter's initial weights from the base weights (loftq: quantise them), and
# PEFT does so again when it loads such an adapter. A base model shared by all adapters cannot be modified for one.
_BASE_CHANGING_INITS = ("pissa", "corda", "olora", "loftq", "lora_ga")
_BASE_KEEPING_INITS = ("gaussian", "eva", "orthogonal", "mica", "true", "false")


class Module(NamedTuple):
    """PEFT's reading of a module: whether it is adapted, at which rank and with which alpha."""

    is_target: bool
    rank: int
    alpha: float


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """A checked adapter_config.json.

    ``target_modules``, ``exclude_modules``: names, or one regex; None means all modules for the first, and
    none for the second. ``rank_pattern``, ``alpha_pattern``: in the file's order; the first pattern that
    matches the whole module name or a dotted end of it counts. ``layers_pattern``: names or regexes of lists
    of layers. ``warnings``: about settings that are ignored.
    """

    base_model: str | None
    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    target_modules: str | frozenset[str] | None
    exclude_modules: str | frozenset[str] | None
    layers_to_transform: frozenset[int]
    layers_pattern: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def modules(self, names: Sequence[str]) -> list[Module]:
        """Resolve each module ("model.layers.0.self_attn.q_proj") as PEFT does. Raises AdapterError where a
        regular expression is invalid or takes too long."""
        ends = r"(.*\.)?({})$"
        layers = Patterns("layers_pattern", self.layers_pattern, "match", r"(?:^|.*?\.){}\.(?P<idx>\d+)\.")
        if not self.layers_pattern:
            layers = Patterns("layers_pattern", ("",), "match", r".*?\.[^.]*\.(?P<idx>\d+)\.")
        matches = first_matches(
            (
                Patterns("target_modules", _expressions(self.target_modules)),
                Patterns("exclude_modules", _expressions(self.exclude_modules)),
                Patterns("rank_pattern", tuple(self.rank_pattern), "match", ends),
                Patterns("alpha_pattern", tuple(self.alpha_pattern), "match", ends),
                layers if self.layers_to_transform else layers._replace(expressions=()),
            ),
            tuple(names),
        )
        ranks, alphas = list(self.rank_pattern.values()), list(self.alpha_pattern.values())
        return [
            Module(
                self._targets(name, target is not None, excluded is not None, layer and layer[1]),
                self.r if rank is None else ranks[rank[0]],
                self.lora_alpha if alpha is None else alphas[alpha[0]],
            )
            for name, target, excluded, rank, alpha, layer in zip(names, *matches, strict=True)
        ]

    def scale(self, alpha: float, rank: int) -> float:
        """Return the factor by which (x A) B is multiplied."""
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def _targets(self, name: str, is_matched: bool, is_excluded: bool, layer: str | None) -> bool:
        """Return whether the module is adapted. ``is_matched``, ``is_excluded``: whether a regex matches it;
        ``layer``: the layer number in the name, None where it does not matter."""
        if is_excluded or (
            isinstance(self.exclude_modules, frozenset) and _is_end(self.exclude_modules, name)
        ):
            return False
        if not isinstance(self.target_modules, frozenset):
            return is_matched or self.target_modules is None
        if name in self.target_modules or not self.layers_to_transform:
            return _is_end(self.target_modules, name)
        return (
            layer is not None
            and int(layer) in self.layers_to_transform
            and _is_end(self.target_modules, name)
        )


def _expressions(modules: str | frozenset[str] | None) -> tuple[str, ...]:
    return (modules,) if isinstance(modules, str) else ()


def _is_end(wanted: frozenset[str], module: str) -> bool:
    """Return whether ``wanted`` holds the module's name or a dotted end of it."""
    parts = module.split(".")
    return any(".".join(parts[first:]) in wanted for first in range(len(parts)))


def read_config(path: Path) -> LoraSettings:
    """Read and check adapter_config.json. Raises AdapterError, which names the fault or the unsupported
    setting."""
    stamp_of(path)  # refuses a pipe, whose opening would block
    try:
        with open(path, "rb") as file:
            raw = file.read(LARGEST_CONFIG_BYTES + 1)
        if len(raw) > LARGEST_CONFIG_BYTES:
            raise AdapterError(f"{path.name} is larger than {LARGEST_CONFIG_BYTES} bytes")
        config = json.loads(raw.decode("utf-8-sig"))
    except OSError as error:
        raise AdapterError(f"cannot read {path.name}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{path.name} is not a JSON object")
    return dataclasses.replace(_settings(config), warnings=_warnings(config))


def _warnings(config: dict[str, Any]) -> tuple[str, ...]:
    """Return a warning that names the unknown settings, which are ignored. Raises AdapterError for
    unsupported settings, and for an unknown setting that is ``true``."""
    peft_type = config.get("peft_type")
    if peft_type != "LORA":
        raise AdapterError(f"peft_type {str(peft_type)[:60]!r} is not supported, only 'LORA'")
    for key, reason in _REFUSED.items():
        if config.get(key):
            raise AdapterError(reason)
    if config.get("bias", "none") not in ("none", None):
        raise AdapterError(f"bias {str(config['bias'])[:60]!r} is not supported, only 'none'")
    _refuse_initialisation(config.get("init_lora_weights"))
    unknown = [
        key for key in config if key not in _REFUSED.keys() | _WITHOUT_EFFECT | _HONOURED and config[key]
    ]
    for key in unknown:
        if config[key] is True:
            raise AdapterError(f"setting {key[:60]!r} is unknown and may change the result")
    if not unknown:
        return ()
    named = ", ".join(shown(repr(key[:60])) for key in unknown[:_MOST_SHOWN_KEYS])
    more = f" and {len(unknown) - _MOST_SHOWN_KEYS} more" if len(unknown) > _MOST_SHOWN_KEYS else ""
    return (f"unknown settings of adapter_config.json are ignored: {named}{more}",)


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
        layers_pattern=_layers_pattern(config.get("layers_pattern")),
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


def _patterns(config: dict[str, Any], key: str, checked: Callable[[Any, str], _Number]) -> dict[str, _Number]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"{key} must be a mapping")
    return {pattern: checked(value, key) for pattern, value in patterns.items()}


def _modules(config: dict[str, Any], key: str) -> str | frozenset[str] | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, str):
        # PEFT knows "all-linear" as a target only, and ignores an empty exclusion.
        if key == "target_modules" and value.lower() == "all-linear":
            return None
        return value if value or key == "target_modules" else None
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return frozenset(value)
    raise AdapterError(f"{key} must be a string or a list of strings")


def _layers(value: Any) -> frozenset[int]:
    layers = [] if value is None else [value] if type(value) is int else value
    if isinstance(layers, list) and all(type(layer) is int for layer in layers):
        return frozenset(layers)
    raise AdapterError("layers_to_transform must be an integer or a list of integers")


def _layers_pattern(value: Any) -> tuple[str, ...]:
    names = [value] if value and isinstance(value, str) else value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise AdapterError("layers_pattern must be a string or a list of strings")
    return tuple(names)


# ---------------------------------------------------------------- regular expressions


class Patterns(NamedTuple):
    """A setting's expressions. ``form``: the expression that PEFT builds from each; ``method``: the function
    of ``re`` that PEFT calls."""

    setting: str
    expressions: tuple[str, ...]
    method: str = "fullmatch"
    form: str = "{}"


@functools.lru_cache(maxsize=256)  # thousands of adapters have the same few configurations
def first_matches(settings: tuple[Patterns, ...], names: tuple[str, ...]) -> tuple[matching.Answer, ...]:
    """Find the first expression of each setting that matches each name. Raises AdapterError where there are
    too many expressions or characters, or where an expression is invalid or takes too long."""
    for setting, expressions, *_ in settings:
        if len(expressions) > MOST_PATTERNS or sum(map(len, expressions)) > MOST_CHARACTERS:
            most = f"{MOST_PATTERNS} regular expressions, or {MOST_CHARACTERS} characters of them"
            raise AdapterError(f"{setting}: more than {most}")
    questions: list[matching.Question] = [
        (method, [form.format(expression) for expression in expressions])
        for _, expressions, method, form in settings
    ]
    own = [expression for _, expressions, *_ in settings for expression in expressions]
    try:
        if len(own) <= _MOST_PLAIN and all(map(_PLAIN.fullmatch, own)):
            return tuple(matching.match(questions, list(names)))
        found = _ask(json.dumps([questions, names]))
        if "answers" in found:
            return tuple(found["answers"])
        raise matching.UnusableExpression(*found["unusable"])
    except matching.UnusableExpression as error:
        question, number, reason = error.args
        setting, expressions, *_ = settings[question]
        shown = f"{setting}: the regular expression {expressions[number][:60]!r}"
        raise AdapterError(f"{shown} cannot be used ({reason})") from error
    except (subprocess.TimeoutExpired, ValueError) as error:
        known = ", ".join(setting for setting, expressions, *_ in settings if expressions)
        raise AdapterError(f"{known}: the regular expressions take too much time or memory") from error


def _ask(question: str) -> dict[str, list[matching.Answer]]:
    """Run ``matching`` as a process on a question in JSON. Raises ValueError where the process was ended or
    crashed, and TimeoutExpired where it takes longer than ``_MOST_WALL_S``."""
    command = [sys.executable, "-I", "-S", "-W", "ignore", matching.__file__]
    done = subprocess.run(command, input=question.encode(), capture_output=True, timeout=_MOST_WALL_S)
    found: dict[str, list[matching.Answer]] = json.loads(done.stdout)
    return found
