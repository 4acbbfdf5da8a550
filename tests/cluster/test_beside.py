"""The table "With other features" of docs/cluster.md: with each of these a cluster gives the answers of a single
server without them, or refuses."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from manylora.config.policy import CACHE_POLICIES
from tests.cluster.process import ADAPTERS, Answer, Cluster, Json, ask_all, long_bodies, mixed_bodies
from tests.cluster.replays import replay_all
from tests.cluster.rounding import assert_equal
from tests.cluster.test_bad_input import refused
from tests.e2e.process import TIMEOUT_S, Server, assert_error, children_of, get, post, wait_until

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"
KEYS = ("--api-key", "alpha", "--api-key", "beta")
SMALL = ("--device-pool", "6MiB", "--host-pool", "8MiB")
RANKS = ("--tensor-parallel-size", "2", "--device", "cpu")
BOTH = ("--router", "round-robin")
"""Where each replica must have some of the requests."""
COLD = "`--cold-start block`, `layerwise`, `cpu`, `auto`"
CELLS: dict[str, list[tuple[str, ...]]] = {
    "`--cache-policy`": [("--cache-policy", name) for name in CACHE_POLICIES],
    "`--admission`": [
        ("--admission", "lcfs"),
        ("--admission", "early-abort", "--slo-ttft", "600"),
    ],
    "`--scheduling-policy priority`": [
        ("--scheduling-policy", "priority", "--priority-age", "0.01", "--priority-floor", "-5")
    ],
    "`--fairness vtc`": [
        ("--fairness", "vtc", "--fair-share", "german=2"),
        ("--fairness", "vtc", "--fair-by", "key", *KEYS),
    ],
    "`--adapter-batch-limit`": [("--adapter-batch-limit", "1"), ("--adapter-batch-limit", "1:hard")],
    "`--merge`": [
        ("--merge", "merged"),
        ("--merge", "dlora", "--merge-starve", "0.05"),
        ("--merge", "manylora"),
        ("--merge", "manylora", "--merge-minority", "mixed"),
        ("--merge", "manylora", "--merge-minority", "wait"),
    ],
    COLD: [
        ("--cold-start", "block", *SMALL),
        ("--cold-start", "layerwise", "--cold-start-stall", "1", *SMALL),
        ("--cold-start", "cpu", "--cpu-lora-workers", "1", *SMALL),
        ("--cold-start", "auto", "--cold-start-stall", "1", *SMALL),
    ],
    "one tier (`--host-pool 0`)": [("--host-pool", "0")],
    "chunked prompts": [("--max-batch-tokens", "8", "--max-num-seqs", "8")],
    "preemption (a small pool)": [("--device-pool", "4MiB")],
    "`--journal`, `--trace`": [("--journal", "JOURNAL", "--trace", "TRACE")],
    "`--api-key`": [KEYS],
    "`--tensor-parallel-size` above 1": [
        RANKS,
        (*RANKS, "--lora-sharding", "sharded", "--merge", "manylora"),
        (*RANKS, "--cold-start", "auto", "--cold-start-stall", "1", *SMALL),
    ],
}
"""The last also: ``test_ranks.py``."""
HERE = {
    "`cache_salt`",
    "`n` > 1, sampling with a seed, stop strings, log-probabilities, streams",
    "penalties",
}
"""In every cluster of this file."""
ELSEWHERE = {
    "adapters loaded, replaced and unloaded": "test_operations.py::test_adapters_come_and_go",
    "encrypted links (`--cluster-tls-cert`)": "test_machines.py::test_answers_are_the_same_from_both",
    "`--adapter-cache`": "test_machines.py::test_replicas_have_the_files_from_the_router",
    "prompts of one body": "test_beside.py::test_cold_starts_on_the_cpu_and_turns",
    "`--load-format dummy`": "test_beside.py::test_random_weights_are_the_same_everywhere",
}
NOT_ANYWHERE = {"structured output": {"response_format": {"type": "json_object"}}}
"""Refused with 400 by a single server, too."""


def bodies() -> list[Json]:
    """Some of everything that a body may ask for."""
    found = mixed_bodies(24)
    for number, body in enumerate(found):
        if number % 3 == 1:
            body["cache_salt"] = f"salt {number % 2}"
        if number % 4 == 1:
            body |= {"frequency_penalty": 0.5, "presence_penalty": 0.5}
    return found


BODIES = bodies()
LONG = long_bodies(8, 300)


@pytest.fixture(scope="module")
def single() -> dict[str, list[Answer]]:
    args = ("--adapter-dir", str(ADAPTERS), "--max-adapter-rank", "64", "--host-pool", "16MiB")
    with Server(*args, "--device-pool", "48MiB") as server:
        server.wait_ready()
        return {"mixed": ask_all(server.url, BODIES), "long": ask_all(server.url, LONG)}


def started(folder: Path, *args: str) -> Cluster:
    places = {name: str(folder / name.lower()) for name in ("JOURNAL", "TRACE")}
    key = "beta" if "--api-key" in args else None
    args = ("--replicas", "2", "--lease", "3", *(places.get(arg, arg) for arg in args))
    return Cluster(*args, folder=folder, key=key)


def wait_up(cluster: Cluster) -> None:
    cluster.wait_ready()
    cluster.wait_replicas(2)


def sums(cluster: Cluster, name: str, *labels: str) -> dict[str, float]:
    """By replica: a metric's samples that have these labels, added up."""
    found: dict[str, float] = {}
    for sample, value in cluster.metrics().items():
        if sample.startswith(f"{name}{{") and all(label in sample for label in labels):
            replica = re.search(r'replica="(\d+)"', sample)
            assert replica is not None, sample
            found[replica[1]] = found.get(replica[1], 0.0) + value
    return found


