"""The linear kernel for few tokens against torch, for every way of sharing its tiles; and the choice of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_lab.bench import rounding

from manylora.kernels.ops import Weight
from manylora.kernels.triton.products import LinearConfig, Products, bucket_of, stored_choices
from tests.kernels.implementations import GPU_MARKS, SUBJECTS, Subject
from tests.sampled import sampled

TRITON = [subject for subject in SUBJECTS if str(subject.id).startswith(("interpreted", "gpu"))]
CONFIGS = [
    LinearConfig(32, 32, 1, 4, 3),
    LinearConfig(32, 32, 2, 4, 3, weights_first=False),
    LinearConfig(64, 64, 1, 4, 2, described=True),
    LinearConfig(64, 32, 1, 4, 2, weights_first=False, described=True),
    LinearConfig(64, 32, 2, 4, 2, described=True, rows_described=True),
]
SHAPES = [(1, 96, 80, False), (5, 128, 200, True), (33, 256, 64, True), (128, 64, 48, False)]


def tensors(
    subject: Subject, tokens: int, inputs: int, outputs: int, biased: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(tokens + inputs)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(subject.dtype).to(subject.device)

    x = normal(tokens, 2 * inputs)[:, :inputs]  # rows with a gap between them
    return x, normal(outputs, inputs), normal(outputs) if biased else None


@pytest.mark.parametrize("subject", TRITON)
@pytest.mark.parametrize(
    ("config", "tokens", "inputs", "outputs", "biased"),
    sampled(((config, *shape) for config in CONFIGS for shape in SHAPES), 3),
)
def test_equals_torch_however_tiles_are_shared(
    subject: Subject, config: LinearConfig, tokens: int, inputs: int, outputs: int, biased: bool
) -> None:
    x, weight, bias = tensors(subject, tokens, inputs, outputs, biased)
    truth = rounding.linear(x, weight, bias).rounded(subject.dtype)
    # A tile each; tiles in parts; programs that end one tile and begin the next; programs without work.
    for multiprocessors in (1, 3, 7, 40):
        products = Products({}, multiprocessors)
        subject.poison()
        out, again = (products.run(x, Weight(weight), bias, config) for _ in range(2))
        assert torch.equal(out, again), "the same input gives the same bits"
        assert truth.excess(out) <= 1


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128), (128, 128), (129, None)]
)
def test_buckets(tokens: int, bucket: int | None) -> None:
    assert bucket_of(tokens) == bucket


def test_stored_choices_are_of_one_device(tmp_path: Path) -> None:
    row = {"tokens": 16, "in": 64, "out": 96, "block_n": 32, "block_k": 32, "programs": 2, "warps": 4}
    row |= {"stages": 3, "weights_first": True, "described": False}
    path = tmp_path / "linear.json"
    path.write_text(json.dumps({"GPU A": [row]}))
    assert stored_choices("GPU A", path) == {(16, 64, 96): LinearConfig(32, 32, 2, 4, 3)}
    assert stored_choices("GPU B", path) == {}
    described = {**row, "out": 128, "ahead": None, "rows_described": True}
    other = {"tokens": 32, "in": 64, "out": 96}
    path.write_text(json.dumps({"GPU A": [row, described, other]}))
    assert stored_choices("GPU A", path) == {
        (16, 64, 96): LinearConfig(32, 32, 2, 4, 3),
        (16, 64, 128): LinearConfig(32, 32, 2, 4, 3, rows_described=True),
        (32, 64, 96): None,
    }
    assert stored_choices("GPU A", tmp_path / "absent.json") == {}


def test_the_shipped_choices_can_be_read() -> None:
    for choices in (stored_choices("NVIDIA H200"), stored_choices("a device nobody measured")):
        assert all(tokens in (16, 32, 64, 128) for tokens, _, _ in choices)


@pytest.mark.parametrize(
    "subject",
    [
        pytest.param(Subject("interpreted", torch.float16)),
        pytest.param(Subject("gpu", torch.bfloat16), marks=GPU_MARKS),
    ],
)
def test_a_choice_serves_its_own_shape_and_bucket_alone(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subject.kind == "interpreted" and torch.cuda.is_available():
        pytest.skip("with a GPU the compiled kernels are tested instead")
    products = Products({(16, 64, 96): LinearConfig(32, 32, 1, 4, 2)}, 3)
    ours: list[int] = []
    run = products.run

    def noted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        ours.append(len(x))
        return run(x, *rest)

    monkeypatch.setattr(products, "run", noted)
    for tokens, outputs in ((1, 96), (16, 96), (17, 96), (4, 64), (0, 96)):
        x, weight, bias = tensors(subject, tokens, 64, outputs, True)
        out = products(x, Weight(weight), bias)
        assert rounding.linear(x, weight, bias).rounded(subject.dtype).excess(out) <= 1
    x, weight, bias = tensors(Subject(subject.kind, torch.float32), 4, 64, 96, True)
    products(x, Weight(weight), bias)  # float32 is the library's
    assert ours == [1, 16]
