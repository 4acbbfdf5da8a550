"""Logits that are not finite: rows are told of, whatever is asked of them, and the others go on as if alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from manylora.executor import sampling
from manylora.executor.sampling import Bias, draw
from manylora.types import SamplingParams
from tests.executor.conftest import Files
from tests.executor.drive import Rig
from tests.executor.test_sampler import noise, row, sample
from tests.executor.tiny import write_adapter

ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 3, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 2000},
    {"logprobs": 3},
    {"temperature": 1.0, "logprobs": 0, "samples": ((0, 0), (1, 0), (2, 0))},
    {"logit_bias": {3: 100.0, 5: -100.0}},
    {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": -1.0, "output": (1, 2)},
    {"min_tokens": 4, "stop": (1, 2)},
]
BAD_VALUES = {"nan": math.nan, "inf": math.inf}


def unsound(logits: torch.Tensor, rows: list[sampling.SampledRow]) -> list[int]:
    drawn = draw(logits, rows)
    return list(drawn.read(drawn.packed.cpu().numpy()).unsound)


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("bad", BAD_VALUES)
def test_whatever_is_asked_the_row_is_told_of_and_the_others_draw_the_same(
    asked: dict[str, Any], bad: str
) -> None:
    logits = noise(5, 50)
    rows = [row(**asked) for _ in range(5)]
    expected, _ = sample(logits, rows)
    logits[1, 17] = BAD_VALUES[bad]
    logits[3] = BAD_VALUES[bad]
    drawn = draw(logits, rows)
    found = drawn.read(drawn.packed.numpy())
    assert found.unsound == [1, 3]
    for i in (0, 2, 4):
        assert found.tokens[i] == expected[i]
    everything = [token for tokens in found.tokens for token in tokens]
    assert all(0 <= token < 50 for token in everything), "what comes next must find an embedding"


def test_nothing_but_minus_inf_is_unsound_and_a_token_ruled_out_is_not() -> None:
    logits = noise(3, 50)
    logits[0] = -math.inf
    logits[1, 1:] = -math.inf
    assert unsound(logits, [row(), row(), row()]) == [0]
    assert unsound(logits, [row(temperature=1.0), row(temperature=1.0), row(temperature=1.0)]) == [0]


@given(
    penalty=st.floats(5e-324, 1e308),
    zero=st.booleans(),
    temperature=st.sampled_from([0.0, 1e-300, 1.0, 100.0]),
)
def test_no_parameter_makes_finite_logits_unsound(penalty: float, zero: bool, temperature: float) -> None:
    logits = noise(1, 20)
    if zero:
        logits[0, 3] = 0.0
    bias = dict.fromkeys(range(20), -100.0)
    asked = row(
        prompt=tuple(range(20)), output=(3,), repetition_penalty=penalty, temperature=temperature,
        logit_bias=bias,
    )  # fmt: skip
    tokens, _ = sample(logits, [asked])
    assert 0 <= tokens[0][0] < 20
    assert not sampling._edited(logits, [asked], None).isnan().any()


def test_a_bias_is_made_once_a_request(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    init = Bias.__init__

    def counted(self: Bias, logit_bias: tuple[tuple[int, float], ...]) -> None:
        made.append(len(logit_bias))
        init(self, logit_bias)

    monkeypatch.setattr(Bias, "__init__", counted)
    placed = []
    on = Bias.on

    def watched(self: Bias, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        placed.append(on(self, logits))
        return placed[-1]

    monkeypatch.setattr(Bias, "on", watched)
    rig = Rig(files.model, tmp_path, num_pages=200, page_bytes=3072)
    params = SamplingParams(
        n=16,
        temperature=1.0,
        seed=3,
        max_tokens=32,
        logit_bias=tuple((token, 1.0 + token) for token in range(60)),
    )
    for sequence in range(16):
        rig.open(sequence, [1, 2, 3], params=params, sample=sequence)
    rig.decode(6, *range(16))
    rig.worker.close()
    assert made == [60]
    assert len({tokens.data_ptr() for tokens, _ in placed}) == 1
    # Once a part of a step that a thread runs, not once a row.
    assert len(placed) <= 6 * 4


def test_biases_of_several_requests_add_up_as_one_by_one() -> None:
    logits = noise(6, 40)
    shared = SamplingParams(
        temperature=0.0, logit_bias=((1, 2.5), (7, -3.0), (39, 1.0), (40, 9.0), (10**12, 1.0))
    )
    rows = [row(), row(logit_bias={2: 1.5}), row(), row(), row(logit_bias=((2, 1.0), (2, 0.5))), row()]
    bias = Bias(shared.logit_bias)
    for i in (2, 3, 5):
        rows[i].params, rows[i].bias = shared, bias
    found = sampling._edited(logits, rows, None)
    expected = logits.clone()
    for i in (2, 3, 5):
        for token, value in ((1, 2.5), (7, -3.0), (39, 1.0)):
            expected[i, token] += value
    expected[1, 2] += 1.5
    expected[4, 2] += 1.5
    assert torch.equal(found, expected)


def too_large(adapter: Path) -> Path:
    """The adapter with finite weights whose products are not."""
    path = adapter / "adapter_model.safetensors"
    weights = safetensors.torch.load_file(path)
    safetensors.torch.save_file({name: torch.full_like(w, 1e30) for name, w in weights.items()}, path)
    return adapter


@pytest.mark.parametrize("asked", [{}, {"temperature": 1.0, "top_p": 0.9}, {"logprobs": 2}], ids=str)
@pytest.mark.parametrize("others", [1, 9])
def test_an_adapter_that_overflows_beside_others(
    files: Files, tmp_path: Path, rig: Rig, asked: dict[str, Any], others: int
) -> None:
    bad = too_large(write_adapter(tmp_path / "bad", files.model, rank=4, seed=5))
    rig.serve(7, bad)
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 32, "seed": 1, **asked})
    alone = {}
    for sequence in range(others):
        rig.open(sequence, [5, 6, 7, sequence], sequence % 4, params=params)
        rig.decode(4, sequence)
        alone[sequence] = rig.sequences[sequence].generated
    for sequence in range(others):
        rig.direct.end_sequence(sequence)
        rig.open(sequence, [5, 6, 7, sequence], sequence % 4, params=params)
    rig.open(100, [5, 6, 7], 7, params=params)
    rig.open(101, [9], 7, params=params)
    for _ in range(4):
        result = rig.step(*(rig.row(sequence) for sequence in (100, *range(others), 101)))
        assert result.done.ok
        assert result.done.unsound == (100, 101)
    for sequence in range(others):
        assert rig.sequences[sequence].generated == alone[sequence]
    assert np.isin([token for _, tokens in result.done.tokens for token in tokens], range(10**6)).all()
