"""Checkpoints as they are found in the wild, whole and broken; dummy weights; dtypes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from manylora.models.load import resolve_dtype
from manylora.models.spec import ModelError
from tests.models.step_builder import Stepper
from tests.models.tiny import edit_json, load, make_model

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: make_model(name) for name in ("llama", "llama-tied", "opt")}


def logits(folder: Path, **options: Any) -> torch.Tensor:
    return Stepper(load(folder, **options)).step({"a": TOKENS})["a"]


def expected(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return result


def edit_tensors(folder: Path, **changes: Any) -> None:
    """Rewrite model.safetensors; underscored names stand for dotted ones; the value None removes."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value.contiguous() for name, value in tensors.items() if value is not None}, path)


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_sharded_checkpoint_with_progress(models: dict[str, Any], tmp_path: Path) -> None:
    models["llama"].save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    seen: list[tuple[int, int]] = []
    ours = logits(tmp_path, progress=lambda done, total: seen.append((done, total)))
    torch.testing.assert_close(ours, expected(models["llama"]), atol=1e-4, rtol=0.0)
    total = 4 * sum(p.numel() for p in models["llama"].parameters())
    assert {t for _, t in seen} == {total}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == total


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_names_without_the_model_prefix(name: str, models: dict[str, Any], tmp_path: Path) -> None:
    models[name].save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({key.removeprefix("model."): value for key, value in load_file(path).items()}, path)
    torch.testing.assert_close(logits(tmp_path), expected(models[name]), atol=1e-4, rtol=0.0)


def test_tied_and_stored_head(models: dict[str, Any], tmp_path: Path) -> None:
    models["llama-tied"].save_pretrained(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    theirs = expected(models["llama-tied"])

    edit_tensors(tmp_path, lm_head__weight=embedding.clone())
    decoder = load(tmp_path)
    assert decoder.head.linear.weight is decoder.embedding.tokens
    torch.testing.assert_close(logits(tmp_path), theirs, atol=1e-4, rtol=0.0)

    edit_tensors(tmp_path, model__embed_tokens__weight=None)
    torch.testing.assert_close(logits(tmp_path), theirs, atol=1e-4, rtol=0.0)


def test_tied_but_stored_differently_as_transformers(models: dict[str, Any], tmp_path: Path) -> None:
    models["llama"].save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    theirs = type(models["llama"]).from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits(tmp_path), expected(theirs), atol=1e-4, rtol=0.0)


def test_checkpoint_dtype_is_converted(models: dict[str, Any], tmp_path: Path) -> None:
    models["llama"].save_pretrained(tmp_path)
    before = logits(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(path).items()}, path)
    decoder = load(tmp_path)
    assert decoder.embedding.tokens.data.dtype == torch.float32
    assert not torch.equal(logits(tmp_path), before)
    torch.testing.assert_close(logits(tmp_path), before, atol=0.5, rtol=0.0)
    assert load(tmp_path, dtype=torch.bfloat16).embedding.tokens.data.dtype == torch.bfloat16


def test_extra_tensors_are_ignored(models: dict[str, Any], tmp_path: Path) -> None:
    models["llama"].save_pretrained(tmp_path)
    edit_tensors(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(3))
    load(tmp_path)


def test_damaged_checkpoints(models: dict[str, Any], tmp_path: Path) -> None:
    models["llama"].save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()

    edit_tensors(tmp_path, model__norm__weight=torch.ones(59))
    assert "model.norm.weight has shape [59], config.json implies [60]" in refused(tmp_path)

    path.write_bytes(whole)
    edit_tensors(tmp_path, model__layers__1__mlp__up_proj__weight=None)
    assert "model.layers.1.mlp.up_proj.weight is missing" in refused(tmp_path)

    path.write_bytes(whole)
    edit_tensors(tmp_path, model__norm__weight=torch.ones(60, dtype=torch.int8))
    assert "model.norm.weight is stored as I8" in refused(tmp_path)

    for broken in (whole[:-7], whole[:20], b"", b"not safetensors at all, and long enough"):
        path.write_bytes(broken)
        assert "model.safetensors: damaged or cut short" in refused(tmp_path)

    path.unlink()
    assert "no weights" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "refused" in refused(tmp_path)


def test_damaged_index(models: dict[str, Any], tmp_path: Path) -> None:
    models["llama"].save_pretrained(tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    shard = names["model.norm.weight"]
    (tmp_path / shard).rename(tmp_path / "elsewhere")
    assert f"{shard} is missing" in refused(tmp_path)
    edit_json(index, weight_map={"model.norm.weight": "../model.safetensors"})
    assert "outside its folder" in refused(tmp_path)
    edit_json(index, weight_map={})
    assert "names no tensors" in refused(tmp_path)
    edit_json(index, weight_map={"model.norm.weight": 3})
    assert "must be a string" in refused(tmp_path)
    index.write_text("{")
    assert "not valid JSON" in refused(tmp_path)


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_dummy_weights_need_no_files(name: str, models: dict[str, Any], tmp_path: Path) -> None:
    models[name].config.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", architectures=[type(models[name]).__name__])
    first = logits(tmp_path, load_format="dummy")
    assert torch.isfinite(first).all()
    assert 0.1 < first.std() < 10
    assert torch.equal(first, logits(tmp_path, load_format="dummy"))


def test_learned_positions_bound_the_context(models: dict[str, Any], tmp_path: Path) -> None:
    models["opt"].save_pretrained(tmp_path)
    assert "64 learned positions, too few for a context of 65" in refused(tmp_path, max_positions=65)


def test_resolve_dtype() -> None:
    assert resolve_dtype("auto", "cpu", "bfloat16") == torch.float32
    assert resolve_dtype("auto", "cuda", "float16") == torch.float16
    assert resolve_dtype("auto", "cuda", "bfloat16") == torch.bfloat16
    assert resolve_dtype("auto", "cuda", "float32") == torch.bfloat16
    assert resolve_dtype("float32", "cuda", "float16") == torch.float32
    assert resolve_dtype("bfloat16", "cpu", "float16") == torch.bfloat16
    with pytest.raises(ModelError, match="'int8' is not supported"):
        resolve_dtype("int8", "cpu", "float32")
    with pytest.raises(ModelError, match="float8_e4m3fn"):
        resolve_dtype("auto", "cuda", "float8_e4m3fn")
