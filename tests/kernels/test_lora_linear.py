"""Linears with adapters, in every order that implementations choose, against the reference's composition."""

from __future__ import annotations

import dataclasses
import json
import logging
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_lab.bench import rounding

from manylora.devices.staging import upload_buffers
from manylora.kernels.ops import AdaptedLinear, LoraLimits, LoraStep, Ops, Summands, Weight
from tests.kernels.cases import LoraCase, adapted_truth
from tests.kernels.implementations import SUBJECTS, Subject
from tests.kernels.test_lora_kernels import case_of, part_of

pytest.importorskip("triton")

from manylora_lab.bench.kernels.tune_lora import as_row

from manylora.kernels.triton import lora, lora_plan
from manylora.kernels.triton.lora import LoraKernels
from manylora.kernels.triton.lora_plan import DEFAULT, Beside, LoraConfig

TRITON = [
    s for s in SUBJECTS if isinstance(s.values[0], Subject) and s.values[0].kind in ("interpreted", "gpu")
]
BESIDE = Beside(DEFAULT.short, ("qkv", "down"))
MIXED = [(2, 1), (0, 3), (1, 9), (0, 1), (0, 2)]


@pytest.fixture(params=["plain", "prompts", "beside"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which way round: as decoding, as prompts (runs of more than six tokens here), or beside the product."""
    config = {
        "plain": DEFAULT,
        "prompts": dataclasses.replace(DEFAULT, long_run=6, writes_from=1, mixed=()),
        "beside": dataclasses.replace(DEFAULT, beside=((64, BESIDE),)),
    }[request.param]
    use(config, monkeypatch)
    return str(request.param)


def use(config: LoraConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "lora_kernels_on", lambda device: LoraKernels(config, 4))
    from manylora.kernels.triton import operations

    monkeypatch.setattr(operations, "lora_kernels_on", lora.lora_kernels_on)


def whole(result: torch.Tensor | Summands) -> torch.Tensor:
    return result.whole if isinstance(result, Summands) else result


def check(ops: Ops, plan: Any, case: LoraCase, subject: Subject, num_tokens: int, bias: bool = False) -> None:
    """Every group as a linear, gate and up with the activation too; on a GPU twice with the same bits.

    The interpreter is slow: there, of two groups with a single projection one.
    """
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(subject.dtype).to(subject.device)

    for group in case.geometry.groups:
        if subject.small and group.name == "o":
            continue
        outputs = group.offsets[-1]
        x = drawn(num_tokens, group.in_features)
        weight = drawn(outputs, group.in_features) * group.in_features**-0.5
        added = drawn(outputs) if bias else None
        linear, step = AdaptedLinear(group, case.layer, Weight(weight), added), LoraStep(case.pool, plan)
        truth = adapted_truth(case, x, weight, added, group)
        calls = ["lora_summands", *(["lora_gated"] if len(group.projections) == 2 else [])]
        for name in calls:
            subject.poison()
            out = whole(getattr(ops, name)(x, linear, step))
            # The CPU's compiled activation may differ in its last bit from call to call.
            if subject.kind == "gpu":
                assert torch.equal(out, whole(getattr(ops, name)(x, linear, step)))
            if name == "lora_gated":
                y = whole(ops.lora_summands(x, linear, step))
                bent = ops.lora_gated(x, linear, step, "gelu_tanh")
                expected = ops.gate_mul(y, "gelu_tanh")
                torch.testing.assert_close(bent, expected, rtol=0.0, atol=1e-2 if y.itemsize == 2 else 1e-5)
                truth = rounding.silu_mul(truth, subject.dtype).rounded(subject.dtype)
            assert truth.excess(out) <= 1


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("bias", [False, True])
def test_mixed_batch(subject: Subject, order: str, bias: bool) -> None:
    """Ranks from 1 to 256, one-token and longer runs, tokens without adapter before, between and after."""
    if subject.kind not in ("interpreted", "gpu") and order != "plain":
        pytest.skip("one order only")
    if subject.small and ((bias and order == "beside") or subject.dtype != torch.float32):
        pytest.skip("the interpreter is slow")
    ops, case = subject.ops(), case_of(subject, MIXED, [1, 5, 16, 40, 256])
    plan = ops.plan_lora(case.segments, case.geometry, subject.device)
    check(ops, plan, case, subject, case.num_tokens + 2, bias)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_no_adapter(subject: Subject) -> None:
    ops, case = subject.ops(), case_of(subject, MIXED, [4])
    empty = part_of(case, [])
    assert ops.plan_lora(empty.segments, case.geometry, subject.device) is None
    check(ops, None, empty, subject, 5)


def fill_stages(device: torch.device) -> None:
    """What is not written into the tables is no number."""
    for _ in range(32):
        upload_buffers(device).stage(2**16).numbers.fill(-1)


@pytest.mark.parametrize("subject", TRITON)
@pytest.mark.parametrize("rows", [None, 8])
def test_fixed_plan_serves_every_batch(subject: Subject, order: str, rows: int | None) -> None:
    """Filled with few segments, with all, with none; what a batch does not use is left as it is."""
    if subject.small and (subject.dtype != torch.float32 or (rows is not None and order != "plain")):
        pytest.skip("the interpreter is slow")
    ops, case = subject.ops(), case_of(subject, MIXED, [3, 20])
    room = LoraLimits(24, rows or 24, 32, case.segments.cells)
    fixed = ops.lora_plan(case.geometry, subject.device, room)
    fill_stages(subject.device)
    for chosen in ([1], [0, 1, 2, 3, 4], []):
        part = part_of(case, chosen)
        fixed.fill(part.segments if chosen else None, case.num_tokens)
        check(ops, fixed, part, subject, 24)
    with pytest.raises(ValueError, match="room"):
        fixed.fill(case_of(subject, [(0, 1)] * 24, [40]).segments, 24)


def test_stored_configurations(tmp_path: Path) -> None:
    chosen = dataclasses.replace(
        DEFAULT, pdl=True, short=dataclasses.replace(DEFAULT.short, chunk=256), long_run=64,
        beside=((128, BESIDE),),
        mixed=((128, lora_plan.MIXED), (512, dataclasses.replace(lora_plan.MIXED, tile_tokens=32))),
    )  # fmt: skip
    path = tmp_path / "lora.json"
    path.write_text(json.dumps({"Some GPU": as_row(chosen)}))
    assert lora_plan.stored_config("Some GPU", path) == chosen
    assert lora_plan.stored_config("Another GPU", path) is None
    for name in json.loads(lora_plan.TABLE.read_text()):
        assert isinstance(lora_plan.stored_config(name), LoraConfig)


@pytest.mark.parametrize(("major", "told"), [(9, "with dependent launch"), (8, "has no dependent launch")])
def test_older_devices_go_without_dependent_launch(
    major: int, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Told in one line. The device's properties are all that is asked of it."""
    properties = types.SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    module = types.SimpleNamespace(
        get_device_properties=lambda device: properties, get_device_capability=lambda device: (major, 0)
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    with caplog.at_level(logging.INFO):
        kernels = lora.lora_kernels_on(torch.device("cuda"))
    assert kernels.config.pdl is (major == 9)
    assert [told in record.message for record in caplog.records] == [True]
