"""PEFT adapters of random weights for a model that is served, where only what they cost matters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from manylora.kernels.shapes import Projection
from manylora.models.spec import ModelConfig


def write_random_adapters(
    folder: Path,
    config: ModelConfig,
    dtype: str,
    ranks: Sequence[int],
    count: int,
    projections: Sequence[Projection] | None = None,
) -> list[Path]:
    """Folders ``adapter-0``, ... on these projections of all layers that have them (None: on every one), of
    ``ranks`` in turn. Those of one rank share a file, not pages."""
    folder.mkdir(parents=True, exist_ok=True)
    if projections is None:
        projections = [projection for group in config.groups for projection in group.projections]
    stems = [
        (f"base_model.model.{config.names.layer_prefix}{layer}.{p.module}", p)
        for layer, groups in enumerate(config.layer_groups)
        for p in projections
        if any(p in group.projections for group in groups)
    ]
    generator = torch.Generator().manual_seed(0)
    for rank in ranks[:count]:
        tensors = {}
        for stem, p in stems:
            for side, sizes in (("A", (rank, p.in_features)), ("B", (p.out_features, rank))):
                values = torch.empty(sizes, dtype=getattr(torch, dtype))
                tensors[f"{stem}.lora_{side}.weight"] = values.uniform_(-0.02, 0.02, generator=generator)
        save_file(tensors, folder / f"rank-{rank}.safetensors")
    modules = sorted({p.module.rpartition(".")[2] for p in projections})
    paths = []
    for index in range(count):
        rank = ranks[index % len(ranks)]
        own = folder / f"adapter-{index}"
        own.mkdir()
        peft = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
        (own / "adapter_config.json").write_text(json.dumps(peft))
        (own / "adapter_model.safetensors").symlink_to(folder / f"rank-{rank}.safetensors")
        paths.append(own)
    return paths
