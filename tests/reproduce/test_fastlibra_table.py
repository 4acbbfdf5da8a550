"""FastLibra's table: its store of cells, its search for peaks, its rates, and what it reports of a part."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manylora_lab.baselines import ALL_CACHE_POLICIES
from manylora_lab.reproduce.cells import MEASURED, REFERENCE, Cell, cell_config, cell_costs, run_cell
from manylora_lab.reproduce.drawing import BarPanels
from manylora_lab.reproduce.experiment import Setup
from manylora_lab.reproduce.fastlibra_table import TABLE
from manylora_lab.reproduce.fastlibra_table_cases import COMPARED, RatesFile, table
from manylora_lab.reproduce.fastlibra_table_peaks import (
    LIMIT_MS,
    Peak,
    Search,
    known_peak,
    next_rate,
    peak,
    run_into,
)
from manylora_lab.reproduce.fastlibra_table_report import PARTS
from manylora_lab.reproduce.fastlibra_table_store import CellStore, code_of, decisions
from manylora_lab.reproduce.fastlibra_table_text import draw, markdown
from manylora_lab.reproduce.report import ExperimentReport

from manylora.cli import main
from manylora.config.declaring import ConfigError

SMOKE = Setup("smoke", workers=1)
SMALL = Cell("chatbot", "fastlibra", 8.0, 20, 4.0)
PAPER = {
    "fastlibra-pages: TTFT against vLLM": -0.603, "fastlibra-pages: TPOT against vLLM": -0.339,
    "fastlibra-pages: peak over vLLM's": 1.7, "fastlibra-pages: memory use over vLLM's": 1.2,
    "fastlibra-pages: hit rate over vLLM's": 1.3, "fastlibra-pages: TTFT against vLLM, translation": -0.689,
    "fastlibra-pages: TTFT against vLLM, without translation": -0.525,
    "fastlibra-pages: TTFT against S-LoRA": -0.501, "fastlibra-pages: TPOT against S-LoRA": -0.286,
    "fastlibra-pages: peak over S-LoRA's": 1.6, "fastlibra-pages: memory use over S-LoRA's": 2.6,
    "fastlibra-pages: hit rate over S-LoRA's": 3.2, "fastlibra-pages: TTFT against S-LoRA, agent": -0.811,
    "fastlibra-pages: TTFT against S-LoRA, without agent": -0.346,
    "fastlibra-pages-wom: TTFT ratio": 1.27, "fastlibra-pages-wom: TPOT ratio": 1.18,
    "fastlibra-pages-wom: peak change": -0.198,
    "fastlibra-pages-wos: TTFT ratio": 1.24, "fastlibra-pages-wos: TPOT ratio": 1.15,
    "fastlibra-pages-wos: peak change": -0.172,
    "fastlibra-pages-wol: TTFT ratio": 1.13, "fastlibra-pages-wol: TPOT ratio": 1.11,
    "fastlibra-pages-wol: peak change": -0.131,
    "fastlibra-pages-wom: invalid share of history": 0.486, "static-lru: invalid share of history": 0.481,
}  # fmt: skip
"""§2.3.1, §6.3 to §6.8; §6.9's two stand where its cases do."""


def table_report(store: Path, **others: Any) -> ExperimentReport:
    """The smoke table of the NPU, from this store."""
    return TABLE.run(dataclasses.replace(SMOKE, store=store, **others))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ExperimentReport]:
    """The smoke table, and the store that it left."""
    path = tmp_path_factory.mktemp("table") / "cells.jsonl"
    return path, table_report(path)


# ---------------------------------------------------------------- the store


def test_a_cell_is_found_again_by_its_settings_alone(tmp_path: Path) -> None:
    store = CellStore(tmp_path / "new" / "cells.jsonl")
    assert store.find(SMALL) is None
    result = run_into(store, SMALL)
    assert result == store.find(SMALL) == CellStore(store.path).find(SMALL) == run_cell(SMALL)
    for other in (
        {"rate": 9.0}, {"policy": "lru"}, {"seed": 1}, {"num_adapters": 21}, {"duration_s": 5.0},
        {"hardware": MEASURED}, {"model": "llama-2-13b"}, {"cards": 2}, {"popularity": "uniform"},
    ):  # fmt: skip
        assert store.find(dataclasses.replace(SMALL, **other)) is None


