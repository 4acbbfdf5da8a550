"""From settings to a worker: defaults, and what is refused before anything is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from manylora.config.declaring import ConfigError
from manylora.config.sections import EngineSettings
from manylora.executor import plan
from manylora.executor.build import build_worker
from manylora.models.config import read_model_config
from tests.executor.conftest import Files
from tests.executor.tiny import settings_for

PAGE_BYTES = 3072


def test_defaults_on_the_cpu(files: Files, tmp_path: Path) -> None:
    shown: list[tuple[int, int]] = []
    settings = dataclasses.replace(
        settings_for(files.model),
        cache=dataclasses.replace(EngineSettings(None).cache),  # type: ignore[arg-type]
    )
    worker, policy, facts = build_worker(
        settings, progress=lambda done, total: shown.append((done, total)), registry_path=tmp_path / "r"
    )
    worker.close()
    assert policy.page_tokens == 16
    assert policy.max_model_len == 64
    assert (policy.max_num_seqs, policy.max_batch_tokens) == (64, 1024)
    assert facts.page_bytes == 4 * PAGE_BYTES
    assert 0 < policy.num_pages * facts.page_bytes <= 4 * 2**30
    assert (facts.device, facts.dtype, facts.vocab_size, facts.eos_ids) == ("cpu", "float32", 97, (2,))
    assert shown[-1][0] == shown[-1][1] > 0


def test_one_batch_size_gives_the_other_room(files: Files, tmp_path: Path) -> None:
    for asked, expected in (((8, None), (8, 1024)), ((None, 16), (16, 16)), ((3000, None), (3000, 3000))):
        settings = settings_for(files.model, max_num_seqs=asked[0], max_batch_tokens=asked[1])
        worker, policy, _ = build_worker(settings, registry_path=tmp_path / "r")
        worker.close()
        assert (policy.max_num_seqs, policy.max_batch_tokens) == expected


def test_a_small_pool_bounds_the_context(files: Files, tmp_path: Path) -> None:
    settings = settings_for(files.model, num_pages=6, page_bytes=PAGE_BYTES)
    worker, policy, facts = build_worker(settings, registry_path=tmp_path / "r")
    worker.close()
    assert (policy.num_pages, policy.max_model_len, facts.max_model_len) == (6, 24, 24)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_model_len": 65}, "65 is more than the model's 64"),
        (
            {"max_model_len": 25, "num_pages": 6, "page_bytes": PAGE_BYTES},
            "25 needs a pool of .* for 24 tokens",
        ),
        ({"max_model_len": 0}, "at least 1"),
        ({"load_format": "pickle"}, "pickle"),
        ({"num_pages": 3, "page_bytes": PAGE_BYTES}, "holds 3 pages"),
        ({"num_pages": 2**40, "page_bytes": PAGE_BYTES}, "does not fit"),
        ({"max_num_seqs": 8, "max_batch_tokens": 4}, "max_batch_tokens"),
        ({"page_tokens": 0}, "page-tokens must be at least 1"),
        ({"device": "abacus"}, "abacus"),
    ],
)
def test_settings_that_cannot_work(
    files: Files, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        build_worker(settings_for(files.model, **changes), registry_path=tmp_path / "r")  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_dummy_weights_need_config_alone(files: Files, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((files.model / "config.json").read_bytes())
    settings = settings_for(tmp_path, dtype="bfloat16")
    settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, load_format="dummy"))
    worker, _, facts = build_worker(settings, registry_path=tmp_path / "r")
    worker.close()
    assert (facts.dtype, facts.page_bytes) == ("bfloat16", PAGE_BYTES // 2)


def test_cuda_without_a_gpu(files: Files, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="cuda"):
        build_worker(settings_for(files.model, device="cuda"), registry_path=tmp_path / "r")


def test_activations_of_an_8b_model_stay_in_proportion(files: Files) -> None:
    config = read_model_config(files.model)
    large = dataclasses.replace(
        config,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
    )
    estimate = plan.activation_bytes(large, torch.bfloat16, num_seqs=256, batch_tokens=8192)
    # At least the gate and up outputs, their product, and the sampled rows' logits in two precisions.
    assert 8192 * 3 * 14336 * 2 + 256 * 128256 * 12 < estimate < 8 * 2**30
