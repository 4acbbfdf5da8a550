"""The study of cache policies in virtual time, on a few turns of a trace."""

from __future__ import annotations

from manylora_lab.benchmarks.sensitivity import (
    Workload,
    compare_policies,
    grid_of,
    page_of,
    pages_of,
    ranks_of,
    sweep_fastlibra,
    sweep_manylora,
    table_of,
)

from manylora.config import CACHE_POLICIES

SMALL = (Workload(5),)


def test_every_policy_has_a_row() -> None:
    rows = compare_policies(SMALL, limit=8)["5/s, 12.6GiB"]
    assert list(rows) == list(CACHE_POLICIES)
    assert all(row["ttft_mean_ms"] > 6.5 for row in rows.values()), "a first token takes a step at least"
    assert len(table_of(rows, "policy").splitlines()) == 2 + len(CACHE_POLICIES)


def test_the_grid_has_tau_down_and_the_window_across() -> None:
    cells = sweep_fastlibra(SMALL, (1.0, 3.0), (10.0, 30.0, 60.0), limit=4)["5/s, 12.6GiB"]
    lines = grid_of(cells).splitlines()
    assert lines[0] == "| tau s | window 10 s | window 30 s | window 60 s |"
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["1", "3"]


def test_the_page_says_that_nothing_was_measured() -> None:
    report = {
        "costs": {"step_base_s": 0.0065},
        "policies": {},
        "fastlibra": {},
        "manylora": sweep_manylora(SMALL, (10.0,), limit=4),
    }
    page = page_of(report, "python -m manylora_lab.benchmarks.sensitivity")
    assert "**Simulated, not measured**" in page
    assert "### 5/s, 12.6GiB" in page


def test_adapters_take_what_their_ranks_fill() -> None:
    ranks = ranks_of(())
    assert len(ranks) == 100
    assert [pages_of(rank, page_bytes=8 * 2**20) for rank in ranks[:2]] == [8, 16]
