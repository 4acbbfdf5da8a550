"""``manylora bench simulate --replicas``: the command, its report, its journals, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.bench.profile_loads import rank_lines
from manylora_lab.bench.step_log import LoggedStep
from manylora_lab.pricing.costs import StepWork
from manylora_lab.pricing.profile import Profile, load_profile, save_profile
from manylora_lab.pricing.ranks import RankedStep, RankLine, RankLines, fit_rank_lines
from manylora_lab.sim.conformance import replay_difference
from manylora_lab.sim.shipped import find_profile

from manylora.cli import main
from manylora.engine.journal import ROUTER, fingerprint, read_answered
from manylora.protocol.routing import ReplicaUp
from manylora.router.router import Router

pytestmark = pytest.mark.usefixtures("remembered_fits")

LOAD = ("--workload", "synthetic:prompt=100,output=10", "--rate", 8, "--adapters", 4, "--duration", 4)
A10 = ("--hardware", "a10")
SMALL_PART = ("--policies", "static-lru", "--device-pool", "420MB", "--cache-set", "adapter_share=0.04")
NUMBERS = (
    "ttft_mean_ms", "tpot_mean_ms", "time_per_token_mean_ms", "slo_attainment", "output_tokens_per_s",
    "busy_share", "adapter_loads", "moves", "recomputed_tokens",
)  # fmt: skip


def simulate(*args: object) -> int:
    return main(["bench", "simulate", *map(str, (*LOAD, *args))])


def report_of(folder: Path, *args: object) -> dict[str, Any]:
    out = folder / "report.json"
    assert simulate(*args, "--out", out) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def small_profile() -> Profile:
    """A part of a shipped one: fewer steps are fitted sooner."""
    profile = find_profile("h200-llama-2-7b")
    seen = [point for point in profile.steps if not point.is_held_out]
    held_out = [point for point in profile.steps if point.is_held_out]
    return dataclasses.replace(profile, steps=(*seen[::20], *held_out[::20]))


def test_results_by_router_and_in_them_by_replica(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(
        tmp_path, *A10, "--replicas", 3, "--router", "round-robin,manylora", "--slo-tpot", "1.5x", "--plot",
        tmp_path / "p.png",
    )  # fmt: skip
    assert list(report["results"]) == ["round-robin", "manylora"]
    assert report["replicas"] == 3
    assert report["report_delay_s"] == 0.05
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["round-robin", "manylora"]
    for result in report["results"].values():
        assert len(result["replicas"]) == 3
        assert sum(replica["requests"] for replica in result["replicas"]) == report["requests"]
        for each in (result, *result["replicas"]):
            assert all(each[name] is not None for name in NUMBERS)
        assert result["decision_p99_us"] > 0
        assert all(replica["decision_mean_us"] > 0 for replica in result["replicas"] if replica["requests"])
        loads = [replica["adapter_loads"] for replica in result["replicas"]]
        assert sum(loads) == result["adapter_loads"]
    counts = [replica["requests"] for replica in report["results"]["round-robin"]["replicas"]]
    assert max(counts) - min(counts) <= 1
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_one_replica_is_as_without_a_router(tmp_path: Path) -> None:
    alone = report_of(tmp_path, *A10)["results"]["manylora"]
    one = report_of(tmp_path, *A10, "--replicas", 1, "--router", "punica")["results"]["punica"]
    for name in ("ttft_mean_ms", "tpot_p99_ms", "prefix_hit", "adapter_reads", "pages_in", "ttft_queue_ms"):
        assert one[name] == alone[name], name
    assert one["config"] == alone["config"]
    assert one.keys() > alone.keys()


def test_policies_modes_parameters_and_several_kinds(tmp_path: Path) -> None:
    report = report_of(
        tmp_path, "--hardware", "a10,a100-80", "--replicas", 2, "--policies", "lru,s-lora", "--merge",
        "unmerged,merged", "--router", "punica", "--router-set", "punica.max_batch=1", "--report-delay", 0.2,
    )  # fmt: skip
    assert list(report["results"]) == [
        "punica/lru",
        "punica/lru+merged",
        "punica/s-lora",
        "punica/s-lora+merged",
    ]
    result = report["results"]["punica/lru+merged"]
    assert result["router"] == {"policy": "punica", "settings": {"max_batch": "1"}}
    assert result["merging"]["steps_merged"] > 0
    assert report["device"] == "a10 (assumed) and a100-80 (assumed)"


def test_journals_of_a_run_replay(tmp_path: Path) -> None:
    folder = tmp_path / "journals"
    assert simulate(*A10, "--replicas", 2, "--journals", folder) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["replica-0", "replica-1", "router"]
    config, entries = ROUTER.read_answered(folder / "router")
    assert replay_difference(config, entries, fingerprint, Router) is None
    for place in (0, 1):
        settings, told = read_answered(folder / f"replica-{place}")
        assert replay_difference(settings, told, fingerprint) is None


def test_caraserve_has_its_lines_from_the_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = RankLines(
        RankLine(3e-6, 0.005, 0.9, 20), RankLine(2e-6, 0.006, 0.8, 20), RankLine(2e-5, 0.004, 0.99, 9)
    )
    path = tmp_path / "ranked.json"
    save_profile(dataclasses.replace(small_profile(), ranks=lines), path)
    assert load_profile(path).ranks == lines
    args = ("--profile", path, "--device-pool", "4GiB", "--replicas", 2, "--router", "caraserve")
    report = report_of(tmp_path, *args, "--slo-tpot", "0.02", "--router-set", "caraserve.kernel=mbgmv")
    assert report["results"]["caraserve"]["router"]["settings"] == {
        "kernel": "mbgmv", "decode_slope_s": "2e-06", "decode_base_s": "0.006", "prefill_slope_s": "2e-05",
        "prefill_base_s": "0.004", "slo_s": "0.02",
    }  # fmt: skip
    capsys.readouterr()
    assert simulate(*args) == 2
    assert "needs --slo-tpot" in capsys.readouterr().err
    assert simulate(*args, "--slo-tpot", 1, "--router-set", "caraserve.decode_base_s=1") == 2
    assert "comes from --profile" in capsys.readouterr().err


def test_caraserve_has_each_replica_s_lines_from_its_own_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for slope_s in (3e-6, 5e-6):
        line = RankLine(slope_s, 0.005, 0.9, 20)
        paths.append(tmp_path / f"{slope_s}.json")
        lines = RankLines(line, line, RankLine(2e-5, 0.004, 0.99, 9))
        save_profile(dataclasses.replace(small_profile(), ranks=lines), paths[-1])
    args = ("--device-pool", "4GiB", "--replicas", 3, "--router", "caraserve", "--slo-tpot", "1.5x")
    names = ",".join(map(str, paths))
    assert simulate("--profile", names, *args, "--journals", tmp_path / "journals") == 0
    _, entries = ROUTER.read_answered(tmp_path / "journals" / "router")
    ups = [event for _, event, _ in entries if isinstance(event, ReplicaUp)]
    assert [up.facts.rank_costs and up.facts.rank_costs.decode_slope_s for up in ups] == [3e-6, 5e-6, 3e-6]
    save_profile(small_profile(), paths[1])
    capsys.readouterr()
    assert simulate("--profile", names, *args) == 2
    assert "needs a --profile with its steps by rank" in capsys.readouterr().err


def test_lines_over_ranks_are_found_again() -> None:
    decodes = [
        RankedStep(total, padded, 0.03 + 2e-6 * total) for total in (8, 64, 400) for padded in (500, 900)
    ]
    found = fit_rank_lines(decodes, [(16, 0.02), (64, 0.026), (256, 0.05)])
    assert found is not None
    assert (found.mbgmv.slope_s, found.mbgmv.base_s, found.mbgmv.r2) == (2e-6, 0.03, 1.0)
    assert found.bgmv.r2 < 0.1
    assert found.prefill.slope_s == pytest.approx(1.25e-4, rel=1e-3)
    assert fit_rank_lines(decodes[:1], [(16, 0.02), (64, 0.026)]) is None
    falling = [RankedStep(total, total, 1.0 - total / 100) for total in (8, 64)]
    flat = fit_rank_lines(falling, [(1, 1.0), (2, 2.0)])
    assert flat is not None
    assert (flat.bgmv.slope_s, flat.prefill.base_s) == (0.0, 0.0)


def test_a_log_of_steps_gives_lines() -> None:
    def step(decodes: int, prefill: int, ranks: tuple[int, int], took_s: float) -> LoggedStep:
        work = StepWork(decodes, prefill, 100, 1000, 1)
        return LoggedStep(0.0, took_s, 0.0, decodes, 0, work, 0.0, 0.0, ranks)

    steps = [step(count, 0, (8 * count, 16 * count), 0.01 + 1e-3 * count) for count in (1, 2, 4)]
    stalls = [step(1, 0, (8, 16), 1.0), *[steps[0]] * 3]
    prompts = [step(0, tokens, (8, 8), 1e-3 * tokens) for tokens in (16, 64, 256)]
    found = rank_lines([*steps, *stalls, *prompts])
    assert found is not None
    assert found.bgmv.slope_s == pytest.approx(1e-3 / 16)
    assert found.mbgmv.slope_s == pytest.approx(1e-3 / 8)
    assert found.prefill.slope_s == pytest.approx(1e-3)


def test_help_of_a_router(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--router-help", "punica") == 0
    assert "punica.max_batch" in capsys.readouterr().out
    assert simulate("--router-help", "round-robin") == 0
    assert simulate("--router-help", "nothing") == 2


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--replicas", 0), "--replicas must be between 1 and 1024, got 0"),
        (("--replicas", 10**9), "--replicas must be between 1 and 1024, got 1000000000"),
        (("--replicas", 2, "--journals", Path(__file__)), "cannot write journals"),
        (("--replicas", 2, "--router", "punika"), "router 'punika' is not known"),
        (
            ("--replicas", 2, "--router", "caraserve", "--slo-tpot", 1),
            "needs a --profile with its steps by rank",
        ),
        (("--router", "punica"), "--router needs --replicas"),
        (("--slo-tpot", "1x"), "--slo-tpot needs --replicas"),
        (("--replicas", 2, "--router", "punica", "--router-set", "punica.x=1"), "has no setting 'x'"),
        (("--replicas", 2, "--router-set", "punica.max_batch=1"), "is not among --router"),
        (("--replicas", 2, "--router-set", "max_batch=1"), "expected ROUTER.KEY=VALUE"),
        (("--replicas", 2, "--slo-tpot", "soon"), "--slo-tpot must be seconds"),
        (("--replicas", 2, "--slo-tpot", "0x"), "--slo-tpot must be seconds"),
        (("--replicas", 2, "--report-delay", -1), "--report-delay must be"),
        (("--replicas", 2, "--report-delay", "nan"), "--report-delay must be"),
        (("--replicas", 2, "--report-delay", 10), "--report-delay must be between 0 and 4 seconds, since"),
        (("--replicas", 2, "--limits"), "leave out --replicas"),
        (
            ("--replicas", 2, *SMALL_PART, "--ranks", "cycle(64)"),
            "static-lru has 1 of 25 for adapters: raise --device-pool or --cache-set adapter_share",
        ),
        (("--replicas", 2, "--router", "all", "--journals", "j"), "needs a --profile"),
        (("--replicas", 2, "--router", "punica,random", "--journals", "j"), "of one router"),
        (("--replicas", 2, "--hardware", "a10,b10"), "hardware 'b10' is not known"),
    ],
)
def test_bad_input_is_one_line(
    args: tuple[object, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hardware = () if "--hardware" in args else A10
    assert simulate(*hardware, *args) == 2
    error = capsys.readouterr().err
    assert why in error
    assert len(error.splitlines()) == 1


def test_a_profile_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = small_profile()
    model = dataclasses.replace(profile.model, name="other", layers=16)
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    save_profile(profile, one)
    save_profile(dataclasses.replace(profile, model=model, fingerprint=model.fingerprint), other)
    assert simulate("--profile", f"{one},{other}", "--device-pool", "4GiB", "--replicas", 2) == 2
    assert "the profile is of other" in capsys.readouterr().err
