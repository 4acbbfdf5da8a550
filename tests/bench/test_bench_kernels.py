"""``manylora bench kernels`` as a command: what it finds right, what it finds wrong, what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_lab.bench.dummies import DEMO
from manylora_lab.bench.kernels import rig as kernels_rig
from manylora_lab.bench.kernels.pool import exact_lora, groups_of, page_of, random_pool, segments_for
from manylora_lab.bench.kernels.rig import Errors, errors
from manylora_lab.bench.kernels.settings import KERNELS, POPULARITIES, QUICK, check_name, model_counts
from manylora_lab.bench.reference import ReferenceOps
from manylora_lab.bench.rounding import Bounded
from manylora_lab.pricing.shapes import ALL_MODULES, ModelShape

from manylora.cli import main
from manylora.config.declaring import ConfigError
from manylora.kernels.cpu import CpuOps
from manylora.kernels.ops import LoraSite, LoraStep, Weight
from manylora.kernels.shapes import Activation, AdapterGeometry, adapter_geometry

CPU = torch.device("cpu")


def bench(out: Path, *words: str) -> int:
    return main(["bench", "kernels", "--quick", "--device", "cpu", "--out", str(out), *words])


def written(out: Path) -> dict[str, Any]:
    document = json.loads((out / "kernels.json").read_text())
    assert isinstance(document, dict)
    return document


# ---- a whole run ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kernels") / "made"
    assert bench(out) == 0
    return out


def test_every_kernel_is_right_and_timed(whole: Path) -> None:
    document = written(whole)
    assert (document["device"], document["shape"], document["dtype"]) == ("cpu", "demo", "float32")
    assert document["mistakes"] == document["left_out"] == []
    rows = document["rows"]
    assert list(dict.fromkeys(row["kernel"] for row in rows)) == list(KERNELS)
    for row in rows:
        assert row["is_right"]
        assert 0 <= row["of_bound"] <= 1
        assert row["kernel"] == "sampling" or row["error"] < 1e-5
        if row["kernel"] != "lora":  # a difference of two times
            assert row["us"] > 0
        bytes_us = row["bytes"] / document["bytes_per_s"] * 1e6
        flop_us = row["flop"] / document["flops"] * 1e6
        assert row["floor_us"] == pytest.approx(max(bytes_us, flop_us))
        assert row["bound"] == ("bytes" if bytes_us >= flop_us else "operations")
        if row["us"] > 0:
            assert row["ratio"] == pytest.approx(row["us"] / row["floor_us"])
    assert any("wall time" in note for note in document["notes"])
    assert (whole / "kernels.png").read_bytes().startswith(b"\x89PNG")


def test_lora_has_punicas_settings(whole: Path) -> None:
    rows = [row for row in written(whole)["rows"] if row["kernel"] == "lora" and "prompt" not in row]
    found = {(row["popularity"], row["batch"], row["rank"]) for row in rows}
    assert found == {
        (popularity, batch, rank)
        for popularity in POPULARITIES
        for batch in QUICK.lora_batches
        for rank in QUICK.lora_ranks
    }
    for row in rows:
        adapter = DEMO.adapter_bytes(row["rank"], ALL_MODULES) // DEMO.layers
        assert row["bytes"] == row["models"] * adapter
        assert row["flop"] == 2 * row["batch"] * adapter // DEMO.itemsize


def test_floors_count_what_must_be_done(whole: Path) -> None:
    rows = written(whole)["rows"]
    (decode,) = [row for row in rows if row.get("rows") == "context 33-96"]
    contexts = range(33, 97, 9)
    position = 2 * DEMO.kv_heads * DEMO.head_dim * 4
    queries = 8 * DEMO.heads * DEMO.head_dim * 4
    assert decode["bytes"] == sum(contexts) * position + 2 * queries
    assert decode["flop"] == 4 * sum(contexts) * DEMO.heads * DEMO.head_dim
    (prefill,) = [row for row in rows if row.get("rows") == "32 after 96"]
    pairs = sum(1 for query in range(96, 128) for key in range(128) if key <= query)
    assert prefill["flop"] == 4 * 4 * pairs * DEMO.heads * DEMO.head_dim
    (head,) = [row for row in rows if (row.get("product"), row.get("batch")) == ("head", 32)]
    assert head["bytes"] == 4 * (DEMO.vocab * DEMO.hidden + 32 * (DEMO.vocab + DEMO.hidden))
    assert head["flop"] == 2 * 32 * DEMO.vocab * DEMO.hidden


# ---- what is wrong -------------------------------------------------------------------------------------


class SlightlyTooLarge(CpuOps):
    def gate_mul(self, gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
        return super().gate_mul(gate_up, activation) * 1.001


class OneElementOff(CpuOps):
    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        out = super().linear(x, weight, bias)
        out[-1, -1] += 0.001
        return out


class AnotherRow(CpuOps):
    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        return super().linear(x.roll(1, 0), weight, bias)


class Unfinished(CpuOps):
    def gate_mul(self, gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
        out = super().gate_mul(gate_up, activation)
        out[-1, -1] = float("nan")
        return out


class WritesElsewhereToo(CpuOps):
    def rotate_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        *rest: Any,
    ) -> torch.Tensor:
        out = super().rotate_and_store(q, k, v, pool, layer, *rest)
        pool[0, 0, 0, 0, 0, 0] += 1  # of another layer
        return out


class OtherScales(CpuOps):
    def lora_plan(self, geometry: AdapterGeometry, device: torch.device, room: Any = None) -> Any:
        plan: Any = super().lora_plan(geometry, device, room)
        fill = plan.fill
        plan.fill = lambda segments, num_tokens: fill(
            dataclasses.replace(segments, scales=segments.scales * 1.01), num_tokens
        )
        return plan


class SkipsTheNewest(CpuOps):
    def attention_plan(self, page: Any, device: torch.device, room: Any = None) -> Any:
        plan: Any = super().attention_plan(page, device, room)
        fill = plan.fill
        plan.fill = lambda rows: fill(dataclasses.replace(rows, kv_len=rows.kv_len - 1))
        return plan


@pytest.mark.parametrize(
    ("ops", "kernel"),
    [
        (SlightlyTooLarge, "silu_mul"),
        (OneElementOff, "linear"),
        pytest.param(AnotherRow, "linear", marks=pytest.mark.long),
        pytest.param(Unfinished, "silu_mul", marks=pytest.mark.long),
        (WritesElsewhereToo, "rotate_and_store"),
        (OtherScales, "lora"),
        (SkipsTheNewest, "decode"),
    ],
)
def test_a_wrong_kernel_is_named(
    ops: type[CpuOps],
    kernel: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(kernels_rig, "ops_for", lambda device: ops())
    assert bench(tmp_path, "--only", kernel, "add_rms_norm") == 1
    printed = capsys.readouterr()
    document = written(tmp_path)
    wrong = {row["kernel"] for row in document["rows"] if not row["is_right"]}
    assert wrong == {kernel}
    for line, mistake in zip(printed.err.splitlines(), document["mistakes"], strict=True):
        assert line == f"manylora: error: {mistake}"
        assert mistake.startswith(f"{kernel}, ")
        assert "not what the torch reference gives" in mistake
    assert printed.out.count("WRONG") == len(document["mistakes"]) > 0


def test_a_broken_kernel_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(CpuOps):
        def gate_mul(self, gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
            raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(kernels_rig, "ops_for", lambda device: Broken())
    assert bench(tmp_path, "--only", "add_rms_norm,silu_mul,sampling") == 1
    assert capsys.readouterr().err == "manylora: error: silu_mul failed: RuntimeError: no such instruction\n"
    assert {row["kernel"] for row in written(tmp_path)["rows"]} == {"add_rms_norm", "sampling"}


def test_errors_are_of_the_worst_pair() -> None:
    exact = torch.tensor([3.0, -4.0])
    truth = Bounded(exact.double(), torch.tensor([0.125, 0.25], dtype=torch.float64))
    out = torch.tensor([3.0, -4.5])
    found = errors([(exact, truth), (out, truth)])
    assert found.relative == pytest.approx(0.5 / 5)
    assert found.of_bound == pytest.approx(0.5 / 0.25)
    assert not found.is_right
    assert errors([(torch.full((2,), float("nan")), truth)]) == Errors(math.inf, math.inf)
    nothing = torch.zeros(2)
    assert errors([(nothing, Bounded.given(nothing))]) == Errors(0, 0)


def test_the_dense_truth_of_lora_is_the_references() -> None:
    decoder = ModelShape("tiny", 3, 64, 4, 2, 16, 96, 32)
    page = page_of(decoder, torch.float64)
    geometry = adapter_geometry(page, [groups_of(decoder)] * page.layers)
    pool = random_pool(page, 64, torch.float64, CPU)
    segments = segments_for(geometry, [1, 3, 2], [4, 8, 1], len(pool), CPU)
    reference = ReferenceOps()
    plan = reference.plan_lora(segments, geometry, CPU)
    assert plan is not None
    for group in geometry.groups:
        x = torch.randn(6, group.in_features, dtype=torch.float64)
        y = torch.zeros(6, group.offsets[-1], dtype=torch.float64)
        reference.lora(y, x, LoraSite(group, 2), LoraStep(pool, plan))
        torch.testing.assert_close(exact_lora(x, pool, 2, group, segments, geometry).exact, y)


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_popularities_share_out_all_requests(popularity: str) -> None:
    for requests in range(1, 130):
        counts = model_counts(popularity, requests)
        assert sum(counts) == requests
        assert min(counts) > 0
        assert list(counts) == sorted(counts, reverse=True)


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "linaer"], "there is no kernel 'linaer'; did you mean linear?"),
        (["--only", "xyz"], "there is no kernel 'xyz'; use add_rms_norm, "),
        (["--shape", "lama-3-8b"], "there is no shape 'lama-3-8b'; did you mean llama-3-8b"),
        (["--budget", "0"], "--budget must be above 0"),
        (["--budget", "nan"], "--budget must be above 0"),
        (["--tune", "linear"], "--tune is for the Triton kernels"),
        (["--ops", "triton"], "set TRITON_INTERPRET=1"),
        (["--ops", "triton", "--dtype", "bfloat16"], "use --dtype float32 or float16"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert bench(tmp_path, *words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert said in printed.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert bench(tmp_path / "file" / "out", "--only", "silu_mul") == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--device", "cuda", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_nearest_names() -> None:
    with pytest.raises(ConfigError, match="did you mean decode"):
        check_name("kernel", "decod", KERNELS)


# ---- other ways to run ---------------------------------------------------------------------------------


def test_a_spent_budget_leaves_out_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, "--only", "silu_mul", "--budget", "1e-6") == 0
    document = written(tmp_path)
    assert (document["rows"], document["left_out"]) == ([], ["silu_mul"])
    assert "left out, for the budget was spent: silu_mul" in capsys.readouterr().out
    assert (tmp_path / "kernels.png").exists()


def test_interpreted_kernels_are_checked_and_not_timed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    words = ["--device", "cpu", "--ops", "triton", "--dtype", "float16", "--only", "silu_mul", "decode"]
    done = subprocess.run(
        [sys.executable, "-m", "manylora", "bench", "kernels", "--out", str(tmp_path), *words],
        env={**os.environ, "TRITON_INTERPRET": "1"}, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = written(tmp_path)
    assert document["kernels"] == "triton"
    assert document["is_interpreted"]
    assert {row["kernel"] for row in document["rows"]} == {"silu_mul", "decode"}
    assert all(row["is_right"] and row["us"] is row["ratio"] is None for row in document["rows"])
    assert not (tmp_path / "kernels.png").exists()
