"""Inspects adapters against the model's config, before or without loading the model: no weights, no torch.

Serves ``manylora adapters``, and checks the adapters that are named when a server starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from manylora.adapters.peft import AdapterSpec, TextCheck, inspect_adapter
from manylora.adapters.registry import Registry
from manylora.adapters.sources import discover
from manylora.config.declaring import ConfigError
from manylora.config.sections import EngineSettings, lora_sharding_of
from manylora.kernels.shapes import AdapterGeometry, RankPlace
from manylora.models.config import read_model_config
from manylora.models.share import ModelShare, check_count
from manylora.models.source import resolve_model
from manylora.models.spec import ModelConfig, ModelError
from manylora.protocol.executor import AdapterError
from manylora.tensorfile import shown
from manylora.types import adapter_name_fault, why_reserved

if TYPE_CHECKING:
    from manylora.adapters.pack import AdapterLayout  # brings torch

_ITEMSIZE = {"auto": 4, "float32": 4, "float16": 2, "bfloat16": 2}


def check_named_adapters(settings: EngineSettings) -> None:
    """Check the names, paths and headers of the adapters that are named at the start.

    Raises ConfigError at the first adapter that cannot be served. The results are kept in the user's cache
    directory, so that serving these adapters does not read their headers again.
    """
    adapters = settings.adapters
    if not adapters.adapters:
        return
    looks = _geometries(settings)
    registry = Registry(looks.whole, looks.config.names.layer_prefix, texts=looks.texts)
    try:
        for name, path in adapters.adapters:
            if fault := adapter_name_fault(name):
                raise ConfigError(f"the adapter name {name[:200]!r} cannot be served: a name {fault}")
            if reason := why_reserved(name, settings.model.names):
                raise ConfigError(f"adapter {name!r} cannot be served: {reason}")
            try:
                registry.inspect(Path(path), adapters.max_adapter_rank)
            except AdapterError as error:
                raise ConfigError(f"adapter {name!r} in {path} cannot be served: {error}") from error
    finally:
        registry.close()


def check_adapter(settings: EngineSettings, path: str, *, as_json: bool) -> str:
    """Describe an adapter as text or JSON. Raises ConfigError if it cannot be served."""
    looks = _geometries(settings)
    try:
        facts = _facts(settings, looks, Path(path))
    except AdapterError as error:
        raise ConfigError(str(error)) from error
    return json.dumps(facts, indent=2) if as_json else render(facts)


def list_adapters(settings: EngineSettings, path: str, *, as_json: bool) -> str:
    """List the adapters in a folder, one a line or as JSON, with the reason for each that does not fit.

    Raises ConfigError where ``path`` is not a folder, and for a model that cannot be served.
    """
    looks = _geometries(settings)
    if not Path(path).is_dir():
        raise ConfigError(f"{path} is not a folder")
    listed: dict[str, dict[str, Any]] = {}
    for name, folder in discover(Path(path)):
        try:
            listed[name] = _facts(settings, looks, folder)
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
    warnings = "".join(f"\n{'':<24} warning: {warning}" for warning in facts["warnings"])
    return f"{name:<24} rank {rank:<7} {facts['pages']:>5} pages  {facts['dtype']:<5} {modules}{warnings}"


class _Geometries(NamedTuple):
    """The model's config, and the geometries that its adapters are checked against.

    ``whole``: of adapters' files; ``first``: of the first rank's pages. With one rank the two are the same.
    """

    config: ModelConfig
    whole: AdapterGeometry
    first: AdapterGeometry
    is_sharded: bool
    texts: TextCheck


def _geometries(settings: EngineSettings) -> _Geometries:
    count = settings.tensor_parallel_size
    page_args = settings.cache.page_tokens, _ITEMSIZE[settings.model.dtype]
    try:
        folder = resolve_model(settings.model.model)
        config = read_model_config(folder)
        check_count(config, count)
        is_sharded = lora_sharding_of(settings.lora_sharding, count) == "sharded"
        share = ModelShare(config, RankPlace(0, count), is_sharded, head_fixed_by=settings.head_fixed_by)
        whole, first = share.whole_geometry(*page_args), share.geometry(*page_args)
        texts = TextCheck(folder, resolve_model(settings.model.tokenizer or settings.model.model))
        return _Geometries(config, whole, first, is_sharded, texts)
    except (ModelError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _facts(settings: EngineSettings, looks: _Geometries, folder: Path) -> dict[str, Any]:
    from manylora.adapters.pack import layout_of  # brings torch

    limit = settings.adapters.max_adapter_rank
    spec = inspect_adapter(folder, looks.whole, looks.config.names.layer_prefix, limit, looks.texts)
    facts = describe(spec, layout_of(spec, looks.first), looks.first)
    count = settings.tensor_parallel_size
    if count > 1:  # each rank has a part of every page
        facts |= {
            "tensor_parallel_size": count,
            "lora_sharding": "sharded" if looks.is_sharded else "replicated",
            "pages_per_rank": [facts["pages"]] * count,
            "pool_bytes": facts["pool_bytes"] * count,
            "pool_bytes_per_rank": [facts["pool_bytes"]] * count,
        }
    return facts


# ---------------------------------------------------------------- facts about an adapter, for people


def describe(spec: AdapterSpec, layout: AdapterLayout, geometry: AdapterGeometry) -> dict[str, Any]:
    """Facts about an adapter that fits its model, as JSON types.

    ``pages``, ``pool_bytes``: the size of the resident adapter; ``file_bytes``: the size of its weights file;
    ``slack``: the share of its pages' bytes that holds no weight.
    """
    held = sum(
        rank * (projection.in_features + projection.out_features)
        for projection, ranks in zip(geometry.projections, spec.ranks)
        for rank in ranks
    )
    pool_bytes = layout.num_pages * geometry.page.page_bytes
    ranks = sorted({rank for row in spec.ranks for rank in row if rank})
    scales = sorted({scale for row, r in zip(spec.scales, spec.ranks) for scale, rank in zip(row, r) if rank})
    return {
        "path": spec.path,
        "fits": True,
        "base_model": spec.base_model,
        "modules": list(spec.modules),
        "layers": sum(map(any, zip(*spec.ranks[: geometry.num_layer_projections]))),
        "of_layers": geometry.page.layers,
        "ranks": ranks,
        "scaling": "lora_alpha / sqrt(r)" if spec.use_rslora else "lora_alpha / r",
        "scales": scales,
        "dtype": spec.dtype,
        "warnings": list(spec.warnings),
        "file_bytes": spec.weights.size_bytes,
        "pages": layout.num_pages,
        "pool_bytes": pool_bytes,
        "slack": 1.0 - held * geometry.itemsize / pool_bytes,
    }


def render(facts: dict[str, Any]) -> str:
    """Render the facts of ``describe`` as a few lines of text."""
    taken = f"{facts['pages']} pages, {facts['pool_bytes'] / 2**20:.1f} MiB"
    if "tensor_parallel_size" in facts:
        count, size = facts["tensor_parallel_size"], facts["pool_bytes_per_rank"][0]
        taken += f"; on each of {count} ranks {facts['pages']} pages, {size / 2**20:.1f} MiB"
    layers = f"{facts['layers']} of {facts['of_layers']} layers"
    rows = (
        ("adapter", facts["path"]),
        ("trained on", shown(facts["base_model"] or "(not stated)")),
        ("adapts", f"{', '.join(facts['modules'])} in {layers}"),
        ("rank", _span(facts["ranks"])),
        ("scale", f"{_span(facts['scales'])} = {facts['scaling']}"),
        ("weights", f"{facts['dtype']}, {facts['file_bytes'] / 2**20:.1f} MiB"),
        ("takes", f"{taken} ({facts['slack']:.0%} unused)"),
        ("fits", "yes" if facts["fits"] else "no"),
        *(("warning", warning) for warning in facts["warnings"]),
    )  # fmt: skip
    return "\n".join(f"{name:<11}{value}" for name, value in rows)


def _span(values: list[float]) -> str:
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"