def test_two_stores_add_to_one_file(tmp_path: Path) -> None:
    one, two = CellStore(tmp_path / "cells.jsonl"), CellStore(tmp_path / "cells.jsonl")
    faster = dataclasses.replace(SMALL, rate=9.0)
    run_into(one, SMALL)
    run_into(two, faster)
    assert one.find(faster) is None
    one.refresh()
    assert one.find(faster) == two.find(faster)
    assert two.find(SMALL) == one.find(SMALL), "adding reads what came before"


def test_half_a_line_of_a_killed_process_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    run_into(CellStore(path), SMALL)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    store = CellStore(path)
    assert store.find(SMALL) is not None
    faster = dataclasses.replace(SMALL, rate=9.0)
    run_into(store, faster)
    again = CellStore(path)
    assert again.find(SMALL) is not None
    assert again.find(faster) is not None


def test_cells_of_other_code_are_passed_over_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    run_into(CellStore(path), SMALL)
    line = json.loads(path.read_text())
    path.write_text(json.dumps({**line, "code": "0" * 12}) + "\n")
    store = CellStore(path)
    assert store.find(SMALL) is None
    assert store.num_of_other_code == 1
    run_into(store, SMALL)
    assert CellStore(path).find(SMALL) is not None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format": "manylora-cells-0"}, "line 1 of the store .* has the format 'manylora-cells-0'"),
        ({"cell": {"policy": "lru"}}, "line 1 of the store .* is not a cell"),
    ],
)
def test_lines_that_are_none_of_ours_are_refused(
    tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    path = tmp_path / "cells.jsonl"
    run_into(CellStore(path), SMALL)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}) + "\n")
    with pytest.raises(ConfigError, match=expected):
        CellStore(path)


@pytest.mark.parametrize("policy", ALL_CACHE_POLICIES)
def test_the_small_replay_that_stands_for_the_code_is_short_of_memory(policy: str) -> None:
    """Else a change of how victims are chosen would not change the code's digest."""
    cell = dataclasses.replace(SMALL, policy=policy, rate=3.0, num_adapters=12, duration_s=30.0)
    moments, counts = decisions(cell)
    assert len(moments) == 90
    assert counts["preemptions"] > 0
    assert counts["pages_in"] > 0
    assert counts["history_drops"] > 0
    if policy not in ("s-lora", "lru-drop"):  # which keep adapters' copies on the host and give KV up
        assert counts["pages_out"] > 0


def test_code_tells_policies_and_settings_apart_but_not_loads() -> None:
    code = code_of(SMALL)
    assert code == code_of(dataclasses.replace(SMALL, rate=1.0, duration_s=1800.0))
    others = [
        dataclasses.replace(SMALL, policy=policy) for policy in ("lru", "manylora", "static-lru", REFERENCE)
    ]
    others += [
        dataclasses.replace(SMALL, hardware=MEASURED),
        dataclasses.replace(SMALL, scenario="agent"),
        dataclasses.replace(SMALL, num_adapters=50),
        dataclasses.replace(SMALL, cards=2),
    ]
    codes = [code, *map(code_of, others)]
    assert len(set(codes)) == len(codes)


# ---------------------------------------------------------------- peaks


@settings(max_examples=200, deadline=None)
@given(
    st.floats(0.05, 300.0),
    st.floats(1.0, 100.0),
    st.sampled_from((Search(0.035, 1.06, 400.0), Search(0.25, 1.5, 400.0))),
)
def test_a_search_ends_at_the_threshold(threshold: float, guess: float, search: Search) -> None:
    known: dict[float, bool] = {}
    while True:
        missed = min((rate for rate, is_borne in known.items() if not is_borne), default=None)
        found = Peak(max((rate for rate, is_borne in known.items() if is_borne), default=0.0), missed)
        rate = next_rate(guess, found, search)
        if rate is None:
            break
        assert rate not in known
        known[rate] = rate < threshold
    assert len(known) < 40
    if found.per_s == 0:
        assert threshold < guess / 50
    else:
        assert found.missed_per_s is not None
        assert found.per_s < threshold <= found.missed_per_s
        # Rates have four digits.
        assert found.missed_per_s - found.per_s <= search.tolerance * found.missed_per_s + 1e-3 * threshold


