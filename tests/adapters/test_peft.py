"""What inspecting an adapter finds, and everything that it refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
from peft.utils.other import get_pattern_key

from manylora import tensorfile
from manylora.adapters import files
from manylora.adapters import peft as peft_module
from manylora.adapters.files import CONFIG_NAME, WEIGHTS_NAME
from manylora.adapters.loraconfig import read_config
from manylora.adapters.pack import layout_of
from manylora.adapters.peft import AdapterSpec, inspect_adapter
from manylora.inspection import describe, render
from manylora.kernels.shapes import AdapterGeometry, Projection, ProjectionGroup
from manylora.protocol.executor import AdapterError
from tests.adapters.test_patterns import HOSTILE
from tests.adapters.tiny import (
    HIDDEN,
    LAYERS,
    PREFIX,
    edit_config,
    edit_tensors,
    geometry,
    inspect,
    load,
    make,
)
from tests.sampled import sampled

Tensors = dict[str, torch.Tensor]
KEY = "base_model.model.model.layers.{}.{}.lora_{}.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "plain"
    make(folder, r=4, lora_alpha=10, target_modules=["q_proj", "v_proj", "down_proj"])
    return folder


@pytest.fixture
def adapter(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "copy"))


def refused(folder: Path, message: str, status: int = 400, **arguments: Any) -> None:
    with pytest.raises(AdapterError, match=message) as caught:
        inspect(folder, **arguments)
    assert caught.value.status == status


def test_a_plain_adapter(adapter: Path) -> None:
    spec = inspect(adapter)
    assert spec.rank == 4
    assert spec.modules == ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    assert spec.ranks == ((4,) * 3, (0,) * 3, (4,) * 3, (0,) * 3, (0,) * 3, (0,) * 3, (4,) * 3)
    assert spec.scales[0] == (2.5,) * LAYERS
    assert spec.scales[1] == (0.0,) * LAYERS
    assert spec.dtype == "F32"
    assert spec.path == str(adapter)
    assert spec.weights.size_bytes == os.path.getsize(adapter / WEIGHTS_NAME)
    assert spec.tensor_name(2, geometry().projections[0], "B") == KEY.format(2, "self_attn.q_proj", "B")
    assert AdapterSpec.from_json(spec.to_json()) == spec
    assert inspect_adapter(adapter, geometry(), PREFIX + ".", None) == spec


@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
@pytest.mark.parametrize("infix", ["", ".default"])
def test_names_may_come_without_prefix_and_with_the_adapters_name(
    prefix: str, infix: str, adapter: Path
) -> None:
    plain_spec = inspect(adapter)

    def rename(name: str) -> str:
        name = prefix + name.removeprefix("base_model.model.")
        return name.replace(".weight", infix + ".weight")

    edit_tensors(adapter, lambda tensors: {rename(name): t for name, t in tensors.items()})
    spec = inspect(adapter)
    assert (spec.ranks, spec.scales) == (plain_spec.ranks, plain_spec.scales)
    load(spec, geometry())


def test_names_of_mixed_forms_are_refused(adapter: Path) -> None:
    def mix(tensors: Tensors) -> Tensors:
        first = next(iter(tensors))
        return {
            name.replace("base_model.model.", "" if name == first else name[:17]): t
            for name, t in tensors.items()
        }

    edit_tensors(adapter, mix)
    refused(adapter, "mix several forms")


NAMES = [
    f"model.layers.{layer}.{module}"
    for layer in range(3)
    for module in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
]

patterns = st.sampled_from(
    ["q_proj", "proj", r"layers\.1\..*", "self_attn", ".*", "v_proj|q_proj", "layers.0.self_attn.q_proj",
     "_proj", r"model\.layers\.\d+\.mlp\.down_proj", "^model.layers.2.mlp.down_proj", "attn.q_proj",
     "[qv]_proj", "x", r"\bv_proj", "(?!self).*_proj", "(?i:Q_PROJ)"]
)  # fmt: skip


@given(keys=st.lists(patterns, unique=True, max_size=5), alphas=st.lists(patterns, unique=True, max_size=5))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_patterns_resolve_as_in_peft(keys: list[str], alphas: list[str], tmp_path: Path) -> None:
    rank_pattern = {key: i + 1 for i, key in enumerate(keys)}
    alpha_pattern = {key: i + 0.5 for i, key in enumerate(alphas)}
    config = {"peft_type": "LORA", "r": 9, "rank_pattern": rank_pattern, "alpha_pattern": alpha_pattern}
    (tmp_path / CONFIG_NAME).write_text(json.dumps(config))
    for name, found in zip(NAMES, read_config(tmp_path / CONFIG_NAME).modules(NAMES), strict=True):
        assert found.is_target
        assert found.rank == rank_pattern.get(get_pattern_key(list(rank_pattern), name), 9)
        assert found.alpha == alpha_pattern.get(get_pattern_key(list(alpha_pattern), name), 8)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": r".*\b(?:q_proj|v_proj)"},
        {"target_modules": r"^(?!.*(?:mlp|vision_tower)).*(?:q_proj|v_proj).*"},
        {"target_modules": r"(?i).*\.(Q_PROJ|V_PROJ)"},
        {"target_modules": "Q_PROJ"},
        {"target_modules": ["Q_PROJ", r".*\.v_proj"]},  # of a list none is an expression
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r"(?=model\.layers\.1).*v_proj"},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 1},
        {
            "target_modules": ["q_proj", "v_proj"],
            "layers_to_transform": [0, 2],
            "layers_pattern": ["h", "layers"],
        },
        {"target_modules": ["v_proj"], "layers_to_transform": [2], "layers_pattern": r"(?:layers|h)\b"},
        {"target_modules": ["v_proj"], "layers_to_transform": [2], "layers_pattern": "LAYERS"},
        {"target_modules": ["v_proj"], "layers_to_transform": [2], "layers_pattern": [""]},
    ],
    ids=str,
)
def test_targets_are_those_of_peft(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / CONFIG_NAME).write_text(json.dumps({"peft_type": "LORA", **config}))
    found = read_config(tmp_path / CONFIG_NAME).modules(NAMES)
    of_peft = LoraConfig(**config)
    expected = [check_target_module_exists(of_peft, name) for name in NAMES]
    assert [each.is_target for each in found] == [
        bool(each) and not isinstance(each, _ExcludedModule) for each in expected
    ]


CONFIG_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
    ({"peft_type": None}, "peft_type"),
    ({"use_dora": True}, "DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"bias": "all"}, "bias 'all'"),
    ({"bias": "lora_only"}, "bias 'lora_only'"),
    ({"lora_bias": True}, "lora_bias"),
    ({"trainable_token_indices": [1]}, "new or retrained tokens"),
    ({"target_parameters": ["experts.gate"]}, "target_parameters"),
    ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
    ({"use_qalora": True}, "QALoRA"),
    ({"arrow_config": {"top_k": 2}}, "Arrow"),
    ({"use_bdlora": {"nblocks": 2}}, "block-diagonal"),
    ({"kasa_config": {"beta": 1e-4}}, "KaSA"),
    ({"monteclora_config": {"num_samples": 8}}, "Monte Carlo"),
    ({"megatron_config": {"x": 1}}, "Megatron"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"enable_lora": [True, False]}, "enable_lora"),
    ({"init_lora_weights": "pissa"}, "modified base weights"),
    ({"init_lora_weights": "pissa_niter_16"}, "modified base weights"),
    ({"init_lora_weights": "olora"}, "modified base weights"),
    ({"init_lora_weights": "corda"}, "modified base weights"),
    ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "modified base weights"),
    ({"init_lora_weights": "lora_ga"}, "modified base weights"),
    ({"init_lora_weights": "something new"}, "unknown init_lora_weights"),
    ({"use_newlora": True}, "'use_newlora' is unknown"),
    ({"r": 0}, "r must hold a positive integer"),
    ({"r": "8"}, "r must hold a positive integer"),
    ({"r": 8}, "has rank 4 by its tensors, 8 by"),
    ({"rank_pattern": {"v_proj": 2}}, r"layers\.0\.self_attn\.v_proj has rank 4 by its tensors, 2 by"),
    ({"rank_pattern": {"v_proj": True}}, "rank_pattern must hold"),
    ({"rank_pattern": ["v_proj"]}, "rank_pattern must be a mapping"),
    ({"rank_pattern": {"(": 2}}, r"rank_pattern: .* cannot be used \(missing \)"),
    ({"alpha_pattern": {"(?i)q_proj": 2}}, "alpha_pattern: .*global flags not at the start"),
    ({"exclude_modules": "(?<=a*)"}, "exclude_modules: .*look-behind requires fixed-width"),
    ({"target_modules": "(?i)Q_PROJ"}, "does not target"),
    ({"layers_to_transform": [0], "layers_pattern": "(?P<idx>layers)"}, "layers_pattern: .*redefinition"),
    ({"layers_to_transform": [0], "layers_pattern": "(?i)layers"}, "layers_pattern: .*global flags"),
    ({"alpha_pattern": {f"x{i}": 1 for i in range(4000)}}, "alpha_pattern: more than 1024"),
    ({"layers_to_transform": ""}, "layers_to_transform must be"),
    ({"lora_alpha": float("nan")}, "lora_alpha must hold a finite number"),
    ({"lora_alpha": "x"}, "lora_alpha"),
    ({"use_rslora": "yes"}, "use_rslora must be true or false"),
    ({"target_modules": ["q_proj"]}, r"layers\.0\.self_attn\.v_proj, which .* does not target"),
    ({"target_modules": []}, "does not target"),
    ({"target_modules": "q_proj"}, "does not target"),
    ({"target_modules": 3}, "target_modules must be"),
    ({"exclude_modules": ["v_proj"]}, "does not target"),
    ({"exclude_modules": ".*down_proj"}, "does not target"),
    ({"layers_to_transform": [0, 1]}, r"layers\.2\.self_attn\.q_proj, which .* does not target"),
    ({"layers_to_transform": [0, 1, 2], "layers_pattern": "h"}, "does not target"),
    ({"layers_to_transform": "all"}, "layers_to_transform must be"),
    ({"layers_to_transform": [0], "target_modules": "all-linear"}, "cannot be used"),
    ({"layers_pattern": 3}, "layers_pattern must be"),
]


@pytest.mark.parametrize(("changes", "message"), CONFIG_REFUSALS, ids=lambda v: str(v)[:40])
def test_configurations_that_are_refused(changes: dict[str, Any], message: str, adapter: Path) -> None:
    edit_config(adapter, **changes)
    refused(adapter, message)


@pytest.mark.parametrize(
    "changes",
    [
        {"base_model_name_or_path": None},
        {"target_modules": None},
        {"layers_to_transform": [], "layers_pattern": []},
        {"layers_to_transform": [0, 1, 2], "layers_pattern": ["h", "layers"]},
        {"rank_pattern": None, "alpha_pattern": None, "bias": None},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": False},
        {"alpha_pattern": {r"(?!q_proj)\bup_proj": 3}},
        {"modules_to_save": [], "trainable_token_indices": None},
        {"target_modules": r"(?:.*?(?:language|model).*?(?:self_attn|mlp).*?(?:[qv]|down)_proj.*?)|(?:x)"},
    ],
    ids=str,
)
def test_configurations_that_change_nothing(changes: dict[str, Any], adapter: Path) -> None:
    before = inspect(adapter)
    edit_config(adapter, **changes)
    after = inspect(adapter)
    assert (after.ranks, after.scales) == (before.ranks, before.scales)


def test_unknown_settings_are_named_and_ignored(adapter: Path) -> None:
    before = inspect(adapter)
    assert before.warnings == ()
    edit_config(
        adapter,
        params_to_save=["lora"],
        _alias_to_pattern={"a": "b"},
        lora_A_init_method="xavier",
        my_note="v3 of May",
        later_number=3,
        later_switch=False,
    )
    after = inspect(adapter)
    assert (after.ranks, after.scales) == (before.ranks, before.scales)
    (warning,) = after.warnings
    for key in ("params_to_save", "_alias_to_pattern", "lora_A_init_method", "my_note", "later_number"):
        assert f"'{key}'" in warning
    assert "later_switch" not in warning
    assert AdapterSpec.from_json(after.to_json()) == after
    text = render(describe(after, layout_of(after, geometry()), geometry()))
    assert f"warning    {warning}" in text
    edit_config(adapter, **{f"key {number}\x1b": "x" * 100 for number in range(5000)})
    (warning,) = inspect(adapter).warnings
    assert warning.isprintable()
    assert len(warning) < 1000


def test_a_mark_of_the_byte_order_is_read_past(adapter: Path) -> None:
    before = inspect(adapter)
    (adapter / CONFIG_NAME).write_bytes(b"\xef\xbb\xbf" + (adapter / CONFIG_NAME).read_bytes())
    assert inspect(adapter).scales == before.scales


def with_head(vocab: int = 50) -> AdapterGeometry:
    return dataclasses.replace(
        geometry(), model=(ProjectionGroup("head", (Projection("lm_head", HIDDEN, vocab),)),)
    )


def test_the_output_head(tmp_path: Path) -> None:
    model = make(tmp_path, r=4, lora_alpha=10, target_modules=["q_proj", "lm_head"])
    refused(tmp_path, r"lm_head\.base_layer\.weight is not supported: output embeddings", shape=with_head())
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    spec = inspect(tmp_path, with_head())
    assert spec.modules == ("self_attn.q_proj", "lm_head")
    assert spec.ranks[0] == (4,) * LAYERS
    assert spec.ranks[7] == (4, *(0,) * (LAYERS - 1))
    assert spec.scales[7] == (2.5, *(0.0,) * (LAYERS - 1))
    head = with_head().projections[7]
    assert spec.tensor_name(None, head, "A") == "base_model.model.lm_head.lora_A.weight"
    facts = describe(spec, layout_of(spec, with_head()), with_head())
    assert (facts["layers"], facts["of_layers"]) == (LAYERS, LAYERS)
    refused(
        tmp_path, r"lora_B\.weight has shape \[50, 4\], .* lm_head has shape \[51, 64\]", shape=with_head(51)
    )
    fixed = dataclasses.replace(geometry(), fixed_by="--merge dlora")
    refused(
        tmp_path, r"lm_head\.lora_A\S+ is not supported beside --merge dlora: LoRA on lm_head", shape=fixed
    )
    edit_tensors(tmp_path, rename("q_proj", "w_proj"))
    refused(tmp_path, r"these can: model\.layers\.N\.\[.*down_proj\], lm_head$", shape=with_head())


REAL_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"target_modules": ["q_proj", "embed_tokens"]}, "LoRA on an embedding"),
    ({"target_modules": ["q_proj", "lm_head"]}, "LoRA on lm_head"),
    ({"bias": "all", "target_modules": ["q_proj"]}, "bias 'all'"),
    ({"lora_bias": True}, "lora_bias"),
    ({"trainable_token_indices": [1, 2]}, "new or retrained tokens"),
    ({"init_lora_weights": "pissa"}, "modified base weights"),
    ({"init_lora_weights": "olora"}, "modified base weights"),
    ({"kasa_config": {"beta": 0.1}}, "KaSA"),
    ({"monteclora_config": {"num_samples": 2}}, "Monte Carlo"),
]


@pytest.mark.parametrize(("kind", "message"), REAL_REFUSALS, ids=str)
def test_adapters_of_peft_that_are_refused(kind: dict[str, Any], message: str, tmp_path: Path) -> None:
    make(tmp_path, **kind)
    refused(tmp_path, message)
    # And by the tensors alone, should the configuration not say so.
    if kind.keys() & {"use_dora", "modules_to_save", "trainable_token_indices", "kasa_config"}:
        edit_config(tmp_path, **dict.fromkeys(kind))
        refused(tmp_path, "tensor .* is not supported")


def rename(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def drop(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: torch.zeros(shape, dtype=dtype)}


TENSOR_REFUSALS: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (drop("lora_A"), "lora_B but no lora_A"),
    (drop("layers.1.self_attn.q_proj.lora_B"), r"layers\.1\.self_attn\.q_proj has lora_A but no lora_B"),
    (lambda tensors: {}, "no LoRA tensors"),
    (
        rename("layers.2", "layers.3"),
        r"layers\.3\.self_attn\.q_proj\.lora_A.* is for layer 3, .* has 3 layers",
    ),
    (rename("layers.1", "layers.99999999999999"), "does not fit"),
    (rename("v_proj", "qkv_proj"), r"layers\.0\.self_attn\.qkv_proj\.lora_A.* is for a module"),
    (rename("model.model.layers", "model.encoder.layers"), "is for a module"),
    (rename("lora_A", "lora_C"), "not a LoRA weight"),
    (put("base_model.model.model.embed_tokens.weight", 4, 4), "embeddings saved with the adapter"),
    (put("base_model.model.lm_head.weight", 4, 4), "new tokens"),
    (put("base_model.model.model.layers.0.mlp.up_proj.lora_A.bias", 4), "a bias"),
    (put(KEY.format(0, "self_attn.q_proj", "A"), 4, HIDDEN, dtype=torch.int32), "dtype I32"),
    (put(KEY.format(0, "self_attn.q_proj", "A"), 4, HIDDEN, dtype=torch.float8_e4m3fn), "dtype F8_E4M3"),
    (put(KEY.format(0, "self_attn.q_proj", "A"), 5, HIDDEN), "lora_A has rank 5, lora_B has rank 4"),
    (put(KEY.format(0, "self_attn.q_proj", "A"), 0, HIDDEN), r"shape \[0, 64\], not two positive"),
    (put(KEY.format(0, "self_attn.q_proj", "A"), 0), "not two positive"),
    (put(KEY.format(0, "self_attn.q_proj", "A"), 4, 8, 8), "not two positive"),
    (
        put(KEY.format(1, "self_attn.v_proj", "B"), 64, 4),
        r"model\.layers\.1\.self_attn\.v_proj\.lora_B\.weight has shape \[64, 4\], .* has shape \[32, 64\] "
        r"and needs \[32, rank\]",
    ),
    (
        put(KEY.format(1, "mlp.down_proj", "A"), 4, 100),
        r"layers\.1\.mlp\.down_proj\.lora_A\.weight has shape \[4, 100\], .* has shape \[64, 112\]",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), TENSOR_REFUSALS, ids=lambda v: v[:40] if isinstance(v, str) else ""
)
def test_tensors_that_are_refused(change: Callable[[Tensors], Tensors], message: str, adapter: Path) -> None:
    edit_tensors(adapter, change)
    refused(adapter, message)


def test_the_first_mismatch_is_named_in_layer_and_projection_order(adapter: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        for layer, module in ((2, "self_attn.q_proj"), (1, "mlp.down_proj"), (1, "self_attn.v_proj")):
            tensors[KEY.format(layer, module, "A")] = torch.zeros(4, 7)
        return tensors

    edit_tensors(adapter, change)
    refused(adapter, re.escape(KEY.format(1, "self_attn.v_proj", "A")))


def test_rank_over_the_limit_names_both(adapter: Path) -> None:
    assert inspect(adapter, max_rank=4).rank == 4
    refused(adapter, "rank 4, this server's largest is 3", max_rank=3)


def test_missing_folders_and_files(adapter: Path) -> None:
    refused(adapter / "nothing", "no adapter folder", status=404)
    refused(adapter / CONFIG_NAME, "no adapter folder", status=404)
    refused(Path("\0"), "no adapter folder", status=404)
    (adapter / WEIGHTS_NAME).unlink()
    refused(adapter, f"no {WEIGHTS_NAME}")
    os.mkfifo(adapter / WEIGHTS_NAME)
    refused(adapter, "not a regular file")
    (adapter / CONFIG_NAME).unlink()
    refused(adapter, f"no {CONFIG_NAME}")


@pytest.mark.parametrize("name", ["adapter_model.bin", "x.pt", "x.pth", "x.ckpt", "x.pkl"])
def test_pickle_files_are_refused(name: str, adapter: Path) -> None:
    (adapter / WEIGHTS_NAME).rename(adapter / name)
    refused(adapter, "pickle files are refused, convert to safetensors")


def test_pickles_under_a_safetensors_name_are_refused(adapter: Path) -> None:
    torch.save({"x": torch.zeros(3)}, adapter / WEIGHTS_NAME)
    refused(adapter, "zip archive .* pickle files are refused")
    for protocol in (2, 4, 5):
        (adapter / WEIGHTS_NAME).write_bytes(pickle.dumps({"x": list(range(1000))}, protocol))
        refused(adapter, "is a pickle, .* pickle files are refused")


def header(entries: Any, data: bytes = b"") -> bytes:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"\x01",
        (2**63).to_bytes(8, "little") + b"{}",
        (100 * 2**20).to_bytes(8, "little") + b"{}" * 1000,
        header([]),
        header(b"{"),
        header(b"[" * 100000),
        header(b'{"x":' * 50000),
        header(b"\xff\xfe"),
        header(b'{"x": ' + b"9" * 10000 + b"}"),
        header(b'{"x": {}, "x": {}}'),
        header({"x": 3}),
        header(entry(), b"1" * 15),
        header(entry(), b"1" * 17),
        header(entry(shape=[2, -2]), b"1" * 16),
        header(entry(shape=[2, 3]), b"1" * 16),
        header(entry(shape=[True, 4]), b"1" * 16),
        header(entry(shape=[10**30, 10**30]), b"1" * 16),
        header(entry(data_offsets=[16, 0]), b"1" * 16),
        header(entry(data_offsets=[8, 24]), b"1" * 24),
        header(entry(data_offsets=[0.0, 16.0]), b"1" * 16),
        header(entry(data_offsets=[0]), b"1" * 16),
        header(entry(dtype=None), b"1" * 16),
        header({**entry(), "y": entry()["x"]}, b"1" * 16),
    ],
    ids=lambda contents: repr(contents[8:40]),
)
def test_malformed_safetensors_are_refused(contents: bytes, adapter: Path) -> None:
    (adapter / WEIGHTS_NAME).write_bytes(contents)
    refused(adapter, WEIGHTS_NAME)


@pytest.mark.parametrize("contents", [b"", b"[]", b"{", b"\xff", b"[" * 100000, b" " * (5 * 2**20)])
def test_malformed_configurations_are_refused(contents: bytes, adapter: Path) -> None:
    (adapter / CONFIG_NAME).write_bytes(contents)
    refused(adapter, CONFIG_NAME)


def seconds_to_refuse(folder: Path, message: str) -> float:
    began_s = time.monotonic()
    refused(folder, message)
    return time.monotonic() - began_s


def test_dimensions_that_no_file_can_have_are_not_multiplied(adapter: Path) -> None:
    """A product of 100,000 of them is a number of megabytes, and takes minutes."""
    shape = b",".join([b"9223372036854775807"] * 100_000)
    (adapter / WEIGHTS_NAME).write_bytes(
        header(b'{"x":{"dtype":"F32","shape":[' + shape + b'],"data_offsets":[0,0]}}')
    )
    assert seconds_to_refuse(adapter, "entry for x is corrupt") < 5
    for sizes in ([1] * 9, [2**62, 0], [10**4000]):
        (adapter / WEIGHTS_NAME).write_bytes(header(entry(shape=sizes, data_offsets=[0, 0])))
        assert seconds_to_refuse(adapter, "entry for x is corrupt") < 5


def test_a_header_has_bounds(adapter: Path) -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    (adapter / WEIGHTS_NAME).write_bytes(header({str(i): empty for i in range(files.MOST_TENSORS + 1)}))
    assert seconds_to_refuse(adapter, "16385 tensors are more than any adapter needs") < 5
    (adapter / WEIGHTS_NAME).write_bytes(header(b" " * (tensorfile.MOST_HEADER_BYTES["adapter"] + 1)))
    assert seconds_to_refuse(adapter, "header of 2097153 bytes is more than any adapter needs") < 5


def test_names_without_end_are_no_work(adapter: Path) -> None:
    """Neither those of targets nor the numbers of layers are compared one by one."""
    edit_config(adapter, target_modules=[f"m{i}" for i in range(100_000)], layers_to_transform=None)
    assert seconds_to_refuse(adapter, "does not target") < 10
    numbers = list(range(10, 100_000))
    edit_config(adapter, target_modules=["q_proj", "v_proj", "down_proj"], layers_to_transform=numbers)
    assert seconds_to_refuse(adapter, "does not target") < 10


@pytest.mark.parametrize(
    "value", ["[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900], ids=["lists", "maps"]
)
@pytest.mark.parametrize("key", ["peft_type", "bias", "r", "lora_alpha", "use_rslora"])
def test_deep_values_are_the_adapters_fault(key: str, value: str, adapter: Path) -> None:
    config = json.loads((adapter / CONFIG_NAME).read_text()) | {key: "HERE"}
    (adapter / CONFIG_NAME).write_text(json.dumps(config).replace('"HERE"', value))
    refused(adapter, ".")


def test_whatever_fails_is_the_adapters_fault(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (ZeroDivisionError("oh"), MemoryError(), re.error("bad"), RecursionError(), KeyError("x")):

        def fail(path: Path, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(peft_module, "read_config", fail)
        caplog.clear()
        refused(adapter, type(error).__name__)
        assert "in an unexpected way" in caplog.text, "the log has the traceback"


@pytest.mark.parametrize("word", ["half\ud83d", "esc\x1b[2J", "line\nbreak", "long" * 10_000])
def test_a_files_own_words_are_shown_so_that_any_terminal_can(word: str, adapter: Path) -> None:
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    for entries in ({f"{word}.lora_A.weight": tensor}, {f"{word}.bias": tensor}, {word: tensor}, {word: 3},
                    {word: {**tensor, "dtype": word}}):  # fmt: skip
        (adapter / WEIGHTS_NAME).write_bytes(header(entries, b"1234"))
        with pytest.raises(AdapterError) as caught:
            inspect(adapter)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000
        str(caught.value).encode()


def test_messages_do_not_say_where_the_folder_lies(adapter: Path, plain: Path) -> None:
    messages = []
    for breaking in (
        lambda: edit_config(adapter, r=7),
        lambda: (adapter / CONFIG_NAME).write_text("{"),
        lambda: (adapter / WEIGHTS_NAME).write_bytes(b"x"),
        (adapter / WEIGHTS_NAME).unlink,
        lambda: (adapter / "adapter_model.bin").write_bytes(b"x"),
        (adapter / CONFIG_NAME).unlink,
        lambda: shutil.rmtree(adapter),
    ):
        breaking()
        with pytest.raises(AdapterError) as caught:
            inspect(adapter)
        messages.append(str(caught.value))
    assert not [message for message in messages if str(adapter.parent) in message]
    assert sum(adapter.name in message for message in messages) >= 3


def attempt(folder: Path) -> None:
    """Inspect and load; nothing but AdapterError may come out."""
    try:
        spec = inspect(folder)
        load(spec, geometry())
    except AdapterError as error:
        refusal = error
    else:
        return
    assert refusal.status == 400
    assert str(refusal)


damage = st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4)


@given(cut=st.floats(0, 1), edits=damage, header_only=st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_weights_never_do_worse_than_an_adapter_error(
    plain: Path, tmp_path: Path, cut: float, edits: list[tuple[float, bytes]], header_only: bool
) -> None:
    folder = tmp_path / "fuzzed"
    if not folder.exists():
        shutil.copytree(plain, folder)
    whole = (plain / WEIGHTS_NAME).read_bytes()
    (folder / WEIGHTS_NAME).write_bytes(whole[: int(cut * len(whole))])
    attempt(folder)
    reach = int.from_bytes(whole[:8], "little") + 8 if header_only else len(whole)
    damaged = bytearray(whole)
    for where, replacement in edits:
        start = int(where * (reach - 1))
        damaged[start : start + len(replacement)] = replacement
    (folder / WEIGHTS_NAME).write_bytes(damaged)
    attempt(folder)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_configurations_never_do_worse_than_an_adapter_error(
    plain: Path, tmp_path: Path, data: st.DataObject
) -> None:
    folder = tmp_path / "fuzzed"
    if not folder.exists():
        shutil.copytree(plain, folder)
    config = json.loads((plain / CONFIG_NAME).read_text())
    keys = data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=4))
    config.update({key: data.draw(values) for key in keys})
    (folder / CONFIG_NAME).write_text(json.dumps(config))
    attempt(folder)


PLACES = ("rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "layers_pattern")


@pytest.mark.parametrize(
    ("pattern", "place"),
    sampled(((pattern, place) for pattern in HOSTILE for place in PLACES), 3),
    ids=lambda text: text[:20],
)
def test_hostile_regular_expressions_end_soon(pattern: str, place: str, adapter: Path) -> None:
    """Whatever is found, it takes no hours."""
    value = {pattern: 3} if place in ("rank_pattern", "alpha_pattern") else pattern
    edit_config(adapter, **{place: value}, layers_to_transform=[0] if place == "layers_pattern" else None)
    began_s = time.monotonic()
    attempt(adapter)
    assert time.monotonic() - began_s < 20


def test_a_report_says_what_the_adapter_is_and_takes(adapter: Path) -> None:
    shape = geometry()
    spec = inspect(adapter)
    layout = layout_of(spec, shape)
    facts = json.loads(json.dumps(describe(spec, layout, shape)))
    assert facts["ranks"] == [4]
    assert facts["scales"] == [2.5]
    assert facts["pages"] == layout.num_pages
    assert facts["pool_bytes"] == layout.num_pages * shape.page.page_bytes
    assert facts["layers"] == facts["of_layers"] == LAYERS
    assert 0 <= facts["slack"] < 1
    text = render(facts)
    assert "rank       4" in text
    assert "2.5 = lora_alpha / r" in text
    assert "warning" not in text
    warned = dataclasses.replace(spec, warnings=("no row for it",))
    assert "warning    no row for it" in render(describe(warned, layout, shape))
    make(adapter / "rs", use_rslora=True, rank_pattern={"q_proj": 2}, layers_to_transform=[1])
    spec = inspect(adapter / "rs")
    facts = describe(spec, layout_of(spec, shape), shape)
    assert facts["ranks"] == [2, 8]
    assert "rank       2 to 8" in render(facts)
    assert "1 of 3 layers" in render(facts)
    assert "sqrt" in render(facts)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="reads /proc")
def test_inspection_reads_no_weights(adapter: Path) -> None:
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    make(adapter, r=200)
    before = bytes_read()
    inspect(adapter)
    assert bytes_read() - before < (adapter / WEIGHTS_NAME).stat().st_size / 4


def test_a_module_that_its_layer_lacks_is_refused(tmp_path: Path) -> None:
    """Other layers have it."""
    make(tmp_path, r=2, target_modules=["up_proj", "q_proj"])
    layers = geometry().layers
    lacking = dataclasses.replace(geometry(), layers=(layers[0], layers[1][:2], *layers[2:]))
    with pytest.raises(AdapterError, match=r"up_proj.* that layer 1 of the base model lacks; .*o_proj$"):
        inspect(tmp_path, lacking)
