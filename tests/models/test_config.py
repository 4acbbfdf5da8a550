"""What config.json may leave out, how it may spell things, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from manylora.models.config import read_model_config
from manylora.models.spec import ModelConfig, ModelError, RopeConfig


def write(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def read(folder: Path, **fields: Any) -> ModelConfig:
    return read_model_config(write(folder, **fields))


def refused(folder: Path, **fields: Any) -> str:
    with pytest.raises(ModelError) as caught:
        read(folder, **fields)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.attention.window for layer in config.layers]


LLAMA = {"architectures": ["LlamaForCausalLM"]}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}


@pytest.mark.parametrize(
    ("architecture", "config_class"),
    [
        ("LlamaForCausalLM", transformers.LlamaConfig),
        ("MistralForCausalLM", transformers.MistralConfig),
        ("Qwen2ForCausalLM", transformers.Qwen2Config),
        ("Qwen3ForCausalLM", transformers.Qwen3Config),
        ("Gemma2ForCausalLM", transformers.Gemma2Config),
        ("Gemma3ForCausalLM", transformers.Gemma3TextConfig),
        ("OPTForCausalLM", transformers.OPTConfig),
    ],
)
def test_missing_fields_are_transformers_defaults(
    architecture: str, config_class: Any, tmp_path: Path
) -> None:
    ours, theirs = read(tmp_path, architectures=[architecture]), config_class()
    family = theirs.model_type
    is_opt = family == "opt"
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == (theirs.ffn_dim if is_opt else theirs.intermediate_size)
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == (theirs.num_attention_heads if is_opt else theirs.num_key_value_heads)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.bos_id == theirs.bos_token_id
    assert ours.eos_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.norm_eps == (1e-5 if is_opt else theirs.rms_norm_eps)
    theta = 1e6 if family == "gemma3_text" else 10000.0
    assert (ours.rope is None) if is_opt else (ours.rope == RopeConfig(theta=theta))
    if family.startswith("gemma"):
        slides = [kind == "sliding_attention" for kind in theirs.layer_types]
        assert windows(ours) == [theirs.sliding_window if one else None for one in slides]
        assert ours.score_cap == theirs.attn_logit_softcapping
        assert ours.logit_cap == theirs.final_logit_softcapping
        assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5
        return
    window = theirs.sliding_window if family == "mistral" else None
    assert windows(ours) == [window] * ours.num_layers


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("Gemma2ForCausalLM", "use_bidirectional_attention", True),
        ("Gemma2ForCausalLM", "hidden_activation", "tanh"),
        ("Gemma2ForCausalLM", "attn_logit_softcapping", 0),
        ("Gemma2ForCausalLM", "sliding_window", None),
        ("Gemma3ForCausalLM", "attn_logit_softcapping", 50.0),
        ("Gemma3ForCausalLM", "layer_types", ["full_attention"]),
    ],
)
def test_what_gemma_is_not_served_with(architecture: str, field: str, value: Any, tmp_path: Path) -> None:
    words = ("sliding",) if value is None else (field,)
    message = refused(tmp_path, architectures=[architecture], **{field: value})
    assert all(word in message for word in words)


def test_heads_derive_from_what_is_given(tmp_path: Path) -> None:
    config = read(tmp_path, **LLAMA, hidden_size=96, num_attention_heads=6, num_key_value_heads=None)
    assert (config.head_dim, config.num_kv_heads) == (16, 6)


def test_model_type_stands_in_for_missing_architectures(tmp_path: Path) -> None:
    named = read(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert read(tmp_path, model_type="qwen3") == named
    assert named != read(tmp_path, model_type="qwen2")


def test_eos_ids_come_from_generation_config_first(tmp_path: Path) -> None:
    fields = LLAMA | {"eos_token_id": 7}
    assert read(tmp_path, **fields).eos_ids == (7,)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [9, 8, 9]}))
    assert read(tmp_path, **fields).eos_ids == (9, 8)
    generation.write_text(json.dumps({"eos_token_id": 5}))
    assert read(tmp_path, **fields).eos_ids == (5,)
    generation.write_text(json.dumps({"temperature": 0.6}))
    assert read(tmp_path, **LLAMA, eos_token_id=[3, 4]).eos_ids == (3, 4)
    generation.write_text("{")
    assert "generation_config.json" in refused(tmp_path, **LLAMA)


def test_rope_spellings_agree(tmp_path: Path) -> None:
    old = read(tmp_path, **LLAMA, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2})
    new = read(tmp_path, **LLAMA, rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2})
    assert old.rope == new.rope == RopeConfig(kind="linear", theta=5e5, factor=2)


@pytest.mark.parametrize(
    ("rope", "context", "longest"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256, 256),
        ({"type": "yarn", "factor": 2.5, "original_max_position_embeddings": 20}, 50, 64),
        ({"type": "yarn", "factor": 4.0}, 256, 256),
        ({"type": "yarn", "factor": None, "original_max_position_embeddings": 16}, 64, 64),
        ({"type": "linear", "factor": 4}, 64, 256),
        ({"type": "linear", "factor": 0.5}, 64, 64),
        ({"type": "dynamic", "factor": 4.0}, 64, 64),
        (
            {"type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}
            | {"original_max_position_embeddings": 8},
            64,
            64,
        ),
        (None, 64, 64),
    ],
    ids=str,
)
def test_how_long_contexts_may_be(rope: object, context: int, longest: int, tmp_path: Path) -> None:
    config = read(tmp_path, **LLAMA, max_position_embeddings=64, rope_scaling=rope)
    assert (config.context, config.longest_context) == (context, longest)


def test_original_context_of_rope_beside_it_wins(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = read(tmp_path, **LLAMA, rope_scaling=yarn, original_max_position_embeddings=128)
    assert config.rope is not None
    assert config.rope.original_max_positions == 128


def test_qwen_windows(tmp_path: Path) -> None:
    layers = QWEN2 | {"num_hidden_layers": 4, "sliding_window": 9}
    assert windows(read(tmp_path, **layers, max_window_layers=2)) == [None] * 4
    used = layers | {"use_sliding_window": True}
    assert windows(read(tmp_path, **used, max_window_layers=2)) == [None, None, 9, 9]
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert windows(read(tmp_path, **used, layer_types=kinds)) == [9, None, None, 9]
    assert "no sliding window" in refused(tmp_path, **layers, layer_types=kinds)
    assert "3 layers" in refused(tmp_path, **used, layer_types=kinds[:3])
    assert "'chunked_attention'" in refused(tmp_path, **used, layer_types=["chunked_attention"] * 4)


def test_groups_need_no_torch(tmp_path: Path) -> None:
    write(
        tmp_path, **LLAMA, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96
    )
    code = (
        "import sys, pathlib; from manylora.models.config import read_model_config; "
        "import manylora.models.source; "
        "read_model_config(pathlib.Path(sys.argv[1])).groups; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    groups = read_model_config(tmp_path).groups
    assert [(g.name, g.in_features, g.offsets) for g in groups] == [
        ("qkv", 64, (0, 64, 96, 128)),
        ("o", 64, (0, 64)),
        ("gate_up", 64, (0, 96, 192)),
        ("down", 96, (0, 64)),
    ]
    assert groups[0].projections[1].module == "self_attn.k_proj"
    opt = read(tmp_path, architectures=["OPTForCausalLM"]).groups
    assert [[p.module for p in g.projections] for g in opt[1:]] == [["self_attn.out_proj"], ["fc1"], ["fc2"]]


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_model_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="LoRA adapter"):
        read_model_config(tmp_path)
    for text, words in (("{", "not valid JSON"), ("[]", "JSON object"), ("\xff\xfe", "not valid JSON")):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ModelError, match=words):
            read_model_config(tmp_path)


def test_refused_models(tmp_path: Path) -> None:
    message = refused(tmp_path, architectures=["GemmaForCausalLM"])
    assert "GemmaForCausalLM" in message
    assert "supported: LlamaForCausalLM, MistralForCausalLM" in message
    assert "none given" in refused(tmp_path)
    assert "gptq" in refused(tmp_path, **LLAMA, quantization_config={"quant_method": "gptq"})
    assert "'gelu'" in refused(tmp_path, **LLAMA, hidden_act="gelu")
    opt = {"architectures": ["OPTForCausalLM"]}
    assert "'tanh'" in refused(tmp_path, **opt, activation_function="tanh")


@pytest.mark.parametrize("kind", ["proportional", "su", "mrope"])
def test_refused_rope_types(kind: str, tmp_path: Path) -> None:
    assert repr(kind) in refused(tmp_path, **LLAMA, rope_scaling={"type": kind, "factor": 2.0})
    assert repr(kind) in refused(tmp_path, **LLAMA, rope_parameters={"rope_type": kind})


def test_refused_rope_settings(tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    assert "high_freq_factor is missing" in refused(tmp_path, **LLAMA, rope_scaling=llama3)
    llama3 |= {"high_freq_factor": 1.0}
    assert "must be above low_freq_factor" in refused(tmp_path, **LLAMA, rope_scaling=llama3)
    assert "factor must be above 0" in refused(
        tmp_path, **LLAMA, rope_scaling={"type": "linear", "factor": 0}
    )
    assert "partial_rotary_factor" in refused(tmp_path, **LLAMA, partial_rotary_factor=0.5)
    assert "partial_rotary_factor" in refused(
        tmp_path, **LLAMA, rope_parameters={"partial_rotary_factor": 0.25}
    )
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0] * 63}
    assert "long_factor must be a list of 64 numbers" in refused(tmp_path, **LLAMA, rope_parameters=longrope)
    longrope["long_factor"] = [1.0] * 63 + [0]
    assert "long_factor must be above 0" in refused(tmp_path, **LLAMA, rope_parameters=longrope)
    nested = {"full_attention": {"rope_type": "default"}}
    assert "full_attention" in refused(tmp_path, **QWEN2, rope_parameters=nested)
    assert "rope_theta" in refused(tmp_path, **LLAMA, rope_theta=0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": "4096"}, "hidden_size must be a whole number"),
        ({"hidden_size": 0}, "hidden_size must be a whole number of at least 1, got 0"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "multiple of num_key_value_heads"),
        ({"hidden_size": 100, "num_attention_heads": 32}, "multiple of num_attention_heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"hidden_act": 3}, "hidden_act must be a string"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
    ],
)
def test_wrong_types_and_sizes(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refused(tmp_path, **(LLAMA | fields))
