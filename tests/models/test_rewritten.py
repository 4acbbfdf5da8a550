"""A decoder whose weights are rewritten in place runs as one that was built of the new weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from manylora.kernels.ops import Weight
from manylora.models.config import read_model_config
from manylora.models.decoder import Decoder, build_decoder
from manylora.models.weights import DummyWeights
from tests.kernels.implementations import Subject
from tests.models.step_builder import Stepper
from tests.models.tiny import MAX_POSITIONS, make_model

CPU = torch.device("cpu")
PROMPTS = {"a": [5, 6, 7, 8, 9], "b": [1, 2]}


def weights_of(part: Any) -> Iterator[Weight]:
    """Each weight once, in the order of the parts."""
    seen: set[int] = set()

    def walk(found: Any) -> Iterator[Weight]:
        if isinstance(found, Weight):
            if id(found) not in seen:
                seen.add(id(found))
                yield found
        elif isinstance(found, tuple):
            for inner in found:
                yield from walk(inner)
        elif dataclasses.is_dataclass(found):
            for field in dataclasses.fields(found):
                yield from walk(getattr(found, field.name))

    return walk(part)


@pytest.mark.parametrize("kind", ["cpu", "interpreted"])
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_steps_follow_rewritten_weights(name: str, kind: str, tmp_path: Path) -> None:
    """Steps run before the rewrite too, so that whatever is remembered of the old numbers is there."""
    make_model(name).save_pretrained(tmp_path)
    config, ops = read_model_config(tmp_path), Subject(kind, torch.float32).ops()

    def built(seed: int) -> Decoder:
        return build_decoder(config, DummyWeights(CPU, torch.float32, seed), ops, CPU, MAX_POSITIONS)

    mine, other = built(0), built(1)
    before = Stepper(mine).step(PROMPTS)
    expected = Stepper(other).step(PROMPTS)
    for weight, new in zip(weights_of(mine), weights_of(other), strict=True):
        weight.rewrite(new.data)
        assert weight.version == 1
    found = Stepper(mine).step(PROMPTS)
    for prompt in PROMPTS:
        torch.testing.assert_close(found[prompt], expected[prompt], atol=1e-5, rtol=0.0)
        assert (found[prompt] - before[prompt]).abs().max() > 0.1