def test_a_peak_is_found_with_what_the_store_has(tmp_path: Path) -> None:
    store, search = CellStore(tmp_path / "cells.jsonl"), Search(0.5, 2.0, 200.0)
    cell = dataclasses.replace(SMALL, policy="s-lora", model="codellama-34b", cards=2, duration_s=5.0)
    assert known_peak(cell, store, search) is None
    found = peak(cell, store, search)
    lines = store.path.read_bytes()
    assert peak(cell, CellStore(store.path), search) == known_peak(cell, store, search) == found
    assert store.path.read_bytes() == lines, "nothing was run again"
    assert found.missed_per_s is not None
    for rate, is_borne in ((found.per_s, True), (found.missed_per_s, False)):
        result = run_cell(dataclasses.replace(cell, rate=rate))
        assert (result["ttft_mean_ms"] < LIMIT_MS) is is_borne


def test_a_limit_on_ttft_changes_nothing_of_a_run_that_stays_below() -> None:
    assert run_cell(SMALL, most_ttft_ms=LIMIT_MS) == run_cell(SMALL)
    hopeless = dataclasses.replace(SMALL, rate=30.0, duration_s=10.0)
    assert run_cell(hopeless, most_ttft_ms=LIMIT_MS) == {"ttft_mean_ms": float("inf")}
    assert run_cell(hopeless)["ttft_mean_ms"] > LIMIT_MS


# ---------------------------------------------------------------- cells and rates


def test_the_full_table_is_the_papers() -> None:
    for hardware, pool_like in (("npu", None), ("h200", "fastlibra-npu")):
        full = table(Setup("full"), hardware)
        assert len(full.main) == 27
        assert list(full.main)[:3] == ["chatbot 7B-20", "chatbot 7B-50", "chatbot 7B-100"]
        assert len(full.many) == 10
        assert {cell.duration_s for cell in full.cases.values()} == {1800}
        assert {cell.pool_like for cell in full.cases.values()} == {pool_like}
        assert full.shares == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
        assert set(full.policies("agent 34B-100")) == {*COMPARED, REFERENCE}


def test_a_model_is_run_in_every_scenario_before_the_next() -> None:
    shown = table(Setup("full"), "npu")
    batches = shown.batches
    assert sorted(case for batch in batches for case in batch) == sorted(shown.cases)
    assert batches[0][:4] == ["chatbot 7B-20", "translation 7B-20", "agent 7B-20", "chatbot 7B-50"]
    assert [len({shown.cases[case].model for case in batch}) for batch in batches] == [1, 1, 1, 1]
    assert batches[-1] == list(shown.many)


def test_cells_of_one_rate_differ_in_policy_alone() -> None:
    shown = table(SMOKE, "npu")
    (case,) = shown.cases
    cells = shown.cells(case, {case: [2.0, 4.0]})
    assert len(cells) == 2 * (len(COMPARED) + 1)
    for (rate, policy), cell in cells.items():
        assert cell == dataclasses.replace(shown.cases[case], rate=rate, policy=policy)


def test_the_h200_has_the_papers_pool_and_measured_costs() -> None:
    for name, measured in table(Setup("full"), "h200").main.items():
        described = table(Setup("full"), "npu").main[name]
        assert cell_config(measured).num_pages == cell_config(described).num_pages
    one = dataclasses.replace(SMALL, hardware=MEASURED)
    two = dataclasses.replace(one, cards=2)
    assert cell_costs(two).copy_s(10**9) == pytest.approx(cell_costs(one).copy_s(10**9) / 2, rel=0.02)
    with pytest.raises(ConfigError, match="'a100'"):
        table(SMOKE, "a100")


