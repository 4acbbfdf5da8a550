"""Punica's experiments at smoke scale: fields, figures of the paper, what must hold, files, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.bench.kernels.settings import POPULARITIES, model_counts
from manylora_lab.reproduce import punica_fig11
from manylora_lab.reproduce.command import reproduce
from manylora_lab.reproduce.experiment import Device, Setup
from manylora_lab.reproduce.punica_fig7 import sgmv_bytes, sgmv_flop
from manylora_lab.reproduce.punica_fig11 import (
    ALIKE,
    BACKBONE,
    MIXED,
    SINGLE,
    STATIC,
    STATIC_BACKBONE,
    RequestLoad,
)
from manylora_lab.reproduce.registry import experiment

from manylora.cli import main

NAMES = tuple(f"punica-fig{number}" for number in (1, 7, 8, 9, 10, 11))
Report = dict[str, Any]


def smoke(folder: Path, name: str, device: Device | None = None) -> Report:
    """As the command does it, read back."""
    reproduce(name, folder, "smoke", device, workers=1)
    assert (folder / f"{name}.png").stat().st_size > 10_000
    found: Report = json.loads((folder / f"{name}.json").read_text())
    (entry,) = found.pop("provenance")  # which tells the machine's load of the moment
    assert entry["seed"] == 0
    assert found["experiment"] == name
    assert found["settings"]["scale"] == "smoke"
    assert found["notes"]
    assert all({"metric", "ours", "paper"} <= set(figure) for figure in found["headline"])
    assert all(figure["ours"] > 0 for figure in found["headline"])
    return found


def figures(found: Report) -> dict[str, tuple[float, float | None]]:
    return {figure["metric"]: (figure["ours"], figure["paper"]) for figure in found["headline"]}


def test_fig1_simulated(tmp_path: Path) -> None:
    found = smoke(tmp_path, "punica-fig1")
    at = {(row["stage"], row["length"], row["batch"]): row["ms"] for row in found["rows"]}
    assert {length for _, length, _ in at} == {128, 512, 1024, 1536, 2048}
    for stage in ("prefill", "decode"):
        assert at[stage, 128, 1] < at[stage, 128, 32] < at[stage, 2048, 32]
    headline = figures(found)
    # §2.1: from 11 ms to 13 ms, and from 17 ms to 34 ms.
    assert headline["decode, shortest (128): batch 1, ms"][1] == 11
    assert headline["decode, shortest (128): batch 32, ms"][1] == 13
    assert headline["decode, longest (2048): batch 32 over 1"][1] is None  # 34 / 17 is not stated
    ours = headline["decode, longest (2048): batch 32 over 1"][0]
    assert ours == pytest.approx(at["decode", 2048, 32] / at["decode", 2048, 1], abs=1e-3)
    assert smoke(tmp_path, "punica-fig1") == found


def test_fig1_on_the_executor(tmp_path: Path) -> None:
    found = smoke(tmp_path, "punica-fig1", "cpu")
    assert len(found["rows"]) == 2 * 2 * 2
    assert all(row["ms"] > 0 for row in found["rows"])
    assert all(paper is None for _, paper in figures(found).values())
    assert found["settings"]["model"] == "demo"


def test_fig7(tmp_path: Path) -> None:
    found = smoke(tmp_path, "punica-fig7")
    assert found["settings"]["kernels"] == "cpu"
    intensity: dict[str, list[float]] = {}
    for row in found["rows"]:
        intensity.setdefault(row["popularity"], []).append(row["flop_per_byte"])
        assert row["models"] == len(model_counts(row["popularity"], row["batch"]))
        assert row["flop"] == 2 * sgmv_flop(row["batch"], 16, 256)
        assert row["io_bytes"] == 2 * sgmv_bytes(row["batch"], row["models"], 16, 256, 4)
        assert row["flop_per_s"] == pytest.approx(row["flop"] / row["us"] * 1e6)
        assert row["error_of_bound"] <= 1
    # §7.1: Distinct's does not change, Identical's grows most, the others' are between.
    assert intensity["distinct"][0] == intensity["distinct"][-1]
    last = [intensity[popularity][-1] for popularity in POPULARITIES]
    assert last[0] < min(last[1:3])
    assert max(last[1:3]) < last[3]
    assert all(paper is None for _, paper in figures(found).values())


def test_fig8(tmp_path: Path) -> None:
    found = smoke(tmp_path, "punica-fig8")
    at = {(row["popularity"], row["batch"], row["operator"]): row for row in found["rows"]}
    assert len(at) == len(POPULARITIES) * 2 * 5
    assert all(row["us"] > 0 for row in at.values())
    gathered, paged = at["identical", 8, "gather-bmm"], at["identical", 8, "sgmv"]
    assert gathered["weight_bytes"] == 17 * paged["weight_bytes"], "1 + 2 x 8 models' weights instead of 1"
    name = "distinct: loop over sgmv, batch 8"
    expected = at["distinct", 8, "loop"]["us"] / at["distinct", 8, "sgmv"]["us"]
    assert figures(found)[name][0] == pytest.approx(expected, abs=1e-3)


def test_fig8_has_the_papers_figures_at_batch_64() -> None:
    from manylora_lab.reproduce.punica_fig8 import OPERATORS, _headline

    rows = [
        {"popularity": popularity, "batch": batch, "operator": operator, "us": 40.0 + batch}
        for popularity in POPULARITIES
        for batch in (1, 64)
        for operator in OPERATORS
    ]
    found = {figure.metric: figure.paper for figure in _headline(rows, is_gpu=True)}
    # §7.1: "from 37 us to 116 us", "from 37 us to 46 us", "from 37 us to 40 us".
    assert found["distinct: sgmv, batch 64, us"] == 116
    assert found["uniform: sgmv, batch 64, us"] == found["skewed: sgmv, batch 64, us"] == 46
    assert found["identical: sgmv, batch 64, us"] == 40
    assert found["identical: sgmv, batch 1, us"] == 37
    assert found["distinct: sgmv, batch 64 over 1"] is None  # 116 / 37 is not stated
    assert found["distinct: loop over sgmv, batch 64"] is None


def test_fig9(tmp_path: Path) -> None:
    found = smoke(tmp_path, "punica-fig9")
    assert {row["rank"] for row in found["rows"]} == {8, 16, 32, 64}
    assert all(row["error"] < 1e-5 for row in found["rows"])
    assert len(found["rows"]) == 4 * 4 * 2


def test_fig9_has_the_papers_figures_at_batch_64() -> None:
    from manylora_lab.reproduce.punica_fig9 import RANKS, _headline

    rows = [
        {"popularity": popularity, "rank": rank, "batch": batch, "us": 40.0}
        for popularity in POPULARITIES
        for batch in (1, 64)
        for rank in RANKS
    ]
    found = {figure.metric: figure.paper for figure in _headline(rows, is_gpu=True)}
    stated = [found[f"distinct, rank {rank}: batch 64, us"] for rank in RANKS]
    assert stated == [72, 75, 89, 118]  # §7.1
    assert found["skewed, rank 8: batch 1, us"] == 42
    assert found["skewed, rank 8: batch 64, us"] is None, "the text gives a range"


@pytest.mark.parametrize("device", ["sim", "cpu"])
def test_fig11(tmp_path: Path, device: Device) -> None:
    found = smoke(tmp_path, "punica-fig11", device)
    at = {(row["popularity"], row["system"]): row for row in found["rows"]}
    assert len(at) == 4 * 5 + 3
    for popularity in ("distinct", "uniform", "skewed"):
        alike, single = at[popularity, ALIKE], at[popularity, SINGLE]
        assert alike["requests"] == single["requests"] < at[popularity, MIXED]["requests"]
        assert alike["output_tokens"] == single["output_tokens"]
        ratio, _ = figures(found)[f"{alike['model']}: {MIXED} over {BACKBONE}, {popularity}"]
        backbone = at[popularity, BACKBONE]["tokens_per_s"]
        assert ratio == pytest.approx(alike["tokens_per_s"] / backbone, abs=1e-3)
    assert at["distinct", SINGLE]["mean_batch"] == at["distinct", BACKBONE]["mean_batch"] == 1
    for popularity in POPULARITIES:
        mixed = at[popularity, MIXED]
        assert mixed["mean_batch"] > 1
        assert mixed["tokens_per_s"] == pytest.approx(mixed["output_tokens"] / mixed["duration_s"])
        assert mixed["all_tokens_per_s"] > mixed["tokens_per_s"]
    # With one adapter nobody has to wait for another one's end.
    assert at["identical", MIXED]["mean_batch"] == at["identical", SINGLE]["mean_batch"]
    for system in (STATIC, STATIC_BACKBONE):
        row = at["identical", system]
        assert row["output_tokens"] == at["identical", MIXED]["output_tokens"], "what was asked for counts"
        # Rows of a batch whose ends differ are computed for nothing.
        assert 1 < row["mean_batch"] < row["requests"]
    assert all(paper is None for _, paper in figures(found).values()), "lengths are not the paper's"


def test_fig11_simulated_is_the_same_again_and_mixing_pays(tmp_path: Path) -> None:
    found = experiment("punica-fig11").run(Setup("smoke", workers=1))
    assert experiment("punica-fig11").run(Setup("smoke", workers=2)) == found
    assert experiment("punica-fig11").run(Setup("smoke", seed=1, workers=1)).rows != found.rows
    at = {(row["popularity"], row["system"]): row["tokens_per_s"] for row in found.rows}
    for popularity in ("distinct", "uniform", "skewed"):
        assert at[popularity, MIXED] > 1.5 * at[popularity, SINGLE]
    assert at["identical", MIXED] == at["identical", SINGLE]
    assert all(at[popularity, BACKBONE] >= at[popularity, SINGLE] for popularity in POPULARITIES)
    assert all(at[popularity, STATIC_BACKBONE] >= at[popularity, STATIC] for popularity in POPULARITIES)


SPEEDS = {MIXED: 120.0, SINGLE: 10.0, BACKBONE: 20.0, STATIC: 8.0, STATIC_BACKBONE: 12.0}


def test_fig11_has_the_papers_figures() -> None:
    rows = [
        {"model": model, "popularity": popularity, "system": system, "tokens_per_s": speed}
        for model in ("llama-2-7b", "llama-2-13b")
        for popularity in POPULARITIES
        for system, speed in SPEEDS.items()
    ]
    headline = punica_fig11._headline(rows, RequestLoad(1000, 1000, 1, 0))
    found = {figure.metric: (figure.ours, figure.paper) for figure in headline}
    # §7.2.
    assert found[f"llama-2-7b: tokens/s, {MIXED}, mean of popularities"] == (120, 1044)
    assert found[f"llama-2-13b: tokens/s, {MIXED}, mean of popularities"] == (120, 693)
    assert found[f"llama-2-7b: tokens/s, {BACKBONE}, identical"] == (20, 1140)
    assert found[f"llama-2-13b: tokens/s, {BACKBONE}, identical"] == (20, 789)
    assert found[f"llama-2-7b: {MIXED} over {BACKBONE}, most"] == (6, 12)
    assert found[f"llama-2-7b: {MIXED} over {STATIC}, most"] == (15, None)
    assert found[f"llama-2-7b: {MIXED} over {STATIC}, identical"] == (15, None)
    assert found[f"llama-2-13b: {MIXED} over {STATIC_BACKBONE}, identical"] == (10, None)
    part = punica_fig11._headline(rows, RequestLoad(1000, 50, 1, 0))
    assert [figure.paper for figure in part if figure.metric.endswith(", most")] == [None] * 6, (
        "not its requests"
    )


def test_fig10_has_the_papers_figure() -> None:
    from manylora_lab.reproduce.punica_fig10 import _headline

    rows = [
        {
            "case": f"{model}, length {length}", "model": model, "length": length, "batch": batch,
            "popularity": popularity, "ms": float(batch),
        }
        for model in ("llama-2-7b", "llama-2-13b")
        for length in (512, 2048)
        for batch in (1, 32)
        for popularity in POPULARITIES
    ]  # fmt: skip
    found = {figure.metric: (figure.ours, figure.paper) for figure in _headline(rows)}
    assert found["llama-2-7b, length 512: batch 32 over 1, mean of popularities"] == (32, 1.72)
    assert found["llama-2-7b, length 2048: slowest popularity over fastest, batch 32"] == (1, None)


def test_fig10_says_that_it_needs_cuda(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main(["reproduce", "punica-fig10", "--smoke", "--out", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "punica-fig10 needs a CUDA device, and there is none" in lines[0]


@pytest.mark.parametrize(
    ("name", "device", "words"),
    [
        ("punica-fig10", "cpu", "punica-fig10 runs on cuda, not on cpu"),
        ("punica-fig7", "sim", "punica-fig7 runs on cpu or cuda, not on sim"),
        ("punica-fig14", "sim", "did you mean punica-fig1"),
    ],
)
def test_wrong_names_and_devices(
    name: str, device: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", name, "--smoke", "--device", device, "--out", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert words in lines[0]


def test_they_are_found_without_torch() -> None:
    code = (
        "import sys; from manylora_lab.reproduce.registry import experiment; "
        f"[experiment(name) for name in {NAMES}]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
