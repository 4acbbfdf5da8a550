"""S-LoRA's experiments: what must hold of their numbers, the paper's values, and the baselines by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.pricing.costs import StepWork
from manylora_lab.reproduce import s_lora_baselines, s_lora_cpu, s_lora_table3
from manylora_lab.reproduce.command import reproduce
from manylora_lab.reproduce.experiment import Setup
from manylora_lab.reproduce.registry import experiment
from manylora_lab.reproduce.report import ExperimentReport
from manylora_lab.reproduce.s_lora_baselines import batches, measure_packed, measure_peft
from manylora_lab.reproduce.s_lora_cells import (
    SETTINGS,
    SYSTEMS,
    PaddedCopies,
    ServingCase,
    measure,
    satisfaction,
    stream_of,
)
from manylora_lab.reproduce.s_lora_figures import arena_like
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.hardware import HARDWARE
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

from manylora.config.declaring import ConfigError
from manylora.config.policy import ADMISSIONS

FIGURES = ("s-lora-fig5", "s-lora-fig6", "s-lora-fig7", "s-lora-fig10")
SMALL = ServingCase("S2", "a10", 12, 4.0, 10.0)


def smoke(name: str, **others: object) -> ExperimentReport:
    return experiment(name).run(Setup("smoke", **{"workers": 1, **others}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def reports() -> dict[str, ExperimentReport]:
    simulated = smoke("s-lora-table3", device="sim")
    return {"s-lora-table3": simulated, **{name: smoke(name) for name in FIGURES}}


# ---------------------------------------------------------------- what every report must have


@pytest.mark.parametrize("name", ["s-lora-table3", *FIGURES])
def test_rows_make_sense(reports: dict[str, ExperimentReport], name: str) -> None:
    for row in reports[name].rows:
        assert row["throughput_per_s"] > 0
        assert 0 <= row["satisfaction"] <= row["attainment"] <= 1 - row["dropped"] <= 1
        assert 0 < row["ttft_mean_s"] <= row["latency_mean_s"]


@pytest.mark.parametrize("name", ["s-lora-table3", *FIGURES])
def test_equal_seeds_give_equal_reports(reports: dict[str, ExperimentReport], name: str) -> None:
    device = reports[name].settings.get("device", "sim")
    assert smoke(name, device=device) == reports[name]
    assert smoke(name, device=device, seed=1).rows != reports[name].rows


@pytest.mark.parametrize("name", FIGURES)
def test_everybody_gets_the_same_requests(reports: dict[str, ExperimentReport], name: str) -> None:
    keys = ("num_adapters", "rate_per_s", "cv")
    asked: dict[tuple[object, ...], set[int]] = {}
    for row in reports[name].rows:
        asked.setdefault(tuple(row.get(key) for key in keys), set()).add(row["requests"])
    assert all(len(counts) == 1 for counts in asked.values())


def test_the_command_writes_the_report_and_a_picture(tmp_path: Path) -> None:
    reproduce("s-lora-fig10", tmp_path, "smoke", workers=1)
    written = json.loads((tmp_path / "s-lora-fig10.json").read_text())
    assert {row["admission"] for row in written["rows"]} == set(ADMISSIONS)
    assert all(figure["paper"] is None for figure in written["headline"])
    assert (tmp_path / "s-lora-fig10.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["s-lora-table3", "s-lora-fig5", "s-lora-fig7"])
def test_pictures(reports: dict[str, ExperimentReport], name: str, tmp_path: Path) -> None:
    experiment(name).draw(reports[name], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "device", "said"),
    [
        ("s-lora-fig4", None, "there is no experiment 's-lora-fig4'; did you mean s-lora-fig"),
        ("s-lora-fig5", "cuda", "s-lora-fig5 runs on sim, not on cuda"),
        ("s-lora-table3", "cuda", "s-lora-table3 runs on cpu or sim, not on cuda"),
    ],
)
def test_what_there_is_not(name: str, device: str | None, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        reproduce(name, tmp_path, "smoke", device)  # type: ignore[arg-type]
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- the paper's values


def test_papers_values() -> None:
    """§7.2 states 4x and 30x; the table's own are recalled, and marked."""
    rows = [
        {"case": f"{setting}, {number}", "system": system, "throughput_per_s": 1.0}
        for setting, number in s_lora_table3.PAPER
        for system in s_lora_table3.SYSTEMS
    ]
    packed, peft, *others = s_lora_table3._headline(rows, is_papers=True)
    assert (packed.paper, packed.is_recalled, peft.paper, peft.is_recalled) == (4.0, False, 30.0, False)
    found = {figure.metric: figure.paper for figure in others}
    assert found["S1, 5 adapters: requests/s of vllm-packed"] == 2.04
    assert found["S2, 2000 adapters: requests/s of s-lora"] == 6.71
    assert found["S4, 1000 adapters: requests/s of peft"] is None
    assert all(figure.is_recalled == (figure.paper is not None) for figure in others)
    assert {number for _, number in s_lora_table3.PAPER} == {2, 5, 100, 1000, 2000}


# ---------------------------------------------------------------- systems


def test_satisfaction_by_hand() -> None:
    assert [satisfaction(seconds) for seconds in (0.0, 3.0, 6.0, 60.0)] == [1.0, 0.75, 0.0, 0.0]