def test_rates_are_fixed_once(tmp_path: Path) -> None:
    shown = table(SMOKE, "npu")
    (case,) = shown.cases
    path = tmp_path / "rates.json"
    RatesFile(path, shown).fix(case, Peak(3.3333333, 3.5))
    assert RatesFile(path, shown).rates == {case: [1.667]}
    longer = table(Setup("quick", workers=1), "npu")
    with pytest.raises(ConfigError, match=r"were found with duration_s 4\.0, not 30\.0"):
        RatesFile(path, longer)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        RatesFile(path, shown)
    with pytest.raises(ConfigError, match="no rate is borne"):
        RatesFile(path.with_name("none.json"), shown).fix(case, Peak(0.0, 0.1))


# ---------------------------------------------------------------- the report


def test_the_table_has_every_policy_and_the_papers_numbers(stored: tuple[Path, ExperimentReport]) -> None:
    _, found = stored
    assert {row["policy"] for row in found.rows} == {*COMPARED, REFERENCE}
    assert found.settings["missing"] == []
    assert {f.metric: f.paper for f in found.headline if f.paper is not None} == PAPER
    assert len({f.metric for f in found.headline}) == len(found.headline)
    for row in found.rows:
        parts = sum(row[f"ttft_{part}_ms"] for part in PARTS)
        assert parts == pytest.approx(row["ttft_mean_ms"], abs=0.01)
        assert (row["peak_per_s"] is None) == (row["policy"] == REFERENCE)
        assert (row["page_kept_device_limit"] is not None) == (row["policy"] == "manylora")
    (ours,) = (row for row in found.rows if row["policy"] == "manylora")
    assert ours["page_kept_device"] <= ours["page_kept_device_limit"] <= ours["page_kept_limit"] <= 1


def test_a_second_run_finds_all_and_reports_the_same(stored: tuple[Path, ExperimentReport]) -> None:
    path, found = stored
    lines = path.read_bytes()
    again = table_report(path)
    assert path.read_bytes() == lines
    assert again == found
    assert table_report(path, is_run=False) == found


