"""dLoRA's figures, S-LoRA's Figure 9 and where merging pays: what must hold of the numbers, at smoke scale."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from pathlib import Path

import pytest
from manylora_lab.reproduce import dlora_figures, merge_h200
from manylora_lab.reproduce.dlora_figures import ReplicaCase, stream_of
from manylora_lab.reproduce.experiment import Setup
from manylora_lab.reproduce.merge_cells import FREE, MEASURED, STATED, place_named, simulate
from manylora_lab.reproduce.registry import experiment
from manylora_lab.reproduce.report import ExperimentReport, Headline, Row
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

from manylora.config.declaring import ConfigError

NAMES = ("dlora-fig5", "dlora-fig10", "dlora-fig14", "dlora-fig15", "s-lora-fig9", "merge-h200")
MEMORY = 40 * 2**30


@functools.cache
def smoke(name: str) -> ExperimentReport:
    """Of the default device."""
    found = experiment(name)
    return found.run(Setup("smoke", found.devices[0], workers=1))


@pytest.mark.parametrize("name", NAMES)
def test_pictures_and_reports(name: str, tmp_path: Path) -> None:
    found = smoke(name)
    experiment(name).draw(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads(found.write(tmp_path).read_text())
    assert written["rows"]
    assert all({"metric", "ours", "paper"} <= set(figure) for figure in written["headline"])


def one_adapter(count: int = 24) -> Stream:
    requests = tuple(StreamRequest(0.0, 0, number, 0, (Piece(number, 32),), 16) for number in range(count))
    return Stream("one", requests, (8, 8))


def outcome(system: str) -> Row:
    return simulate(one_adapter(), place_named(STATED), system, 8, MEMORY)


def test_one_adapter_merged_takes_the_stated_share_of_unmerged() -> None:
    unmerged, merged = outcome("unmerged"), outcome("merged")
    assert (unmerged["switches"], unmerged["steps_merged"], unmerged["switch_share"]) == (0, 0.0, 0.0)
    assert merged["switches"] >= 1
    assert 0 < merged["switch_share"] < 0.2
    assert 1.5 < merged["tokens_per_s"] / unmerged["tokens_per_s"] < 27 / 15


def test_free_switching_takes_exactly_the_stated_share() -> None:
    assert outcome(FREE)["tokens_per_s"] / outcome("unmerged")["tokens_per_s"] == pytest.approx(
        27 / 15, rel=1e-3
    )
    assert outcome(FREE)["switches"] == 0


def test_the_copy_comes_out_of_the_pool() -> None:
    """At equal total memory a mode that merges has less for pages; where that is too little it is refused."""
    with pytest.raises(ConfigError, match=r"weights takes 12\.1 GiB of a pool of 8\.0 GiB"):
        simulate(one_adapter(), place_named(STATED), "dlora", 8, 8 * 2**30)
    assert simulate(one_adapter(), place_named(STATED), "unmerged", 8, 8 * 2**30)["tokens_per_s"] > 0


def test_skewness_gathers_requests_and_nothing_else() -> None:
    case = ReplicaCase(STATED, 4.0, 4, "dlora", 400, 0)
    few, many = stream_of(case), stream_of(dataclasses.replace(case, skewness=32))
    assert stream_of(dataclasses.replace(case, system="unmerged", costs=MEASURED)) == few
    assert [(r.arrival_s, r.output_tokens) for r in few.requests] == [
        (r.arrival_s, r.output_tokens) for r in many.requests
    ]
    most = [
        collections.Counter(r.adapter for r in stream.requests).most_common(1)[0][1] for stream in (few, many)
    ]
    assert most[0] < most[1]
    assert 0.8 < 4.0 / (400 / few.requests[-1].arrival_s) < 1.25


def test_the_rate_at_the_objective_and_the_largest_ratio() -> None:
    rows: list[Row] = [
        {
            "costs": "card", "rate_per_s": rate, "skewness": skewness, "system": system,
            "latency_each_s_token": seconds,
        }
        for rate, skewness, system, seconds in (
            (1.0, 4, "dlora", 0.1), (2.0, 4, "dlora", 0.6), (2.0, 8, "dlora", 0.5), (2.0, 4, "unmerged", 1.2),
            (2.0, 8, "unmerged", 1.5),
        )
    ]  # fmt: skip
    assert dlora_figures.at_objective(rows, "card") == 2.0
    assert dlora_figures.at_objective(rows, "none") is None
    assert dlora_figures.most_over_dlora(rows[1:], "latency_each_s_token", "unmerged") == 3.0


def test_merging_in_place_beats_the_copy_on_the_host_which_takes_longer_to_bring_back() -> None:
    rows = {(row["num_adapters"], row["system"]): row for row in smoke("s-lora-fig9").rows}
    assert rows[1, "merged in place"]["latency_mean_s"] < rows[1, "on the fly"]["latency_mean_s"]
    assert rows[2, "merged in place"]["latency_mean_s"] > rows[2, "on the fly"]["latency_mean_s"]
    assert rows[2, "merged, copy on host"]["latency_mean_s"] > rows[2, "merged in place"]["latency_mean_s"]


def test_steps_never_gain_by_adapters_and_pay_later_with_the_copy_on_the_host() -> None:
    steps = [row for row in smoke("merge-h200").rows if row["kind"] != "stream"]
    assert {row["kind"] for row in steps} == {"decode", "prefill"}
    for row in steps:
        assert row["unmerged_ms"] >= row["merged_ms"]
        if row["pays_after_s_device"] is not None:
            assert row["pays_after_s_device"] < row["pays_after_s_host"]


def test_phases_are_of_one_hot_adapter_each() -> None:
    case = merge_h200.PhasesCase("unmerged", 1.0, 1.0, load_s=4.0)
    stream = merge_h200.stream_of(case, 10.0)
    assert [request.adapter for request in stream.requests] == [0] * 10 + [1] * 10 + [2] * 10 + [3] * 10
    mixed = merge_h200.stream_of(dataclasses.replace(case, share=0.5), 200.0).requests[:200]
    assert 0.35 < sum(request.adapter == 0 for request in mixed) / 200 < 0.65


def test_an_artifacts_figure_stands_beside_ours(tmp_path: Path) -> None:
    figures = [Headline("one", 1.0, artifact=2.0), Headline("two", 1.0, 3.0)]
    written = json.loads(ExperimentReport("name", "title", {}, [], figures).write(tmp_path).read_text())[
        "headline"
    ]
    assert written[0] == {"metric": "one", "ours": 1.0, "paper": None, "artifact": 2.0}
    assert "artifact" not in written[1]
