"""The tables equal transformers' own, bit for bit, for settings that published models use and odder ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from manylora.models.config import read_model_config
from manylora.models.rope import rope_tables

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "integer theta": {"rope_type": "default", "rope_theta": 1000000},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama 3.1": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.1},
    "qwen yarn": YARN,
    "yarn, implied factor": YARN | {"factor": None},
    "yarn, given attention factor": YARN | {"attention_factor": 0.9},
    "yarn, mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 0.4},
    "yarn, mscale alone": YARN | {"mscale": 0.707},
    "yarn, betas": YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn, tiny": YARN | {"original_max_position_embeddings": 4, "rope_theta": 100.0},
}


@pytest.mark.parametrize("name", sorted(SETTINGS))
@pytest.mark.parametrize("head_dim", [20, 128])
def test_tables_equal_transformers(name: str, head_dim: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "head_dim": head_dim}
    sizes |= {"max_position_embeddings": 131072}
    raw = {"architectures": ["LlamaForCausalLM"], "rope_parameters": SETTINGS[name], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    cos, sin = rope_tables(read_model_config(tmp_path), 9000, torch.device("cpu"))
    assert cos.shape == sin.shape == (9000, head_dim // 2)
    assert cos.dtype == sin.dtype == torch.float32
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(rope_parameters=dict(SETTINGS[name]), **sizes))
    their_cos, their_sin = theirs(torch.zeros(1), torch.arange(9000)[None])
    assert torch.equal(cos, their_cos[0, :, : head_dim // 2])
    assert torch.equal(sin, their_sin[0, :, : head_dim // 2])


@pytest.mark.parametrize("given", [{}, {"factor": 40.0}, {"attention_factor": 0.7}, {"factor": 0.5}], ids=str)
def test_longrope_has_a_table_for_short_contexts_and_one_for_long_ones(
    given: dict[str, float], tmp_path: Path
) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + 0.01 * number for number in range(48)],
        "long_factor": [1.0 + 1.3 * number for number in range(48)],
        **given,
    }
    sizes = {"hidden_size": 192, "num_attention_heads": 2, "max_position_embeddings": 131072}
    raw = {"architectures": ["LlamaForCausalLM"], "rope_parameters": rope, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_model_config(tmp_path)
    assert config.long_from == 4096
    tables = rope_tables(config, 9000, torch.device("cpu"))
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(rope_parameters=dict(rope), **sizes))
    for first, count in ((0, 4096), (4096, 9000)):
        for ours, their in zip(tables, theirs(torch.zeros(1), torch.arange(count)[None]), strict=True):
            assert torch.equal(ours[first : first + count], their[0, :, :48])
