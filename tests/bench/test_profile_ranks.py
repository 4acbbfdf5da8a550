"""``manylora profile --tensor-parallel-size``: an engine of several ranks, measured and simulated."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from manylora_lab.bench.simulate import SimulateSettings, target_of
from manylora_lab.pricing.costs import StepWork
from manylora_lab.pricing.fit import fit_exchanges
from manylora_lab.pricing.profile import ExchangePoint, Profile, load_profile, save_profile
from manylora_lab.sim.parallel import adapter_pages, measured_link
from manylora_lab.sim.shipped import find_profile

from manylora.cli import main
from manylora.config.declaring import ConfigError
from tests.bench.test_profile_command import SMALL
from tests.e2e.process import MODEL

pytestmark = pytest.mark.usefixtures("remembered_fits")

MODULES = find_profile("cpu-demo").adapter_modules
SIZES = ("--device-pool", "16MiB", "--max-num-seqs", "4", "--max-batch-tokens", "32", "--max-model-len", "64")
WORKLOAD = ("--workload", "synthetic:prompt=8,output=8", "--rate", "50", "--adapters", "2", "--duration", "1")


def simulate(*args: object) -> int:
    return main(["bench", "simulate", *WORKLOAD, *map(str, args)])


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert simulate(*args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def report_of(folder: Path, *args: object) -> dict[str, Any]:
    assert simulate(*args, "--out", folder / "report.json") == 0
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def check_measured(profile: Profile, count: int, sharding: str) -> None:
    assert (profile.tensor_parallel_size, profile.lora_sharding) == (count, sharding)
    assert profile.machine.startswith("cpu (")
    assert "ranks" not in profile.machine, "another number of ranks is no other machine"
    assert profile.model.kv_heads == 2, "the model's own"
    assert [point.num_bytes for point in profile.exchanges] == [4**power * 256 * 4 for power in range(3)] + [
        32 * 256 * 4
    ]
    assert all(point.seconds > 0 for point in profile.exchanges)
    one = next(point for point in profile.steps if point.num_adapters == 1 and point.num_decodes == 4)
    modules = profile.adapter_modules
    pages = adapter_pages(profile.model, count, sharding, 64, 16, modules)  # type: ignore[arg-type]
    page_bytes = dataclasses.replace(profile.model, kv_heads=max(2, count)).page_bytes(16)
    # The first adapter's; cells of each rank's pages may leave a page in a hundred empty.
    assert pages <= one.adapter_bytes / page_bytes <= 1.05 * pages + 1
    # One step at least of each number of rows: an engine ran on the ranks.
    assert max(point.num_prefill_tokens for point in profile.steps) == 32
    assert {point.to_device for point in profile.copies} == {True, False}
    assert {point.to_device for point in profile.reads} == {True, False}
    assert not profile.cpu_products
    assert not profile.group_shares


def test_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured, and simulated as such; as nothing else."""
    out = tmp_path / "two.json"
    assert main(["profile", "--model", MODEL, *SMALL, "--out", str(out), "-tp", "2"]) == 0
    assert "exchanges     of 2 ranks, adapters replicated: a sum takes" in capsys.readouterr().out
    found = load_profile(out)
    check_measured(found, 2, "replicated")
    asked = ("--profile", out, *SIZES)
    report = report_of(tmp_path, *asked, "--tensor-parallel-size", 2, "--model", MODEL, "--device", "cpu")
    assert report["device"] == f"{found.machine}, 2 ranks, adapters replicated"
    assert report["results"]["manylora"]["tpot_mean_ms"] > 0
    assert "is of tensor-parallel size 2, not of 1" in refused(capsys, *asked)
    assert "is of tensor-parallel size 2, not of 4" in refused(capsys, *asked, "-tp", 4)
    said = refused(capsys, *asked, "-tp", 2, "--lora-sharding", "sharded")
    assert "the profile is of replicated adapters, not of sharded ones" in said


@pytest.mark.long
def test_merging_and_four_sharded_ranks(tmp_path: Path) -> None:
    """Of which two hold each head of keys and values."""
    out = tmp_path / "four.json"
    asked = ("-tp", "4", "--lora-sharding", "sharded", "--merging")
    assert main(["profile", "--model", MODEL, *SMALL, "--out", str(out), *asked]) == 0
    found = load_profile(out)
    check_measured(found, 4, "sharded")
    assert len(found.switches) == 6
    assert all(min(point.seconds, point.merged_s) > 0 for point in found.modes)
    report = report_of(tmp_path, "--profile", out, *SIZES, "-tp", 4, "--merge", "merged")
    assert report["results"]["manylora+merged"]["merging"]["priced_by"] == "measured steps"


