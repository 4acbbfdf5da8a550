"""Profiles as files, and costs fitted to them: known coefficients found again, nothing that falls."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from manylora_lab.pricing.costs import Spread, StepWork
from manylora_lab.pricing.fit import FEATURES, fit_profile, nonnegative_least_squares
from manylora_lab.pricing.profile import (
    ALONE_FORMAT,
    FORMAT,
    OverheadPoint,
    Profile,
    StepPoint,
    TransferPoint,
    load_profile,
    save_profile,
)
from manylora_lab.pricing.shapes import SHAPES
from manylora_lab.sim.shipped import find_profile, shipped_profiles

from manylora.config.declaring import ConfigError

Load = tuple[int, int, int, int, int, int, int]
SHAPE = SHAPES["llama-2-7b"]


def loads(count: int = 240) -> list[Load]:
    """Random batches: decoding, prefill and both; with adapters and without."""
    source = random.Random(0)
    found = []
    for _ in range(count):
        decodes = source.choice((0, 1, 2, 5, 14, 30, 64, 100))
        prefill = source.choice((0, 0, 0, 16, 100, 700, 3000)) or (0 if decodes else 50)
        kv = (decodes + prefill) * source.randint(1, 2000)
        adapters = source.choice((0, 1, 4, 20)) if decodes + prefill > 20 else 0
        each = source.choice((10**7, 10**8))
        work = (decodes + prefill) * each if adapters else 0
        found.append((decodes, prefill, kv, adapters * each, adapters, prefill * kv // 2, work))
    return found


def profile_of(seconds: Callable[[Load], float], noise: float = 0.0) -> Profile:
    source = random.Random(1)
    steps = [
        StepPoint(*load, seconds(load) * (1 + noise * source.uniform(-1, 1)), index % 4 == 0)
        for index, load in enumerate(loads())
    ]
    ways = [(way, size) for way in (True, False) for size in (10**5, 10**6, 10**7)]
    return Profile(
        FORMAT, "machine", SHAPE, SHAPE.fingerprint, "bfloat16", 16, ("q_proj",), 2, {"python": "3"}, "abc",
        tuple(steps),
        tuple(TransferPoint(way, size, 1e-4 + size * (1e-9 if way else 2e-9)) for way, size in ways),
        tuple(TransferPoint(way, size, 1e-3 + size * (4e-9 if way else 3e-9)) for way, size in ways),
        (OverheadPoint(1, 1.1e-4), OverheadPoint(100, 1.1e-3)),
    )  # fmt: skip


def linear(load: Load) -> float:
    decodes, prefill, kv, adapter_bytes, _, pairs, work = load
    first = 1e-5 * min(decodes, 16)
    return (
        5e-3
        + 2e-5 * decodes
        + first
        + 2e-5 * prefill
        + 1e-7 * kv
        + 3e-12 * adapter_bytes
        + 1e-11 * pairs
        + 1e-14 * work
    )


def bounded(load: Load) -> float:
    """By launches, by memory or by arithmetic."""
    decodes, prefill, kv, adapter_bytes, _, pairs, _ = load
    attention = 1.2e-7 * kv + 1e-11 * pairs
    launches = 7e-3 + (3e-3 if adapter_bytes else 0) + 1e-5 * decodes
    memory = 3.5e-3 + attention + 3e-12 * adapter_bytes
    return max(launches, memory, 2.2e-5 * (prefill + decodes) + attention + 3e-12 * adapter_bytes)


def test_a_linear_device_is_found_again() -> None:
    costs = fit_profile(profile_of(linear))
    assert len(costs.planes) == 1
    plane = dict(zip(FEATURES, costs.planes[0]))
    assert plane["a step"] == pytest.approx(5e-3, rel=1e-3)
    assert plane["num_decodes"] == pytest.approx(2e-5, rel=1e-2)
    assert plane["first decodes"] == pytest.approx(1e-5, rel=1e-2)
    assert plane["num_prefill_tokens"] == pytest.approx(2e-5, rel=1e-2)
    assert plane["num_kv_tokens"] == pytest.approx(1e-7, rel=1e-2)
    assert plane["adapter_bytes"] == pytest.approx(3e-12, rel=1e-2)
    assert costs.held_out.largest < 1e-3


def test_a_device_with_three_bounds_is_found_again() -> None:
    costs = fit_profile(profile_of(bounded))
    assert len(costs.planes) > 1
    assert costs.held_out.mean < 0.02
    assert costs.step_s(StepWork(1, 0, 100, 0)) == pytest.approx(7e-3, rel=0.03)
    assert costs.held_out.num_points == 60
    assert costs.seen.num_points == 180


def test_noise_shows_in_the_held_out_error() -> None:
    costs = fit_profile(profile_of(linear, noise=0.1))
    assert 0.02 < costs.held_out.mean < 0.1
    assert costs.step_s(StepWork(30, 0, 30_000, 0)) == pytest.approx(
        linear((30, 0, 30_000, 0, 0, 0, 0)), rel=0.05
    )


def test_lines_are_found_again() -> None:
    costs = fit_profile(profile_of(linear))
    assert costs.copy_s(5 * 10**6) == pytest.approx(5.1e-3)
    assert costs.copy_s(5 * 10**6, False) == pytest.approx(10.1e-3)
    assert costs.read_s(10**6) == pytest.approx(4e-3)
    assert costs.read_s(10**6, True) == pytest.approx(5e-3)
    assert costs.overhead_s(50, 3) == pytest.approx(1e-4 + 50e-5), "nothing is known of new ones"
    assert costs.reads_at_once == 2


def test_new_sequences_and_answers_take_their_time() -> None:
    points = tuple(
        OverheadPoint(rows, 1e-4 + rows * 1e-5 + (5e-4 if new else 0), new)
        for rows in (1, 8, 60)
        for new in (0, 1, 2)
    )
    costs = fit_profile(dataclasses.replace(profile_of(linear), overheads=points, answer_s=3e-4))
    assert costs.overhead_s(50, 3) == costs.overhead_s(50, 1) == pytest.approx(1e-4 + 50e-5 + 5e-4)
    assert costs.answer_s == 3e-4
    with pytest.raises(ConfigError, match="answer_s must be a number from 0, got -1"):
        dataclasses.replace(profile_of(linear), answer_s=-1)


def test_spread_and_drag_come_back_from_a_file(tmp_path: Path) -> None:
    spread = Spread((0.5, 1.5), (1.0,), (0.9, 1.1), (0.0, 1e-3))
    profile = dataclasses.replace(profile_of(linear), copy_drag=0.7, spread=spread)
    save_profile(profile, tmp_path / "p.json")
    found = load_profile(tmp_path / "p.json")
    assert found == profile
    costs = fit_profile(found)
    assert (costs.copy_drag, costs.spread) == (0.7, spread)
    with pytest.raises(ConfigError, match="copy_drag must be a number from 0, got -1"):
        dataclasses.replace(profile, copy_drag=-1)


@pytest.mark.parametrize(
    "more_s", [1.5e-3, *(pytest.param(more, marks=pytest.mark.long) for more in (0.0, -1e-3))]
)
def test_steps_after_idling_take_so_much_more(more_s: float) -> None:
    """Wherever they lie, and whatever a few of them waited for; less than others they never take."""
    profile = profile_of(linear)
    wakes = tuple(
        dataclasses.replace(
            point, seconds=point.seconds + more_s + (0.7 if few else 0.0), num_steps=1 if few else 9
        )
        for few, point in zip((False, True) * 20, profile.steps)
    )
    costs = fit_profile(dataclasses.replace(profile, wakes=wakes))
    assert costs.planes == fit_profile(profile).planes
    assert costs.wake_s == pytest.approx(max(0.0, more_s), abs=2e-6)
    assert fit_profile(profile).wake_s == 0.0


def test_wakes_come_back_from_a_file(tmp_path: Path) -> None:
    profile = profile_of(linear)
    kept = dataclasses.replace(profile, wakes=profile.steps[:3])
    save_profile(kept, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == kept


def test_cards_share_steps_and_copies() -> None:
    one = fit_profile(profile_of(bounded))
    four = one.on_cards(4)
    assert four.step_s(StepWork(8, 100, 9000, 10**8, 2)) == pytest.approx(
        one.step_s(StepWork(8, 100, 9000, 10**8, 2)) / 4
    )
    assert four.copy_s(10**7) == pytest.approx(1e-4 + 1e-2 / 4)
    assert (four.read_s(10**6), four.overhead_s(3, 0)) == (one.read_s(10**6), one.overhead_s(3, 0))
    with pytest.raises(ConfigError, match="cards"):
        one.on_cards(0)


def test_more_never_takes_less() -> None:
    costs = fit_profile(profile_of(bounded, noise=0.2))
    source = random.Random(2)
    for load in loads(50):
        more = list(load)
        more[source.randrange(len(more))] += 10**6
        assert costs.step_s(StepWork(*more)) >= costs.step_s(StepWork(*load))


def test_the_same_profile_gives_the_same_costs_but_for_the_last_bits() -> None:
    profile = profile_of(bounded, 0.1)
    # What another machine's linear algebra might do.
    shaken = tuple(
        dataclasses.replace(point, seconds=point.seconds * (1 + 1e-14 * (index % 3 - 1)))
        for index, point in enumerate(profile.steps)
    )
    costs = fit_profile(profile)
    assert fit_profile(profile) == costs
    assert fit_profile(dataclasses.replace(profile, steps=shaken)).planes == costs.planes


def test_nonnegative_least_squares_is_the_best_there_is() -> None:
    # Against all sets of columns, solved freely: the best of those without a negative coefficient.
    generator = np.random.default_rng(0)
    for _ in range(20):
        features, targets = generator.normal(size=(12, 4)), generator.normal(size=12)
        best = float((targets**2).sum())
        for count in range(1, 5):
            for columns in itertools.combinations(range(4), count):
                some = features[:, columns]
                x = np.linalg.lstsq(some, targets, rcond=None)[0]
                if (x >= 0).all():
                    best = min(best, float(((some @ x - targets) ** 2).sum()))
        found = nonnegative_least_squares(features, targets)
        assert (found >= 0).all()
        assert float(((features @ found - targets) ** 2).sum()) == pytest.approx(best)


# ---------------------------------------------------------------- files


def test_a_file_gives_the_profile_back(tmp_path: Path) -> None:
    profile = profile_of(bounded, 0.1)
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    assert find_profile(str(tmp_path / "p.json")) == profile
    assert len((tmp_path / "p.json").read_text().splitlines()) < len(profile.steps) + 60


def test_points_as_objects_and_steps_run_alone_are_still_read(tmp_path: Path) -> None:
    profile = dataclasses.replace(profile_of(linear), format=ALONE_FORMAT)
    fields = msgspec.to_builtins(profile)
    for point in fields["steps"]:
        del point["num_steps"]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(fields))
    found = load_profile(path)
    assert found == profile
    assert {point.num_steps for point in found.steps} == {1}


def test_a_mean_of_more_steps_counts_for_more() -> None:
    # Two groups of like batches that no costs can both have: the fit is nearer to the one seen more often.
    profile = profile_of(linear)

    def fitted(most: int, least: int) -> float:
        steps = tuple(
            StepPoint(1, 0, 100, 0, 0, 0, 0, seconds, number % 4 == 0, num_steps)
            for number in range(40)
            for seconds, num_steps in ((0.010, most), (0.012, least))
        )
        return fit_profile(dataclasses.replace(profile, steps=steps)).step_s(StepWork(1, 0, 100, 0))

    assert fitted(1, 1) == pytest.approx(0.011, rel=1e-3)
    assert 0.010 < fitted(9, 1) < 0.0104
    assert 0.0116 < fitted(1, 9) < 0.012


@pytest.mark.parametrize("seconds", [linear, bounded])
def test_noise_does_not_bend_the_sum(seconds: Callable[[Load], float]) -> None:
    # 20 % either way: what all steps together take is what they took, and what they take without the noise.
    noisy = profile_of(seconds, 0.2)
    costs = fit_profile(noisy)
    fitted = sum(costs.step_s(StepWork(*load)) for load in loads())
    assert fitted == pytest.approx(sum(point.seconds for point in noisy.steps), rel=0.02)
    assert fitted == pytest.approx(sum(seconds(load) for load in loads()), rel=0.02)


def test_a_profile_of_something_else_is_refused_with_both_names() -> None:
    profile = profile_of(linear)
    profile.expect(dataclasses.replace(SHAPE, name="renamed"), "machine")
    with pytest.raises(ConfigError, match=r"llama-2-7b .* llama-2-13b"):
        profile.expect(model=SHAPES["llama-2-13b"])
    with pytest.raises(ConfigError, match="'machine', not of 'cuda"):
        profile.expect(machine="cuda (NVIDIA H200)")


@pytest.mark.parametrize(
    ("machine", "told", "depth"),
    [("cuda (X)", None, 2), ("cpu (Y)", None, 1), ("cuda (X)", 1, 1), ("cpu (Y)", 2, 2)],
)
def test_a_profile_is_of_one_depth_of_the_pipeline(
    machine: str, told: int | None, depth: int, tmp_path: Path
) -> None:
    """Those that do not tell it had their device's default."""
    save_profile(
        dataclasses.replace(profile_of(linear), machine=machine, pipeline_depth=told), tmp_path / "p.json"
    )
    profile = load_profile(tmp_path / "p.json")
    assert profile.steps_in_flight == depth
    assert profile.steps_in_flight == depth


