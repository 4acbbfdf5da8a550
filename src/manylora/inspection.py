"""Looks at adapters with the model's config alone, before or without loading the model: no weights, no torch.

For ``manylora adapters``, and for the adapters that a start names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from manylora.adapters.peft import inspect_adapter
from manylora.adapters.registry import Registry
from manylora.adapters.report import describe, render
from manylora.adapters.sources import discover
from manylora.config import ConfigError, EngineSettings
from manylora.kernels.shapes import AdapterGeometry, adapter_geometry
from manylora.models.config import ModelConfig, ModelError, read_model_config
from manylora.models.source import resolve_model
from manylora.protocol import AdapterError
from manylora.types import adapter_name_fault, why_reserved

_ITEMSIZE = {"auto": 4, "float32": 4, "float16": 2, "bfloat16": 2}


def check_named_adapters(settings: EngineSettings) -> None:
    """Refuse the adapters that are named from the start for what their names, paths and headers say.

    Raises ConfigError. What was found is remembered in the user's cache directory, so that serving them reads no
    header again.
    """
    adapters = settings.adapters
    if not adapters.adapters:
        return
    config, geometry = _geometry(settings)
    registry = Registry(geometry, config.names.layer_prefix)
    try:
        for name, path in adapters.adapters:
            if fault := adapter_name_fault(name):
                raise ConfigError(f"the adapter name {name[:200]!r} cannot be served: a name {fault}")
            if reason := why_reserved(name, settings.model.name):
                raise ConfigError(f"adapter {name!r} cannot be served: {reason}")
            try:
                registry.inspect(Path(path), adapters.max_adapter_rank)
            except AdapterError as error:
                raise ConfigError(f"adapter {name!r} in {path} cannot be served: {error}") from error
    finally:
        registry.close()


def check_adapter(settings: EngineSettings, path: str, *, as_json: bool) -> str:
    """What the adapter is; raises ConfigError where it cannot be served."""
    config, geometry = _geometry(settings)
    try:
        facts = _facts(settings, config, geometry, Path(path))
    except AdapterError as error:
        raise ConfigError(str(error)) from error
    return json.dumps(facts, indent=2) if as_json else render(facts)


def list_adapters(settings: EngineSettings, path: str, *, as_json: bool) -> str:
    """One line an adapter, the ones that do not fit with the reason; raises ConfigError."""
    config, geometry = _geometry(settings)
    if not Path(path).is_dir():
        raise ConfigError(f"{path} is not a folder")
    listed: dict[str, dict[str, Any]] = {}
    for name, folder in discover(Path(path)):
        try:
            listed[name] = _facts(settings, config, geometry, folder)
        except AdapterError as error:
            listed[name] = {"path": str(folder), "fits": False, "reason": str(error)}
    if as_json:
        return json.dumps(listed, indent=2)
    return "\n".join(_line(name, facts) for name, facts in listed.items()) or f"no adapters in {path}"


def _line(name: str, facts: dict[str, Any]) -> str:
    if not facts["fits"]:
        return f"{name:<24} does not fit: {facts['reason']}"
    modules = ", ".join(module.rpartition(".")[2] for module in facts["modules"])
    rank = "-".join(str(r) for r in sorted({facts["ranks"][0], facts["ranks"][-1]}))
    return f"{name:<24} rank {rank:<7} {facts['pages']:>5} pages  {facts['dtype']:<5} {modules}"


def _geometry(settings: EngineSettings) -> tuple[ModelConfig, AdapterGeometry]:
    try:
        config = read_model_config(resolve_model(settings.model.model))
        page = config.page_shape(settings.cache.page_tokens, _ITEMSIZE[settings.model.dtype])
        return config, adapter_geometry(page, config.layer_groups)
    except (ModelError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _facts(
    settings: EngineSettings, config: ModelConfig, geometry: AdapterGeometry, folder: Path
) -> dict[str, Any]:
    from manylora.adapters.pack import layout_of  # brings torch

    limit = settings.adapters.max_adapter_rank
    spec = inspect_adapter(folder, geometry, config.names.layer_prefix, limit)
    return describe(spec, layout_of(spec, geometry), geometry)