def of_ranks(count: int, sharding: str = "sharded", **more: Any) -> Profile:
    """The demo's, as if of so many ranks."""
    plain = find_profile("cpu-demo")
    points = tuple(ExchangePoint(size, 1e-5 + size / 1e9) for size in (10**3, 10**5, 10**7))
    ranks: dict[str, Any] = {"tensor_parallel_size": count, "lora_sharding": sharding, "exchanges": points}
    return dataclasses.replace(plain, **ranks | more)


def test_pages_are_those_of_so_many_ranks(tmp_path: Path) -> None:
    """With fewer heads of keys and values than ranks pages are larger; replicated adapters take more of them."""
    path = tmp_path / "p.json"
    page_bytes = find_profile("cpu-demo").model.page_bytes(16)
    pages = {}
    for count, sharding in ((2, "sharded"), (2, "replicated"), (4, "sharded"), (4, "replicated")):
        save_profile(of_ranks(count, sharding), path)
        report = report_of(tmp_path, "--profile", path, "--device-pool", "32MiB", "-tp", count)
        config = report["results"]["manylora"]["config"]
        assert config["page_bytes"] == (2 if count == 4 else 1) * page_bytes
        target = target_of(SimulateSettings(profile=str(path), tensor_parallel_size=count))
        pages[count, sharding] = target.adapter_pages(64, 16)
    assert pages[2, "sharded"] == adapter_pages(find_profile("cpu-demo").model, 1, "sharded", 64, 16, MODULES)
    assert pages[2, "replicated"] > pages[2, "sharded"]
    assert pages[4, "replicated"] > pages[4, "sharded"]


def test_what_a_file_says_of_ranks(tmp_path: Path) -> None:
    """It comes back; an older file is of one rank; one that contradicts itself is refused."""
    path = tmp_path / "p.json"
    save_profile(of_ranks(2), path)
    assert load_profile(path) == of_ranks(2)
    plain = find_profile("cpu-demo")
    fields = msgspec.to_builtins(plain)
    for name in ("tensor_parallel_size", "lora_sharding", "exchanges"):
        del fields[name]
    path.write_text(json.dumps(fields))
    old = load_profile(path)
    assert old == plain
    old.expect(tensor_parallel_size=1)
    with pytest.raises(ConfigError, match="of tensor-parallel size 1, not of 2"):
        old.expect(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="of one rank, which shares and exchanges nothing"):
        of_ranks(1)
    with pytest.raises(ConfigError, match="lora_sharding must be one of sharded, replicated, got 'some'"):
        of_ranks(2, "some")
    with pytest.raises(ConfigError, match="tensor_parallel_size must be a number from 1"):
        of_ranks(0)


def test_a_measured_interconnect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Is found again from its exchanges, and described hardware may have it."""
    assert fit_exchanges(of_ranks(2)) == pytest.approx((1e-5, 1e-9))
    assert fit_exchanges(find_profile("cpu-demo")) == (0.0, 0.0)
    for count in (2, 4):
        link = measured_link(of_ranks(count), count)
        assert link.all_reduce_s(5 * 10**6, count) == pytest.approx(1e-5 + 5e-3)
    level = of_ranks(2, exchanges=tuple(ExchangePoint(size, 1e-5) for size in (10**3, 10**6)))
    assert measured_link(level, 2).all_reduce_s(10**6, 2) == pytest.approx(1e-5, rel=1e-3)
    given = ("--hardware", "h200", "--shape", "llama-2-7b", "-tp", 2)
    seconds = []
    for base_s in (0.0, 1e-3):
        points = tuple(ExchangePoint(size, base_s + size / 1e9) for size in (10**3, 10**5, 10**7))
        save_profile(of_ranks(2, exchanges=points), tmp_path / "p.json")
        report = report_of(tmp_path, *given, "--interconnect", tmp_path / "p.json")
        assert "exchanges as of cpu (" in report["device"]
        asked = SimulateSettings(
            hardware="h200", shape="llama-2-7b", tensor_parallel_size=2, interconnect=str(tmp_path / "p.json")
        )
        seconds.append(target_of(asked).costs.step_s(StepWork(1, 0, 10)))
    # Two sums a layer and one of the embeddings, each of a millisecond.
    assert seconds[1] - seconds[0] == pytest.approx(65e-3)
    alone = ("--interconnect", "cpu-demo")
    assert "of tensor-parallel size 1, not of 2" in refused(capsys, *given, *alone)
    save_profile(of_ranks(2, exchanges=()), tmp_path / "silent.json")
    assert "has no exchanges" in refused(capsys, *given, "--interconnect", tmp_path / "silent.json")
    for args in (given[:-2], ("--profile", "cpu-demo", "--device-pool", "16MiB")):
        assert "--interconnect goes with --hardware" in refused(capsys, *args, *alone)
