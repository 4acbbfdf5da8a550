"""FastLibra's §6.10: real time of matching and updating the tree, and of deciding what to swap."""

from __future__ import annotations

import platform

from manylora_lab.reproduce.decision_times import measure
from manylora_lab.reproduce.drawing import BarPanels
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.report import Headline, Row

PAPER_REQUEST_MS = 0.5
"""§6.10: "less than 0.5ms" for matching and updating, with the largest tree."""
PAPER_DECISION_MS = 5.0
"""§6.10: "within 5ms" for monitoring memory and deciding what to swap."""
POLICIES = ("fastlibra", "manylora")


def run(setup: Setup) -> GridResult:
    """Trees of two sizes at full, one otherwise; one after the other, whatever the number of workers."""
    sizes = setup.pick((100_000, 1_000_000), (100_000,), (12_000,))
    num_requests, num_decisions = setup.pick((2000, 100), (2000, 100), (200, 20))
    rows: list[Row] = []
    for num_nodes in sizes:
        for policy in POLICIES:
            for with_host in (True, False):
                measured = measure(policy, num_nodes, with_host, num_requests, num_decisions)
                tier = "host pool" if with_host else "no host pool"
                rows.append({"case": f"{num_nodes:,} pages, {tier}", **measured})
                setup.show(f"{len(rows)} of {4 * len(sizes)} measured")
    settings = {
        "scale": setup.scale, "device": "cpu", "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(), "requests": num_requests, "decisions": num_decisions,
    }  # fmt: skip
    headline = []
    for policy in POLICIES:
        mine = [row for row in rows if row["policy"] == policy and row["nodes"] == sizes[-1]]
        request_ms = max(row["request_mean_ms"] for row in mine)
        decision_ms = max(row["decision_mean_ms"] for row in mine)
        is_papers = policy == "fastlibra"
        headline += [
            Headline(
                f"{policy}: match and update, mean ms", request_ms, PAPER_REQUEST_MS if is_papers else None
            ),
            Headline(f"{policy}: a decision, mean ms", decision_ms, PAPER_DECISION_MS if is_papers else None),
        ]
    return GridResult(settings, rows, headline)


OVERHEAD = Experiment(
    "fastlibra-overhead",
    "real time of matching and updating the tree, and of a swap decision, on this CPU",
    "FastLibra, §6.10",
    run,
    BarPanels(
        (("request_mean_ms", "match and update, ms"), ("decision_mean_ms", "a decision, ms")),
        group="case",
        series="policy",
    ),
    notes=(
        "Measured in one thread of this CPU, in Python, without a device; other work on the machine slows it. The "
        "paper gives upper limits, not means, and does not say how large its largest tree is.",
        "A request of 960 tokens that matches 60 pages; a decision sends 64 pages away at 96 % use.",
    ),
    devices=("cpu",),
)
