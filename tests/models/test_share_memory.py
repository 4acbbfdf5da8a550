"""What a rank holds while it loads its share: its part of the weights, and a block of rows beside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

SHAPE = {
    "num_hidden_layers": 4, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16,
    "intermediate_size": 2752, "vocab_size": 8000, "max_position_embeddings": 128,
}  # fmt: skip
BESIDE_BYTES = 48 * 2**20
"""A block of rows, and what the libraries take; next to nothing for a model of 7B."""

LOAD = """
import sys, types
from pathlib import Path
import torch
from manylora.kernels.cpu import CpuOps
from manylora.kernels.shapes import RankPlace
from manylora.models.config import read_model_config
from manylora.models.decoder import RankedModel
from manylora.models.load import load_model
from manylora.models.share import ModelShare
from tests.models.test_share_memory import peak_bytes
folder, load_format, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
config = read_model_config(folder)
ranked = RankedModel(ModelShare(config, RankPlace(rank, 2), True), types.SimpleNamespace())
torch.empty(2**20).normal_()
ops = CpuOps()
before = peak_bytes()
decoder = load_model(folder, ops=ops, device=torch.device("cpu"), dtype=torch.float32,
                     load_format=load_format, max_positions=64, ranked=ranked)
print(peak_bytes() - before)
"""


def peak_bytes() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_no_more_than_its_part_at_any_time(load_format: str, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config)
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    if load_format == "auto":
        model.save_pretrained(tmp_path)
    else:
        described = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
        (tmp_path / "config.json").write_text(json.dumps(described, default=str))
    del model
    ended = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), load_format, "1"],
        # A fixed threshold: what is freed goes back at once, whatever the allocator has learnt before.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"},
        capture_output=True,
        text=True,
        check=True,
    )
    taken = int(ended.stdout)
    assert 0.45 * whole < taken < 0.5 * whole + BESIDE_BYTES < 0.75 * whole