def test_a_stopped_run_goes_on_with_other_workers(
    stored: tuple[Path, ExperimentReport], tmp_path: Path
) -> None:
    path, found = stored
    lines = path.read_bytes().splitlines(keepends=True)
    stopped = tmp_path / path.name
    most = b"".join(lines[: 3 * len(lines) // 4])
    stopped.write_bytes(most)
    again = table_report(stopped, workers=2)
    assert again.rows == found.rows
    assert stopped.read_bytes().startswith(most)


def test_a_part_of_the_table_says_what_is_missing(
    stored: tuple[Path, ExperimentReport], tmp_path: Path
) -> None:
    path, found = stored
    part = tmp_path / path.name
    (rates,) = path.parent.glob("fastlibra_rates_*.json")
    part.touch()
    nothing = table_report(part, is_run=False)
    assert nothing.rows == []
    assert nothing.settings["missing"] == ["chatbot 7B-20: rates"]
    draw(nothing, tmp_path / "nothing.png")
    assert "- not even rates: chatbot 7B-20" in (tmp_path / "nothing.md").read_text()
    (tmp_path / rates.name).write_bytes(rates.read_bytes())
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["cell"]["policy"] != "s-lora"]
    part.write_text("\n".join(kept) + "\n")
    report = table_report(part, is_run=False)
    assert report.settings["missing"] == ["chatbot 7B-20, s-lora: 0 of 1 rates"]
    for row, whole in zip(report.rows, found.rows, strict=True):
        if row["policy"] == "s-lora":
            assert row["ttft_mean_ms"] is None
        else:
            assert row["ttft_mean_ms"] == whole["ttft_mean_ms"]
            assert row["num_sustained"] == 0, "nobody knows what s-lora sustains"
    ours = {f.metric: f.ours for f in report.headline}
    assert ours["fastlibra-pages: TTFT against S-LoRA"] is None
    assert ours["fastlibra-pages: TTFT against vLLM"] is not None
    draw(report, tmp_path / "part.png")
    text = (tmp_path / "part.md").read_text()
    assert "**Partial**: 8 of 9 simulations, 7 of 8 peaks are there" in text
    assert "- chatbot 7B-20: 8 of 9 simulations, 7 of 8 peaks" in text


def test_the_text_explains_gaps_by_their_parts(stored: tuple[Path, ExperimentReport]) -> None:
    _, found = stored
    text = markdown(found)
    by_policy = {row["policy"]: row for row in found.rows}
    (rate,) = found.settings["rates"]["chatbot 7B-20"]
    assert f"| {rate:g} | {by_policy['fastlibra-pages']['ttft_mean_ms']:.1f} |" in text
    gap = by_policy["s-lora"]["ttft_mean_ms"] - by_policy["manylora"]["ttft_mean_ms"]
    assert f"- chatbot: s-lora waits {gap:+.1f} ms longer than manylora: queue" in text
    assert "**Partial**" not in text


def test_the_gaps_of_many_adapters_are_explained_too(stored: tuple[Path, ExperimentReport]) -> None:
    _, found = stored
    many = [{**row, "group": "many"} for row in found.rows]
    text = markdown(dataclasses.replace(found, rows=[*found.rows, *many]))
    after = text.partition("## 1,000 and 2,000 adapters")[2]
    (ours,) = (row for row in many if row["policy"] == "manylora")
    parts = " | ".join(f"{ours[f'ttft_{part}_ms']:.1f}" for part in ("mean", *PARTS))
    assert f"| chatbot | 1 | manylora | {parts} |" in after
    assert "- chatbot: static-lru waits " in after


def test_peaks_are_drawn_as_shares_of_fastlibras_and_unknown_ones_not_as_zero(
    stored: tuple[Path, ExperimentReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = stored
    drawn: list[ExperimentReport] = []
    draw_bars = BarPanels.__call__

    def remember(bars: BarPanels, report: ExperimentReport, path: Path) -> None:
        drawn.append(report)
        draw_bars(bars, report, path)

    monkeypatch.setattr(BarPanels, "__call__", remember)
    draw(found, tmp_path / "table.svg")
    (report,) = drawn
    peaks = {row["policy"]: row["peak_per_s"] for row in found.rows}
    for row in report.rows:
        if row["policy"] == REFERENCE:
            assert row["peak_share"] is None
        else:
            assert row["peak_share"] == pytest.approx(
                peaks[row["policy"]] / peaks["fastlibra-pages"], abs=1e-4
            )
    no_number = [
        row
        for row in report.rows
        for field in ("ttft_mean_ms", "sustained_ttft_mean_ms", "tpot_mean_ms", "peak_share")
        if row[field] is None
    ]
    assert (tmp_path / "table.svg").read_text().count("<!-- n/a -->") == len(no_number) > 0


# ---------------------------------------------------------------- the command


def test_the_command_takes_hardware_and_store(stored: tuple[Path, ExperimentReport], tmp_path: Path) -> None:
    path, found = stored
    arguments = ["reproduce", "fastlibra-table", "--smoke", "--report-only", "--store", str(path)]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "fastlibra-table.json").read_text())["rows"] == found.rows
    assert main([*arguments, "--out", str(tmp_path), "--hardware", "h200"]) == 0
    missing = json.loads((tmp_path / "fastlibra-table-h200.json").read_text())["settings"]["missing"]
    assert missing == ["chatbot 7B-20: rates"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fastlibra-table", "--hardware", "a100"], "--hardware must be npu or h200"),
        (["fastlibra-fig12", "--hardware", "npu"], "fastlibra-fig12 has no choice of hardware"),
        (["fastlibra-fig12", "--report-only"], "fastlibra-fig12 keeps nothing"),
        (["fastlibra-table", "--report-only", "--store", "none.jsonl"], "no store none.jsonl to report from"),
        (["fastlibra-table", "--report-only", "--smoke"], "name a store to report from"),
    ],
)
def test_options_that_fit_nothing_end_with_one_line(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *arguments, "--out", str(tmp_path)]) == 2
    last = capsys.readouterr().err.strip().splitlines()
    assert len(last) == 1
    assert expected in last[0]