def wait_counted(cluster: Cluster, name: str, *labels: str, replicas: int = 1) -> None:
    """Wait until so many replicas say that it has happened: they do so within moments."""

    def is_counted() -> bool:
        return sum(value > 0 for value in sums(cluster, name, *labels).values()) >= replicas

    wait_until(is_counted, f"{name} {labels}")


def test_cold_starts_on_the_cpu_and_turns(tmp_path: Path, single: dict[str, list[Answer]]) -> None:
    """One cluster for: CPU LoRA, priorities, fairness by key, a limit on adapters, keys, a small pool,
    journals."""
    turns: tuple[str, ...] = ("--scheduling-policy", "priority", "--fairness", "vtc", "--fair-by", "key")
    turns = (*turns, "--adapter-batch-limit", "2")
    cold: tuple[str, ...] = ("--cold-start", "cpu", "--cpu-lora-workers", "1")
    cold = (*cold, "--journal", "JOURNAL")
    with started(tmp_path, *cold, *turns, *KEYS, *SMALL, *BOTH) as cluster:
        wait_up(cluster)
        ranked = [{**body, "priority": number % 3} for number, body in enumerate(BODIES)]
        assert_equal(single["mixed"], cluster.ask_all(ranked))
        wait_counted(cluster, "manylora:cold_starts_total", 'mode="cpu"')
        assert {each["cold_start"] for each in cluster.replicas()} == {"cpu"}
        wait_counted(cluster, "manylora:fair_service_tokens_total", 'client="1"', replicas=2)
        assert not any(sums(cluster, "manylora:fair_service_tokens_total", 'client="0"').values())
        assert_error(post(f"{cluster.url}/v1/completions", json=BODIES[1]), 401)
        assert_error(get(f"{cluster.url}/cluster"), 401)
        for extra in NOT_ANYWHERE.values():
            assert_error(cluster.complete(**extra), 400)
        found = cluster.complete(prompt=["One", "Two", "Three"])
        assert [choice["index"] for choice in found.json()["choices"]] == [0, 1, 2]
        assert_error(cluster.complete(max_tokens=10**6), 400)
        assert_equal(single["long"], cluster.ask_all(LONG, cluster.kill_busiest))
        wait_up(cluster)
        assert_equal(single["mixed"], cluster.ask_all(ranked))
        pids = [*cluster.pids(), *(pid for each in cluster.replicas() for pid in children_of(each["pid"]))]
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.wait_exit() == 0
        cluster.wait_gone(pids, TIMEOUT_S)
    assert len(replay_all(tmp_path)) >= 4


@pytest.mark.long
def test_merging_while_replicas_change(tmp_path: Path, single: dict[str, list[Answer]]) -> None:
    args = ("--merge", "merged", "--admission", "lcfs", *BOTH)
    with started(tmp_path, *args) as cluster:
        wait_up(cluster)
        assert_equal(single["mixed"], cluster.ask_all(BODIES))
        wait_counted(cluster, "manylora:merge_switches_total", 'to="merged"', replicas=2)
        assert_equal(single["long"], cluster.ask_all(LONG, cluster.kill_busiest))


@pytest.mark.long
@pytest.mark.parametrize("args", [cell for cells in CELLS.values() for cell in cells], ids=" ".join)
def test_a_cell(args: tuple[str, ...], tmp_path: Path, single: dict[str, list[Answer]]) -> None:
    """Each alone, and with a replica that dies."""
    with started(tmp_path, *args) as cluster:
        wait_up(cluster)
        assert_equal(single["mixed"], cluster.ask_all(BODIES))
        found = cluster.ask_all(LONG, cluster.kill_busiest)
        assert_equal(single["long"], found)


@pytest.mark.long
def test_random_weights_are_the_same_everywhere(tmp_path: Path) -> None:
    with started(tmp_path, "--load-format", "dummy") as cluster:
        wait_up(cluster)
        same = [{**BODIES[1], "prompt": "the same"} for _ in range(8)]
        answers = cluster.ask_all(same)
        assert_equal(answers[:1] * 8, answers)


def test_what_is_refused() -> None:
    """Here what a process alone can tell: in one line, too."""
    assert "cannot write the journal" in refused("--replicas", "2", "--journal", "/proc/journal")


def test_the_page_names_these() -> None:
    section = PAGE.read_text().split("## With other features")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)[1:]
    assert {row[0] for row in rows} == {*CELLS, *HERE, *ELSEWHERE, *NOT_ANYWHERE}
    assert {name for name, said in rows if said.startswith("refused")} == {*NOT_ANYWHERE}
