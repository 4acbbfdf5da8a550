"""The benchmark of what ``auto`` changes as a default, as a toy on the CPU: its record's form."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from manylora_lab.benchmarks import cold_default
from manylora_lab.benchmarks.engine_rig import EngineRig

from manylora.config import ColdStartConfig, PolicyConfig
from manylora.executor import graphs
from manylora.executor.graphs import GraphLimits

ADAPTERS, HOST_ROUNDS = 4, 2


@pytest.mark.long
def test_first_tokens_and_chat_under_both_modes(tmp_path: Path) -> None:
    out = tmp_path / "default.json"
    more = ["--turns", "2", "--ranks", "8", "--warm", "3", "--chat-turns", "1", "--adapters", str(ADAPTERS)]
    cold_default.main(["--toy", "--out", str(out), "--commit", "abc", *more])
    found = json.loads(out.read_text())
    assert {"command", "commit", "device", "torch", "provenance"} <= set(found)
    assert found["left_out"] == []
    counts = {"never read": ADAPTERS - 1, "in host memory": HOST_ROUNDS * ADAPTERS}
    counts["on the device"] = 3
    rows = {(row["kind"], row["mode"]): row for row in found["first"]}
    assert set(rows) == {(kind, mode) for kind in counts for mode in cold_default.MODES}
    for (kind, _), row in rows.items():
        assert row["count"] == counts[kind], "of two turns the second counts"
        assert 0 < row["ms"] <= row["most_ms"]
        assert row["turns_ms"] == [row["ms"]]
    for row in found["compared"]:
        of_kind = {mode: rows[row["kind"], mode]["ms"] for mode in cold_default.MODES}
        assert row["auto_over_wait"] == pytest.approx(of_kind["auto"] / of_kind["wait"], rel=1e-3)
        assert row["of_turns"] == pytest.approx(row["auto_over_wait"], rel=1e-3), "one turn counts"
        assert row["interval"] == [row["of_turns"], row["of_turns"]]
        assert row["turns"] == 1
    ttft = {row["mode"]: row["summary"]["ttft_ms"]["mean"] for row in found["chat"]}
    assert set(ttft) == set(cold_default.MODES)
    assert all(row["summary"]["failed"] == 0 for row in found["chat"])
    (compared,) = found["chat_compared"]
    assert compared["ttft_auto_over_wait"] == pytest.approx(ttft["auto"] / ttft["wait"], rel=1e-3)


def test_of_one_adapter_that_stays_on_the_device(tmp_path: Path) -> None:
    out = tmp_path / "warm.json"
    more = ["--turns", "3", "--ranks", "8", "--warm", "2", "--adapters", "1", "--host-rounds", "0"]
    cold_default.main(["--toy", "--out", str(out), "--commit", "abc", "--parts", "first", *more])
    found = json.loads(out.read_text())
    assert {row["kind"] for row in found["first"]} == {"on the device"}
    assert [len(row["turns_ms"]) for row in found["first"]] == [2, 2]
    assert [row["kind"] for row in found["compared"]] == ["on the device"]


def test_each_mode_comes_first_as_often_as_the_other() -> None:
    order = list(cold_default.in_turns(4))
    assert [mode for _, mode in order] == ["auto", "wait", "wait", "auto"] * 2
    places = {
        mode: [place for place, (_, one) in enumerate(order) if one == mode] for mode in cold_default.MODES
    }
    assert statistics.fmean(places["auto"]) == statistics.fmean(places["wait"])


class _Worker:
    """Captures nothing; each set of captures with gates has words of its own."""

    def __init__(self, finds_room: bool = True) -> None:
        self._copier = self
        self._words: object | None = None
        self._bringer: object | None = None
        self._graphs = SimpleNamespace(limits=None, is_full=not finds_room)

    def use_graphs(self, limits: GraphLimits, scratch_page: int) -> None:
        sizes = graphs.MIXED_TOKENS, graphs.bucket_sizes(128)
        self._graphs = SimpleNamespace(limits=limits, sizes=sizes, is_full=self._graphs.is_full)
        if limits.num_groups:
            self.tell_landed(object(), object())

    def tell_landed(self, words: object, bringer: object) -> None:
        self._words, self._bringer = words, bringer


def _rig(worker: _Worker) -> EngineRig:
    policy = PolicyConfig(64, 16, 64, 8, 64, cold_start=ColdStartConfig("layerwise"))
    return cast(EngineRig, SimpleNamespace(worker=worker, is_toy=False, policy=policy))


def test_each_turn_has_captures_of_its_own_and_they_their_own_words() -> None:
    worker = _Worker()
    rig, was = _rig(worker), (graphs.MIXED_TOKENS, graphs.bucket_sizes)
    sets = cold_default.sets_of_turns(rig, 4)
    assert (graphs.MIXED_TOKENS, graphs.bucket_sizes) == was, "other steps are captured as before"
    steps, words = set(), set()
    for turn, mode in cold_default.in_turns(4):
        assert cold_default.use(rig, sets[turn], mode)["cold_start"].mode == mode
        assert worker._graphs.sizes == ((cold_default.PROMPT,), [1, 128]), (
            "of the steps that are needed alone"
        )
        assert (worker._graphs.limits.num_groups > 0) == (mode == "auto")
        steps.add(id(worker._graphs))
        if mode == "auto":
            words.add(id(worker._words))
            assert worker._words is sets[turn]["auto"].words
    assert len(steps) == 8
    assert len(words) == 4


def test_captures_that_find_no_room_are_no_captures() -> None:
    with pytest.raises(RuntimeError, match="captures found no room"):
        cold_default.sets_of_turns(_rig(_Worker(finds_room=False)), 2)


def test_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--turns", "1"], "--turns must be at least 2"),
        (["--warm", "0"], "--warm, --adapters and --chat-turns 1, --host-rounds 0"),
        (["--host-rounds", "-1"], "--host-rounds 0"),
        (["--parts", "x"], "--parts: x is none"),
    ):
        with pytest.raises(SystemExit) as caught:
            cold_default.main(["--toy", "--out", str(tmp_path / "x.json"), *words])
        assert caught.value.code == 2
        assert said in capsys.readouterr().err
