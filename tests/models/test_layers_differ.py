"""Layers of one model that have different linears: built and adapted by their own descriptions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from manylora.kernels.shapes import Projection, ProjectionGroup, adapter_geometry
from manylora.models.decoder import Decoder, build_decoder
from manylora.models.layers import LoraLinear
from manylora.models.spec import LayerSpec, LinearSpec, MlpSpec, ModelConfig
from manylora.models.weights import DummyWeights
from tests.models.step_builder import Stepper
from tests.models.test_decoder_lora import RANK, DenseLora
from tests.models.tiny import MAX_POSITIONS, load, make_model

CPU = torch.device("cpu")
TOKENS = {"a": [5, 6, 7, 8, 9, 10, 11]}


def differing(config: ModelConfig) -> ModelConfig:
    """The first layer as it is; a wider MLP and a short window in the second; plain, with biases, the third."""
    first, second, third = config.layers
    hidden, inner = config.hidden_size, 76

    def group(name: str, *modules: tuple[str, int, int]) -> ProjectionGroup:
        return ProjectionGroup(name, tuple(Projection(*module) for module in modules))

    gate_up = group(
        "wide_gate_up", ("mlp.gate_proj", hidden, inner), ("mlp.up_proj", hidden, inner)
    )  # fmt: skip
    wide = MlpSpec(
        LinearSpec(gate_up),
        LinearSpec(group("wide_down", ("mlp.down_proj", inner, hidden)), cut="row"),
        "silu",
        True,
    )
    plain = MlpSpec(
        LinearSpec(group("fc1", ("fc1", hidden, inner)), True),
        LinearSpec(group("fc2", ("fc2", inner, hidden)), True, "row"),
        "relu",
        False,
    )
    layers = (
        first,
        dataclasses.replace(second, mlp=wide).with_window(3),
        LayerSpec(
            dataclasses.replace(third.attention, qkv=dataclasses.replace(third.attention.qkv, has_bias=True)),
            plain,
        ),
    )
    return dataclasses.replace(config, layers=layers)


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    make_model("llama").save_pretrained(tmp_path)
    return differing(load(tmp_path).config)


def linears(decoder: Decoder) -> list[LoraLinear]:
    found = []
    for layer in decoder.layers:
        found += [layer.attention.qkv, layer.attention.out, layer.mlp.first, layer.mlp.second]
    return found


def test_adapted_layers_act_as_merged_weights(config: ModelConfig) -> None:
    ops = DenseLora()
    decoder, merged = (
        build_decoder(config, DummyWeights(CPU, torch.float32), ops, CPU, MAX_POSITIONS) for _ in range(2)
    )
    ops.layer_prefix = decoder.config.names.layer_prefix
    generator = torch.Generator().manual_seed(1)
    for linear in linears(merged):
        for i, p in enumerate(linear.group.projections):
            a = torch.randn(p.in_features, RANK, generator=generator) * 0.1
            b = torch.randn(RANK, p.out_features, generator=generator) * 0.1
            ops.matrices[f"{decoder.config.names.layer_prefix}{linear.layer}.{p.module}"] = a, b
            whole = linear.weight.data.clone()
            whole[linear.group.offsets[i] : linear.group.offsets[i + 1]] += (a @ b).T
            linear.weight.rewrite(whole)
    expected = Stepper(merged).step(TOKENS)["a"]
    assert not torch.allclose(Stepper(decoder).step(TOKENS)["a"], expected, atol=1e-3)
    stepper = Stepper(decoder)
    batch = dataclasses.replace(stepper.batch(TOKENS), lora="a plan")
    torch.testing.assert_close(decoder.forward(batch, stepper.pool), expected, atol=1e-4, rtol=0.0)
    names = [(i, group.name) for i, groups in enumerate(config.layer_groups) for group in groups]
    assert ops.calls == names
    assert [layer.mlp.is_gated for layer in decoder.layers] == [True, True, False]


def test_the_table_has_a_place_for_every_projection_of_any_layer(config: ModelConfig) -> None:
    names = ["qkv", "o", "gate_up", "down", "wide_gate_up", "wide_down", "fc1", "fc2"]
    assert [group.name for group in config.groups] == names
    geometry = adapter_geometry(config.page_shape(16, 4), config.layer_groups)
    assert geometry.groups == config.groups
    assert len(geometry.projections) == 12