def test_early_abort_serves_most_in_time() -> None:
    """Far beyond what the card can: the others serve who is late already."""
    case = dataclasses.replace(SMALL, rate=8.0, duration_s=40.0)
    fcfs, lcfs, early = (measure(dataclasses.replace(case, admission=a)) for a in ADMISSIONS)
    assert fcfs["dropped"] == lcfs["dropped"] == 0 < early["dropped"]
    assert early["attainment"] > fcfs["attainment"]
    assert early["ttft_mean_s"] < 6.0 < fcfs["ttft_mean_s"]


def test_own_variants_are_not_faster_under_load() -> None:
    case = ServingCase("S2", "a10", 50, 3.0, 40.0)
    ours, bmm, parts = (measure(dataclasses.replace(case, system=s))["throughput_per_s"] for s in SYSTEMS)
    assert ours > parts > bmm


def test_padded_copies_by_hand() -> None:
    """Three rows of decode: three copies, each read, written and read again; the rest as without LoRA."""
    shape, card = SETTINGS["S2"].shape, HARDWARE["a10"]
    padded, plain = PaddedCopies(shape, "a10", 10**8), AnalyticalCosts(shape, card)
    extra_s = padded.step_s(StepWork(3, 0, 30, 5 * 10**7, 2)) - plain.step_s(StepWork(3, 0, 30, 0))
    arithmetic_s = 2 * 3 * 10**8 / shape.itemsize / card.sustained_flops
    assert extra_s == pytest.approx(9 * 10**8 / card.sustained_memory_bytes_s + arithmetic_s)
    assert padded.step_s(StepWork(3, 0, 30, 0)) == plain.step_s(StepWork(3, 0, 30, 0)), (
        "the base model needs no copies"
    )


def request(number: int, adapter: int, arrival_s: float, prompt: int, output: int) -> StreamRequest:
    return StreamRequest(arrival_s, adapter, number, 0, (Piece(number, prompt),), output)


def test_batches_are_of_one_adapter() -> None:
    queue = [request(n, n % 2, 0.0, 8, 8) for n in range(7)]
    numbers = [[r.conversation for r in batch] for batch in batches(queue, 3)]
    assert numbers == [[0, 2, 4], [6], [1, 3, 5]]


def test_peft_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 80 ms and next to nothing else: a request alone, then those that came meanwhile, by adapter."""
    asked = [
        request(0, 0, 0.0, 8, 10),
        request(1, 0, 0.1, 8, 2),
        request(2, 1, 0.2, 8, 4),
        request(3, 0, 0.3, 8, 5),
    ]
    monkeypatch.setattr(s_lora_baselines, "stream_of", lambda case: Stream("four", tuple(asked), (8, 8)))
    fast = dataclasses.replace(HARDWARE["a100-80"], memory_bytes_s=1e18, flops=1e22)
    monkeypatch.setitem(HARDWARE, "a100-80", fast)
    row = measure_peft(ServingCase("S1", "a100-80", 2, 1.0, 1.0))
    # The first ends at 0.8; 1 and 3 together from there, to 0.96 and 1.2; then 2, to 1.52.
    assert row["throughput_per_s"] == pytest.approx(4 / 1.52, abs=1e-3)
    first = [0.08 - 0.0, 0.88 - 0.1, 1.28 - 0.2, 0.88 - 0.3]
    assert row["ttft_mean_s"] == pytest.approx(sum(first) / 4, abs=1e-3)
    latency = [0.8 - 0.0, 0.96 - 0.1, 1.52 - 0.2, 1.2 - 0.3]
    assert row["latency_mean_s"] == pytest.approx(sum(latency) / 4, abs=1e-3)


@pytest.mark.parametrize(("setting", "most"), [("S1", 5), ("S4", 3)])
def test_copies_that_fit(setting: str, most: int) -> None:
    """95 % of 80 GiB hold five times 13.5 GB, or three times 26 GB."""
    case = ServingCase(setting, "a100-80", most, 1.0, 10.0)
    row = measure_packed(case)
    assert row is not None
    assert row["requests"] == len(stream_of(case).requests)
    assert measure_packed(dataclasses.replace(case, num_adapters=most + 1)) is None


def test_the_arena_has_the_stated_means() -> None:
    """§7.3: 85 tokens in, 165 out, 26 adapters; five minutes at 4 a second."""
    stream = arena_like(ServingCase("S2", "a10", 26, 4.0, 300.0))
    assert len(stream.requests) == 1200
    assert sum(r.new_tokens for r in stream.requests) / 1200 == pytest.approx(85, rel=0.1)
    assert sum(r.output_tokens for r in stream.requests) / 1200 == pytest.approx(165, rel=0.1)
    assert {r.adapter for r in stream.requests} == set(range(26))
    slower = arena_like(ServingCase("S2", "a10", 26, 2.0, 300.0)).requests
    assert [r.prompt for r in slower] == [r.prompt for r in stream.requests[:600]]


def test_table3_with_the_real_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    seen = set()
    for run in ("_with_adapters", "_with_copies", "_with_peft"):
        measured = getattr(s_lora_cpu, run)

        def noted(*args: Any, measured: Any = measured) -> object:
            seen.add(torch.get_num_threads())
            return measured(*args)

        monkeypatch.setattr(s_lora_cpu, run, noted)
    report = smoke("s-lora-table3", device="cpu")
    assert seen == {1}, "threads that wait for a core slow some systems more than others"
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert [row["system"] for row in report.rows] == ["s-lora", "vllm-packed", "peft"]
    assert all(row["throughput_per_s"] > 0 for row in report.rows)
    assert all(figure.paper is None for figure in report.headline[2:])