def damage(text: str, path: Path) -> str:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_damaged_files_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    assert "is not valid" in damage("[" * 100_000, path)
    save_profile(profile_of(linear), path)
    good = json.loads(path.read_text())

    def changed(**values: object) -> str:
        return json.dumps({**good, **values})

    columns, rows = good["steps"]["columns"], good["steps"]["rows"]
    first = dict(zip(columns, rows[0], strict=True))

    def steps(*points: object) -> str:
        return json.dumps({**good, "steps": points})

    assert "truncated" in damage(path.read_text()[:-100], path)
    assert "machine" in damage(json.dumps({k: v for k, v in good.items() if k != "machine"}), path)
    assert "format" in damage(changed(format="manylora-profile-9"), path)
    assert "fingerprint" in damage(changed(model={**good["model"], "layers": 31}), path)
    assert "seconds" in damage(steps({**first, "seconds": 0}), path)
    assert "num_kv_tokens must be a number from 0" in damage(steps({**first, "num_kv_tokens": 10**400}), path)
    assert "page_tokens must be a number from 1" in damage(changed(page_tokens=10**400), path)
    assert "reads_at_once must be a number from 1" in damage(changed(reads_at_once=0), path)
    assert "pipeline_depth" in damage(changed(pipeline_depth=3), path)
    assert "adapter_modules" in damage(changed(adapter_modules=[]), path)
    assert "steps[0]" in damage(steps({**first, "num_decodes": "many"}), path)
    assert "held out" in damage(steps(first), path)
    assert "num_steps" in damage(steps({**first, "num_steps": 0}), path)
    assert "steps[0] has 10 values for 9 columns" in damage(
        changed(steps={"columns": columns[:-1], "rows": rows}), path
    )
    assert "rows" in damage(changed(steps={"columns": columns, "rows": [["many"]]}), path)
    assert "copies" in damage(changed(copies={**good["copies"], "rows": good["copies"]["rows"][:1]}), path)
    assert "overhead" in damage(changed(overheads=[]), path)
    assert "valid" in damage("[]", path)
    with pytest.raises(ConfigError, match="cannot read the profile"):
        load_profile(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot write the profile"):
        save_profile(profile_of(linear), tmp_path / "no" / "p.json")


def test_shipped_profiles_are_whole() -> None:
    assert "cpu-demo" in shipped_profiles()
    for name in shipped_profiles():
        costs = fit_profile(find_profile(name))
        assert costs.held_out.mean < 0.25
        assert (
            0
            < costs.step_s(StepWork(1, 0, 16, 0))
            < costs.step_s(StepWork(8, 500, 4000, 10**6, 4, 10**6, 10**8))
        )
    with pytest.raises(ConfigError, match="cpu-demo"):
        find_profile("nobody")
