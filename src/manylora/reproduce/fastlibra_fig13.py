"""FastLibra's Figure 13: use of device memory, and hit rates, by scenario (§6.4)."""

from __future__ import annotations

from pathlib import Path

from manylora.reproduce import drawing
from manylora.reproduce.experiment import Experiment, Setup
from manylora.reproduce.fastlibra_grid import (
    BASELINES,
    NOTES,
    POLICIES,
    cases,
    pairs,
    run_grid,
    scenario_rows,
)
from manylora.reproduce.report import Headline, Report, Row, mean, ratio

PAPER = {"static-lru": ("vLLM", 1.2, 1.3), "s-lora": ("S-LoRA", 2.6, 3.2)}
"""§6.4: FastLibra's utilisation and hit rate as multiples of each."""
PAPER_INVALID = 0.481
"""§2.3.1, of its evaluation: vLLM's "invalid KV caches on average" (§1 says "up to 46.5%")."""
FIELDS = {
    "used": "pool_used", "running": "pool_running", "history": "pool_history", "adapters": "pool_adapters",
    "invalid": "pool_invalid", "kv_hit": "kv_hit_device", "adapter_hit": "adapter_hit_device",
    "kv_hit_host": "kv_hit_host", "invalid_share": "invalid_share",
}  # fmt: skip


def run(setup: Setup) -> Report:
    """The grid of Figure 11; means over time, then rates, models and numbers of adapters."""
    grid = run_grid(setup, cases(setup), POLICIES)
    rows = scenario_rows(grid, POLICIES, FIELDS)
    for row in rows:
        row["hit"] = mean([row["kv_hit"], row["adapter_hit"]])
    notes = (
        *NOTES,
        "Use: share of the pool, which is what the weights leave; adapters, history and running KV, sampled every "
        "virtual second.",
        "Hit rate: the mean of the share of prompt tokens whose KV and the share of requests whose adapter is on "
        "the device when they are admitted (the paper does not say how it joins the two).",
    )
    return Report(EXPERIMENT.name, EXPERIMENT.title, grid.settings(setup), rows, _headline(rows), notes)


def _headline(rows: list[Row]) -> list[Headline]:
    figures = []
    for ours in ("fastlibra", "manylora"):
        for baseline in BASELINES:
            name, used, hit = PAPER[baseline]
            for field, what, stated in (("used", "memory use", used), ("hit", "hit rate", hit)):
                ratios = [ratio(a, b) for a, b in pairs(rows, ours, baseline, field, "scenario")]
                paper = stated if ours == "fastlibra" else None
                figures.append(Headline(f"{ours}: {what} over {name}'s", mean(ratios), paper))
    invalid = [row["invalid_share"] for row in rows if row["policy"] == "static-lru"]
    figures.append(Headline("static-lru: invalid share of history", mean(invalid), PAPER_INVALID))
    return figures


def draw(report: Report, path: Path) -> None:
    """Bars by scenario: use, then the hit rates."""
    panels = (
        ("used", "memory in use, share"),
        ("kv_hit", "KV hits, share of tokens"),
        ("adapter_hit", "LoRA hits, share"),
    )
    drawing.bars(report, path, panels, group="scenario", series="policy")


EXPERIMENT = Experiment(
    "fastlibra-fig13",
    "use of device memory and hit rates of the cache policies, by scenario",
    ("sim",),
    run,
    draw,
)
