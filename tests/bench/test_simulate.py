"""``manylora bench simulate``: the command, its report, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.baselines import ALL_CACHE_POLICIES
from manylora_lab.bench.profile import machine_name
from manylora_lab.bench.simulate_command import FLAG_NAMES
from manylora_lab.pricing.fit import fit_profile
from manylora_lab.pricing.profile import save_profile
from manylora_lab.sim.hardware import HARDWARE
from manylora_lab.sim.limits import recorded, summarize_limits
from manylora_lab.sim.shipped import find_profile
from manylora_lab.sim.summary import summarize, ttft_parts_ms
from manylora_lab.workloads.named import named

from manylora.cli import main
from manylora.config.merging import MergeConfig
from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.config.queueing import QueueConfig
from manylora.flags import ALL_FLAGS
from tests.e2e.process import MODEL

pytestmark = pytest.mark.usefixtures("remembered_fits")

PROFILE = "h200-llama-2-7b"
WORKLOAD = (
    "--workload",
    "synthetic:prompt=200,output=30",
    "--rate",
    "6",
    "--adapters",
    "5",
    "--duration",
    "10",
)
MEASURED = ("--profile", PROFILE, "--device-pool", "4GiB")


def simulate(*args: object) -> int:
    return main(["bench", "simulate", *map(str, args)])


def report_of(folder: Path, *args: object) -> dict[str, Any]:
    out = folder / "report.json"
    assert simulate(*WORKLOAD, *args, "--out", out) == 0
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_it_is_the_replay_that_its_settings_say(tmp_path: Path) -> None:
    report = report_of(
        tmp_path, *MEASURED, "--host-pool", "1GiB", "--max-num-seqs", 8, "--max-batch-tokens", 512,
        "--max-model-len", 1024, "--policies", "s-lora", "--seed", 3, "--cold",
        "--limits",
    )  # fmt: skip
    stream = named("synthetic:prompt=200,output=30", rate=6, num_adapters=5, duration_s=10, seed=3)
    profile = find_profile(PROFILE)
    page_bytes = profile.model.page_bytes(16)
    config = PolicyConfig(
        num_pages=2**32 // page_bytes, page_tokens=16, max_model_len=1024, max_num_seqs=8, max_batch_tokens=512,
        num_host_pages=2**30 // page_bytes, page_bytes=page_bytes, cache=CacheConfig("s-lora"), pipeline_depth=2,
    )  # fmt: skip
    pages = [profile.model.adapter_pages(rank, 16, profile.adapter_modules) for rank in stream.ranks]
    replay, record = recorded(stream, config, fit_profile(profile), pages, is_warm=False)
    found = report["results"]["s-lora"]
    limits = summarize_limits(record, config)
    for name, value in {**summarize(replay), **ttft_parts_ms(replay.outcomes), **limits}.items():
        assert found[name] == value, name
    assert found["adapter_reads"] == 5
    assert found["config"]["max_num_seqs"] == 8
    assert report["requests"] == len(stream.requests)


def test_all_policies_and_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(
        tmp_path, "--hardware", "a10", "--shape", "llama-2-7b", "--policies", "all", "--limits"
    )
    assert list(report["results"]) == [*ALL_CACHE_POLICIES, "cached"]
    assert report["results"]["manylora"]["config"]["pipeline_depth"] == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == [*ALL_CACHE_POLICIES, "cached"]
    assert report["results"]["cached"]["adapter_hit_device"] == 1.0
    assert lines[-1].split().count("-") == 2, "no limits of what has none"
    for name in ALL_CACHE_POLICIES:
        result = report["results"][name]
        limits = [key for key in result if key.endswith("_limit")]
        assert len(limits) == 6
        assert all(result[key.removesuffix("_limit")] <= result[key] for key in limits)
        shown = f"{result['adapter_kept']:.2f} of {result['adapter_kept_limit']:.2f}"
        assert shown in next(line for line in lines if line.startswith(f"{name} "))


def test_the_reference_is_the_same_whichever_policies_stand_before_it(tmp_path: Path) -> None:
    # static-lru has larger pages than the others, which share less of a history.
    chat = ("--workload", "chatbot", "--rate", "0.5", "--duration", "60", "--hardware", "a100-80")
    one, other = (
        report_of(tmp_path, *chat, "--policies", names)["results"]["cached"]
        for names in ("static-lru,lru", "lru")
    )
    assert one == other


def test_belady_is_a_policy_of_simulations_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(tmp_path, *MEASURED, "--policies", "belady,belady-seen,manylora", "--limits")
    assert list(report["results"]) == ["belady", "belady-seen", "manylora", "cached"]
    assert report["results"]["belady"]["config"]["cache"] == "belady"
    assert report["results"]["belady-seen"]["config"]["cache"] == "belady-seen"
    assert simulate(*WORKLOAD, *MEASURED, "--policies", "belady", "--merge", "dlora") == 2
    assert "belady knows when adapters are needed, not when they are merged" in capsys.readouterr().err
    assert main(["serve", str(MODEL), "--cache-policy", "belady"]) == 2
    assert "belady" in capsys.readouterr().err


def test_two_cards_are_faster_than_one(tmp_path: Path) -> None:
    one, two = (report_of(tmp_path, "--hardware", "a100-80", "--cards", count) for count in (1, 2))
    assert two["results"]["manylora"]["tpot_mean_ms"] < one["results"]["manylora"]["tpot_mean_ms"]


def test_defaults_are_those_of_the_profiles_device_and_engine(tmp_path: Path) -> None:
    """Whichever engine was watched: old profiles do not say, and had the device's default."""
    path = tmp_path / "two.json"
    save_profile(dataclasses.replace(find_profile("cpu-demo"), pipeline_depth=2), path)
    names = ("max_num_seqs", "max_batch_tokens", "pipeline_depth", "num_host_pages")
    found = {}
    for profile in ("cpu-demo", path, PROFILE):
        report = report_of(tmp_path, "--profile", profile, "--device-pool", "4GiB")
        config = report["results"]["manylora"]["config"]
        config["num_host_pages"] *= config["page_bytes"] / 2**30
        found[profile] = tuple(config[name] for name in names)
    assert found == {"cpu-demo": (64, 1024, 1, 4), path: (64, 1024, 2, 4), PROFILE: (256, 8192, 2, 32)}


