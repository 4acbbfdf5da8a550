"""S-LoRA-bmm as operations of an engine: against the reference, and the tokens of a whole engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_lab.bench.padded_lora import PaddedPlan, pad_adapters, padded_ops
from manylora_lab.bench.provenance import ROOT
from manylora_lab.bench.rounding import Bounded
from manylora_lab.benchmarks import s_lora_engines
from manylora_lab.benchmarks.s_lora_engines import SYSTEMS

from manylora import LLM, SamplingParams
from manylora.kernels.cpu import CpuOps
from manylora.kernels.shapes import PageShape, adapter_geometry
from tests.kernels.cases import llama_groups, lora_case, lora_truth

CPU = torch.device("cpu")
DEMO = ROOT / "demo"


@pytest.mark.parametrize("seed", range(6))
def test_it_computes_what_the_engines_own_does(seed: int) -> None:
    """Ranks, lengths and missing projections at random; what of the pool is no adapter's is not a number."""
    page = PageShape(layers=3, page_tokens=4, kv_heads=2, head_dim=12, itemsize=4)
    geometry = adapter_geometry(page, [llama_groups(40, 48, 24, 72)] * page.layers)
    lengths = [(seed % 3, 1), (0, 7), (2, 1), (0, 3)][: 1 + seed]
    case = lora_case(
        seed, device=CPU, dtype=torch.float32, lengths=lengths, ranks=[1, 2, 5, 16, 33], geometry=geometry,
        missing=0.3, two_scales=seed % 2 == 1,
    )  # fmt: skip
    ops = padded_ops(CpuOps())
    plan = ops.plan_lora(case.segments, geometry, CPU)
    assert isinstance(plan, PaddedPlan)
    for group in geometry.groups:
        x = torch.randn(case.num_tokens, group.in_features)
        y = torch.randn(case.num_tokens, group.offsets[-1])
        added = lora_truth(case, x, group)
        out = y.clone()
        ops.lora(out, x, case.pool, case.layer, group, plan)
        assert Bounded.given(y).plus(added).rounded(torch.float32).excess(out) <= 1
        untouched = added.exact == 0
        assert torch.equal(out[untouched], y[untouched])


def test_every_copy_is_padded_to_the_largest_rank() -> None:
    page = PageShape(layers=2, page_tokens=4, kv_heads=2, head_dim=12, itemsize=4)
    geometry = adapter_geometry(page, [llama_groups(40, 48, 24, 72)] * page.layers)
    case = lora_case(
        1, device=CPU, dtype=torch.float32, lengths=[(0, 2), (0, 5)], ranks=[2, 16], geometry=geometry, missing=0.0
    )  # fmt: skip
    plan = PaddedPlan.of(case.segments, geometry, CPU)
    assert plan is not None
    assert plan.tokens.tolist() == [[0, 1, 1, 1, 1], [2, 3, 4, 5, 6]]
    assert plan.is_token.sum(1).tolist() == [2, 5]
    for index, projection in enumerate(geometry.projections):
        ranks = case.segments.records[:, index, 2]
        copies = plan.copies(case.pool, case.layer, index, False, projection.in_features)
        assert copies.shape == (2, ranks.max(), projection.in_features)
        assert copies.is_contiguous()
        for copy, rank, adapter in zip(copies, ranks, case.adapters):
            a, _ = adapter[index] or (None, None)
            assert a is not None
            assert torch.equal(copy[:rank], a)
            assert not copy[rank:].any()


def test_a_whole_engine_gives_the_same_tokens() -> None:
    folders = sorted((DEMO / "adapters").iterdir())[:3]
    models: list[str | None] = [None, *(folder.name for folder in folders)]
    prompts = [[5 + 7 * i + j for j in range(20)] for i in range(len(models))]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    found = []
    for is_padded in (False, True):
        adapters = {folder.name: str(folder) for folder in folders}
        llm = LLM(str(DEMO / "model"), adapters=adapters, device="cpu", dtype="float32")
        try:
            worker: Any = llm._llm._driver._ports._executor
            if is_padded:
                pad_adapters(worker)
                assert worker._forward.decoder.ops.name.endswith("padded copies")
            found.append([r.outputs[0].token_ids for r in llm.generate(prompts, params, models)])
        finally:
            llm.close()
    assert sum(a == b for a, b in zip(*found)) >= len(models) - 1, "but for a near tie"


def baselines(folder: Path, *args: str) -> dict[str, Any]:
    """The record of S-LoRA's baselines as a toy."""
    out = folder / "record.json"
    s_lora_engines.main(["--toy", "--repeats", "1", "--out", str(out), "--commit", "abc", *args])
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["left_out"] == []
    assert found["provenance"]
    return found


def test_s_loras_baselines_run_beside_ours(tmp_path: Path) -> None:
    """Of two pools most pages are of no use when a request is refused: the adapters' part holds one of them."""
    rows = baselines(tmp_path, "--parts", "engines", "--adapters", "12")["engines"]
    assert [row["system"] for row in rows] == list(SYSTEMS)
    for row in rows:
        assert row["errors"] == []
        assert row["tokens_per_s"] > 0
        assert row["refused"] > 0
        assert 0 <= row["unused_share"] <= row["unused_share_most"] <= 1
    ours, two_pools = rows[:2]
    assert two_pools["unused_share"] > 2 * ours["unused_share"]


@pytest.mark.long
def test_merged_copies_run_beside_ours(tmp_path: Path) -> None:
    rows = baselines(tmp_path, "--parts", "copies", "--models", "1", "3")["copies"]
    assert [(row["system"], row["models"]) for row in rows] == [
        ("manylora", 1), ("manylora", 3), ("merged copies", 1), ("merged copies", 3),
    ]  # fmt: skip
    assert all(row["errors"] == [] and row["tokens_per_s"] > 0 for row in rows)
    assert rows[3]["weight_bytes"] == 3 * rows[2]["weight_bytes"] == 3 * rows[1]["weight_bytes"]


def test_without_time_all_is_left_out(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    s_lora_engines.main(
        ["--toy", "--time-budget", "0", "--parts", "engines", "--out", str(out), "--commit", "abc"]
    )
    assert json.loads(out.read_text())["left_out"] == list(SYSTEMS)
    asked = ["s-lora-bmm", "manylora"]
    s_lora_engines.main(
        [
            "--toy",
            "--time-budget",
            "0",
            "--parts",
            "engines",
            "--out",
            str(out),
            "--commit",
            "abc",
            "--systems",
            *asked,
        ]
    )
    assert json.loads(out.read_text())["left_out"] == asked
