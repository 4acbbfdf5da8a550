"""Where the decoder asks for LoRA: adapted projections must act as transformers' merged weights do.

The operation itself is the kernels room's; here it is a stand-in that looks its matrices up by module path.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from manylora_lab.bench.reference import ReferenceOps

from manylora.kernels.ops import LoraSite, LoraStep, SampledRows
from manylora.models.load import load_model
from tests.models.step_builder import Stepper
from tests.models.tiny import MAX_POSITIONS, make_model

RANK = 3


class DenseLora(ReferenceOps):
    """Adds x A B by table, one adapter for all tokens; remembers which groups ran."""

    def __init__(self) -> None:
        self.matrices: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.layer_prefix = ""
        self.calls: list[tuple[int, str]] = []
        self.rows: list[int] = []

    def lora(self, y: torch.Tensor, x: torch.Tensor, site: LoraSite, step: LoraStep) -> None:
        group, layer = site.group, site.layer
        self.calls.append((layer, group.name))
        self.rows.append(len(y))
        assert y.is_contiguous()
        assert x.stride(-1) == 1
        for i, projection in enumerate(group.projections):
            a, b = self.matrices[f"{self.layer_prefix}{layer}.{projection.module}"]
            y[:, group.offsets[i] : group.offsets[i + 1]] += x @ a @ b


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral-window", "opt", "opt-350m"])
def test_adapted_projections_act_as_merged_weights(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path)
    ops = DenseLora()
    decoder = load_model(
        tmp_path, ops=ops, device=torch.device("cpu"), dtype=torch.float32, max_positions=MAX_POSITIONS
    )
    ops.layer_prefix = decoder.config.names.layer_prefix
    modules = dict(model.named_modules())
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in range(decoder.config.num_layers):
            for projection in (p for group in decoder.config.groups for p in group.projections):
                path = f"{decoder.config.names.layer_prefix}{layer}.{projection.module}"
                a = torch.randn(projection.in_features, RANK) * 0.1
                b = torch.randn(RANK, projection.out_features) * 0.1
                ops.matrices[path] = (a, b)
                modules[path].weight += (a @ b).T
    tokens = list(range(5, 18))
    stepper = Stepper(decoder)
    batch = dataclasses.replace(stepper.batch({"a": tokens}), lora="a plan")
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(decoder.forward(batch, stepper.pool), expected, atol=1e-4, rtol=0.0)
    names = [group.name for group in decoder.config.groups]
    assert ops.calls == [(layer, name) for layer in range(decoder.config.num_layers) for name in names]

    ops.rows.clear()
    some = torch.tensor([3, 12])
    narrowed = dataclasses.replace(batch, sample_index=some, sampled=SampledRows("their plan"))
    found = decoder.forward(narrowed, stepper.pool)
    torch.testing.assert_close(found, expected[some], atol=1e-4, rtol=0.0)
    # What comes after the last layer's attention ran on two tokens.
    assert ops.rows == [len(tokens)] * (len(ops.rows) - 3) + [2] * 3


def test_no_lora_is_asked_for_without_a_plan(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    ops = DenseLora()
    decoder = load_model(
        tmp_path, ops=ops, device=torch.device("cpu"), dtype=torch.float32, max_positions=MAX_POSITIONS
    )
    Stepper(decoder).step({"a": [1, 2, 3]})
    assert ops.calls == []