def test_pages_unlike_the_profiles_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(tmp_path, *MEASURED, "--policies", "lru,static-lru")
    note = "static-lru has pages of 32 tokens, the profile is of pages of 16"
    assert [found for found in report["notes"] if "profile" in found] == [note], "nothing of lru"
    assert f"note: {note}\n" in capsys.readouterr().out


def test_another_depth_than_the_profiles_is_noted(tmp_path: Path) -> None:
    for depth, notes in ((1, 1), (2, 0)):
        report = report_of(tmp_path, *MEASURED, "--pipeline-depth", depth)
        assert report["results"]["manylora"]["config"]["pipeline_depth"] == depth
        assert len([note for note in report["notes"] if "with pipeline_depth 2, not 1" in note]) == notes


def test_help_names_all_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulate("--help")
    words = capsys.readouterr().out.replace(",", " ").split()
    assert set(HARDWARE) <= set(words)


def test_early_abort_tells_of_what_it_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(
        tmp_path, "--hardware", "a10", "--max-num-seqs", 1, "--admission", "early-abort", "--slo-ttft", 1,
    )  # fmt: skip
    dropped = report["results"]["manylora"]["dropped"]
    assert 0 < dropped < report["requests"]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1][-1] == "dropped"
    assert lines[2][-1] == str(dropped)


