"""What an adapter is and what it takes, for people: ``manylora adapters list|check``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manylora.adapters.peft import AdapterSpec
from manylora.adapters.tensorfile import shown
from manylora.kernels.shapes import AdapterGeometry

if TYPE_CHECKING:
    from manylora.adapters.pack import AdapterLayout  # brings torch


def describe(spec: AdapterSpec, layout: AdapterLayout, geometry: AdapterGeometry) -> dict[str, Any]:
    """Facts about an adapter that fits its model, as JSON types.

    ``pages``, ``pool_bytes``: what it takes when resident; ``file_bytes``: its weights file; ``slack``: the
    share of its pages' bytes that holds no weight.
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
        "layers": sum(any(row[layer] for row in spec.ranks) for layer in range(geometry.page.layers)),
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


def of_ranks(facts: dict[str, Any], count: int, is_sharded: bool) -> dict[str, Any]:
    """What there is to say beside, and instead of, ``describe``'s ``facts`` about the first of ``count`` ranks.
    Each has a part of every page."""
    return {
        "tensor_parallel_size": count,
        "lora_sharding": "sharded" if is_sharded else "replicated",
        "pages_per_rank": [facts["pages"]] * count,
        "pool_bytes": facts["pool_bytes"] * count,
        "pool_bytes_per_rank": [facts["pool_bytes"]] * count,
    }


def render(facts: dict[str, Any]) -> str:
    """``describe``'s facts as a few lines of text."""
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
