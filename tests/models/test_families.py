"""Every family's logits equal transformers' in float32, however the tokens are spread over steps."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from manylora.models.config import read_model_config
from manylora.models.decoder import Decoder
from tests.models.step_builder import Stepper
from tests.models.tiny import MODELS, VOCAB, load, make_model, rewrite_as_layout_4

TOLERANCE = 1e-4
LENGTH = 17


@pytest.fixture(scope="module", params=sorted(MODELS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Decoder, Path]:
    model = make_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, load(folder), folder


def tokens_of(seed: int, length: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def expected(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0.0)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_whole_prompts_in_one_step(pair: tuple[Any, Decoder, Path]) -> None:
    model, decoder, _ = pair
    prompts = {"a": tokens_of(1), "b": tokens_of(2, 9)}
    for name, logits in Stepper(decoder).step(prompts).items():
        assert_same(logits, expected(model, prompts[name]))


def test_chunks_and_decode_steps_mixed(pair: tuple[Any, Decoder, Path]) -> None:
    model, decoder, _ = pair
    a, b = tokens_of(3), tokens_of(4, 9)
    stepper = Stepper(decoder)
    ours: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    steps = [{"a": a[:7]}, {"a": a[7:12], "b": b[:7]}, {"b": b[7:8], "a": a[12:13]}, {"a": a[13:14]}]
    for work in [*steps, {"a": a[14:], "b": b[8:]}]:
        for name, logits in stepper.step(work).items():
            ours[name].append(logits)
    assert_same(torch.cat(ours["a"]), expected(model, a))
    assert_same(torch.cat(ours["b"]), expected(model, b))


def test_layout_of_transformers_4(pair: tuple[Any, Decoder, Path], tmp_path: Path) -> None:
    _, decoder, folder = pair
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    rewrite_as_layout_4(tmp_path)
    assert read_model_config(tmp_path) == decoder.config


def test_logits_of_the_sampled_tokens_only(pair: tuple[Any, Decoder, Path]) -> None:
    model, decoder, _ = pair
    tokens = tokens_of(6)
    stepper = Stepper(decoder)
    batch = dataclasses.replace(stepper.batch({"a": tokens}), sample_index=torch.tensor([LENGTH - 1, 3]))
    assert_same(decoder.forward(batch, stepper.pool), expected(model, tokens)[[LENGTH - 1, 3]])