@pytest.mark.parametrize(
    ("count", "wanted", "sharding"),
    [(2, "sharded", "sharded"), (2, "auto", "replicated"), (4, "auto", "sharded")],
)
def test_tensor_parallelism(count: int, wanted: str, sharding: str, tmp_path: Path) -> None:
    """What is exchanged takes time."""
    given = ("--hardware", "h200", "--shape", "llama-2-70b")
    ideal = report_of(tmp_path, *given, "--cards", count)
    parallel = report_of(tmp_path, *given, "-tp", count, "--lora-sharding", wanted)
    assert parallel["device"] == f"{count} x h200, tensor parallel, adapters {sharding} (assumed)"
    tpot_ms = [report["results"]["manylora"]["tpot_mean_ms"] for report in (ideal, parallel)]
    assert tpot_ms[0] < tpot_ms[1] < 2 * tpot_ms[0]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "name either --profile"),
        ((*MEASURED, "--hardware", "a10"), "name either --profile"),
        (("--profile", PROFILE), "--device-pool is missing"),
        (("--profile", "h200"), "neither a file nor one of"),
        ((*MEASURED, "--shape", "llama-2-7b"), "--shape goes with --hardware"),
        (("--hardware", "a11"), "'a11' is not known"),
        (("--hardware", "a10", "--shape", "llama"), "'llama' is not known"),
        (("--hardware", "a10", "--shape", "llama-2-13b"), "does not fit on"),
        (("--hardware", "a10", "--model", MODEL), "--model is compared with a profile's"),
        (("--hardware", "a10", "--cards", "0"), "--cards must be one of 1, 2, 4, 8, got 0"),
        (("--hardware", "a10", "--cards", "3"), "--cards must be one of 1, 2, 4, 8, got 3"),
        ((*MEASURED, "--cards", "3"), "--cards must be one of 1, 2, 4, 8, got 3"),
        ((*MEASURED, "--tensor-parallel-size", "2"), "is of tensor-parallel size 1, not of 2"),
        (("--hardware", "a10", "--tensor-parallel-size", "0"), "must be at least 1, got 0"),
        (("--hardware", "a10", "--tensor-parallel-size", "3"), "shared by 1, 2, 4, 8, 16, 32, not by 3"),
        (("--hardware", "a10", "--tensor-parallel-size", "2", "--cards", "2"), "--cards shares a model out"),
        (
            ("--hardware", "a10", "-tp", "2", "--lora-sharding", "replicated", "--fully-sharded-loras"),
            "are one setting and were given different values",
        ),
        (("--hardware", "fastlibra-npu", "--tensor-parallel-size", "2"), "is not described"),
        (("--hardware", "a10", "--device", "cpu"), "--device is compared with a profile's"),
        ((*MEASURED, "--device", "tpu"), "device 'tpu' is not known"),
        ((*MEASURED, "--model", "/nosuch"), "not a model folder"),
        (("--hardware", "a10", "--policies", "manylara"), "did you mean manylora?"),
        (("--hardware", "a10", "--policies", "manylora,"), "cache policy '' is not known"),
        ((*MEASURED, "--adapter-store-size", "1GB"), "--adapter-store-size was removed: "),
        ((*MEASURED, "--device-pool", "1MiB"), "holds no page"),
        ((*MEASURED, "--device-pool", "64MiB"), "the workload does not fit"),
        ((*MEASURED, "--out", "/nosuch/x.json"), "no such folder"),
        ((*MEASURED, "--workload", "chatbott"), "chatbot"),
    ],
)
def test_what_cannot_be_simulated(
    args: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(*WORKLOAD, *args) == 2
    out, error = capsys.readouterr()
    assert out == "" or says == "the workload does not fit", "only running the requests shows that"
    assert says in error
    assert error.startswith("manylora: error: ")
    assert error.count("\n") == 1


def test_a_profile_of_another_model_is_refused_with_both_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*WORKLOAD, *MEASURED, "--model", MODEL) == 2
    error = capsys.readouterr().err
    assert "the profile is of llama-2-7b (32 layers of 4096" in error
    assert "does not fit" in error
    assert error.count("\n") == 1


def test_a_profile_of_another_machine_is_refused_with_both_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*WORKLOAD, *MEASURED, "--device", "cpu") == 2
    error = capsys.readouterr().err
    assert f"of the machine 'cuda (NVIDIA H200)', not of '{machine_name('cpu')}'" in error
    assert error.count("\n") == 1


def test_a_profile_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    save_profile(dataclasses.replace(find_profile("cpu-demo"), machine=machine_name("cpu")), path)
    report = report_of(tmp_path, "--profile", path, "--device", "cpu", "--device-pool", "64MiB")
    assert report["device"] == machine_name("cpu")


