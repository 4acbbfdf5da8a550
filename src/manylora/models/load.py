"""Loads a model folder into a running decoder, and chooses its dtype.

Owns the order of loading. It reads the config, plans every tensor, checks the plan against the checkpoint
before it allocates any memory, then copies. Does not depend on the device or on the implementation of the
operations.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from manylora.kernels.ops import Ops
from manylora.models.config import read_model_config
from manylora.models.decoder import Decoder, RankedModel, build_decoder
from manylora.models.spec import ModelConfig, ModelError
from manylora.models.weights import (
    Checkpoint,
    CheckpointWeights,
    DummyWeights,
    Part,
    PlannedWeights,
    planned_bytes,
)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_log = logging.getLogger(__name__)


def resolve_dtype(name: str, device_type: Literal["cpu", "cuda"], checkpoint_dtype: str) -> torch.dtype:
    """Return the dtype to run in.

    ``auto`` gives float32 on a CPU. On CUDA it gives the checkpoint's dtype, or bfloat16 for float32 and
    float64. Raises ModelError where the result would not be float32, float16 or bfloat16.
    """
    if name == "auto":
        if device_type == "cpu":
            return torch.float32
        name = "bfloat16" if checkpoint_dtype in ("float32", "float64") else checkpoint_dtype
    if name not in _DTYPES:
        raise ModelError(f"dtype {name!r} is not supported (supported: auto, {', '.join(_DTYPES)})")
    return _DTYPES[name]


def load_model(
    folder: Path,
    *,
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    load_format: Literal["auto", "dummy"] = "auto",
    max_positions: int,
    progress: Callable[[int, int], None] | None = None,
    ranked: RankedModel | None = None,
) -> Decoder:
    """Load the model of ``folder`` onto ``device``.

    ``dummy`` reads only the config and makes deterministic random weights. ``max_positions`` is the longest
    context that will run. ``progress(done_bytes, total_bytes)`` is called after every tensor of a checkpoint.
    ``ranked``: load only that rank's part. All ranks must load at the same time, because they compare tied
    matrices together. Raises ModelError, with a one-line message, when the folder cannot be served.
    """
    config = read_model_config(folder)
    if config.rope is None and max_positions > config.max_position_embeddings:
        raise ModelError(
            f"{folder}: the model has {config.max_position_embeddings} learned positions, "
            f"too few for a context of {max_positions}"
        )
    if load_format == "dummy":
        return build_decoder(config, DummyWeights(device, dtype), ops, device, max_positions, ranked)
    checkpoint = Checkpoint(folder)
    config = _resolve_tie(config, checkpoint, ranked)
    plan = PlannedWeights()
    build_decoder(config, plan, ops, torch.device("meta"), max_positions=1, ranked=ranked)
    checkpoint.check(plan.parts)
    total_bytes = planned_bytes(plan.parts, dtype)
    weights = CheckpointWeights(checkpoint, device, dtype, total_bytes, progress)
    return build_decoder(config, weights, ops, device, max_positions, ranked)


def share_bytes(config: ModelConfig, ops: Ops, ranked: RankedModel, dtype: torch.dtype) -> int:
    """Return the bytes of a rank's share of the weights. ``config`` is the loaded decoder's."""
    plan = PlannedWeights()
    build_decoder(config, plan, ops, torch.device("meta"), max_positions=1, ranked=ranked)
    return planned_bytes(plan.parts, dtype)


def _resolve_tie(config: ModelConfig, checkpoint: Checkpoint, ranked: RankedModel | None) -> ModelConfig:
    """Decide which stored tensors serve as embedding and head of a tied model, as transformers 5 does.

    If both are stored and equal, only the embedding is loaded. If only lm_head is stored, it serves as
    embedding too. If both are stored and differ, the config is wrong: warn, and return it untied so that both
    are loaded.
    """
    names = config.names
    embedding, head = f"{names.body}{names.embedding}.weight", f"{names.head}.weight"
    if not config.tie_embeddings or head not in checkpoint:
        return config
    if embedding not in checkpoint:
        checkpoint.alias(embedding, head)
        return config
    if _are_equal(config, checkpoint, embedding, head, ranked):
        return config
    _log.warning(
        "%s: config.json ties lm_head to the embeddings, but the stored ones differ; both are used",
        checkpoint.folder,
    )
    return dataclasses.replace(config, tie_embeddings=False)


def _are_equal(
    config: ModelConfig, checkpoint: Checkpoint, embedding: str, head: str, ranked: RankedModel | None
) -> bool:
    """Return whether the two stored matrices are equal. Raises ModelError where a shape is not the config's.

    Each rank compares its own rows; the ranks then add up their findings, so that all return the same.
    """
    shape, rows = (config.vocab_size, config.embedding_size), None if ranked is None else ranked.share.vocab
    checkpoint.check(Part(name, shape) for name in (embedding, head))
    pairs = zip(*(checkpoint.blocks(Part(name, shape, rows)) for name in (embedding, head)), strict=True)
    differs = any(not torch.equal(one, other) for (_, one), (_, other) in pairs)
    if ranked is None:
        return not differs
    total = torch.tensor([float(differs)])
    ranked.peers.add_up(total, "start")
    return not total.item()