def test_a_profile_of_this_model(tmp_path: Path) -> None:
    report = report_of(tmp_path, "--profile", "cpu-demo", "--model", MODEL, "--device-pool", "64MiB")
    assert report["results"]["manylora"]["ttft_mean_ms"] > 0


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"adapter_modules": []}, "names no adapter_modules"),
        ({"page_tokens": 10**400}, "page_tokens must be a number from 1"),
        (
            {"overheads": {"columns": ["num_rows", "seconds"], "rows": [[10**400, 1e-4]]}},
            "num_rows must be a number from 0",
        ),
    ],
)
def test_a_damaged_profile_is_one_line(
    damage: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "damaged.json"
    save_profile(find_profile("cpu-demo"), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    assert simulate(*WORKLOAD, "--profile", path, "--device-pool", "64MiB") == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert says in error
    assert error.count("\n") == 1


def test_modes_of_merging_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At equal memory: the copy of the base's weights is taken from the pool."""
    chosen = ("--merge", "unmerged,merged,manylora", "--merge-starve", "1", "--merge-minority", "wait")
    profile = ("--profile", PROFILE, "--device-pool", "100GiB")
    report = report_of(tmp_path, "--adapters", "1", *profile, *chosen)
    results = report["results"]
    assert list(results) == ["manylora", "manylora+merged", "manylora+manylora", "cached"]
    assert results["manylora"]["merging"] is None
    for name in ("manylora+merged", "manylora+manylora"):
        merging, merge = results[name]["merging"], results[name]["config"]["merge"]
        assert merging["steps_merged"] > 0.5
        assert merging["switches_merged"] >= 1
        assert (merge["copy"], merge["starve_s"]) == ("device", 1.0)
        assert merge["minority"] == ("wait" if name.endswith("manylora") else "unmerge")
        assert results[name]["tpot_mean_ms"] < results["manylora"]["tpot_mean_ms"]
        missing = results["manylora"]["config"]["num_pages"] - results[name]["config"]["num_pages"]
        assert missing == pytest.approx(1544, abs=1), "12.95 GB of 8 MiB pages"
    lines = capsys.readouterr().out.splitlines()
    assert ["-" in line.split() for line in lines[3:]] == [True, False, False, True], "after a note"


QUEUE = (
    "--scheduling-policy", "priority", "--priority-floor", "-3", "--priority-age", "5", "--fairness", "vtc",
    "--fair-by", "adapter", "--fair-weights", "1,3,1", "--fair-share", "adapter-0=2",
    "--adapter-batch-limit", "2:hard",
)  # fmt: skip


def test_every_order_of_the_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(tmp_path, *MEASURED, *QUEUE)
    assert "a workload has no priorities" in report["notes"][-1]
    queue = report["results"]["manylora"]["config"]["queue"]
    assert (queue["scheduling_policy"], queue["priority_floor"], queue["priority_age_s"]) == (
        "priority",
        -3,
        5.0,
    )
    assert (queue["fair_by"], queue["fair_weights"], queue["fair_share"]) == (
        "adapter",
        "1,3,1",
        ["adapter-0=2"],
    )
    assert queue["adapter_batch_limit"] == "2:hard"
    assert simulate(*WORKLOAD, *MEASURED, "--fairness", "vtc", "--fair-by", "key") == 2
    error = capsys.readouterr().err
    assert "--fair-by key: a workload's requests have no API keys" in error
    assert error.count("\n") == 1


def test_it_has_every_flag_of_the_queue_and_of_merging() -> None:
    """But for the mode itself, of which it takes a list."""
    wanted = {flag.name for flag in ALL_FLAGS if flag.section in (QueueConfig, MergeConfig)}
    assert wanted - set(FLAG_NAMES) == {"merge"}


def test_the_clairvoyant_stands_beside_each_mode(tmp_path: Path) -> None:
    """With each replay's own steps; one adapter alone is worth merging."""
    modes = ("--adapters", "1", "--merge", "unmerged,merged,dlora,manylora")
    for limits in ((), ("--limits",)):
        report = report_of(tmp_path, "--profile", PROFILE, "--device-pool", "100GiB", *modes, *limits)
        assert any("priced by steps of the base alone" in note for note in report["notes"])
        for mode in ("merged", "dlora", "manylora"):
            merging = report["results"][f"manylora+{mode}"]["merging"]
            found = merging["clairvoyant"]
            assert found["free_s"] <= found["clairvoyant_s"] <= found["taken_s"] + 1e-6
            assert found["steps"] > 0
            assert merging["priced_by"] == "base-only steps"


def test_a_copy_that_is_too_large_for_the_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(tmp_path, *MEASURED, "--merge", "merged")
    merge = report["results"]["manylora+merged"]["config"]["merge"]
    assert (merge["copy"], merge["times"]["steps_wait"]) == ("host", True)
    assert simulate(*WORKLOAD, *MEASURED, "--merge", "merged", "--merge-copy", "device") == 2
    assert "a copy of the weights takes 12.1 GiB of a pool of 4.0 GiB" in capsys.readouterr().err
    assert simulate(*WORKLOAD, *MEASURED, "--merge", "dlra") == 2
    assert "--merge 'dlra' is not known; did you mean dlora" in capsys.readouterr().err
