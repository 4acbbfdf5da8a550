"""FastLibra's Figure 5: visits, swap cost and last use of KV caches and adapters, by rank (§2.3.2)."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from manylora_lab.pricing.shapes import shape_named
from manylora_lab.reproduce.cells import Cell, cell_costs, cell_replay
from manylora_lab.reproduce.drawing import Points
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.report import Headline, Row
from manylora_lab.sim.replay import Outcome

COLUMNS = {"visits": "visited frequency", "cost": "swap cost", "unused": "LRU time"}
PAIRS = (("unused", "visits"), ("unused", "cost"), ("cost", "visits"))


class Entry(NamedTuple):
    """One KV cache or adapter at the end of a run: requests that used it; seconds to bring it; unused seconds."""

    kind: str
    visits: int
    cost: float
    unused: float


def run(setup: Setup) -> GridResult:
    """One replay; nothing is evicted from the count."""
    cell = Cell("chatbot", "fastlibra", 2.0, 100, setup.pick(1800.0, 300.0, 20.0), seed=setup.seed)
    replay = cell_replay(cell)
    replay.run()
    found = entries(cell, replay.outcomes, replay.stream.ranks)
    ranked = {field: ranks([getattr(entry, field) for entry in found]) for field in COLUMNS}
    rows: list[Row] = [
        {"kind": entry.kind, **{f"{field}_rank": round(float(ranked[field][index]), 1) for field in COLUMNS}}
        for index, entry in enumerate(found)
    ]
    headline = []
    for name, of in (("KV and LoRA", {"KV", "LoRA"}), ("KV", {"KV"}), ("LoRA", {"LoRA"})):
        chosen = [entry for entry in found if entry.kind in of]
        for a, b in PAIRS:
            values = [[getattr(entry, field) for entry in chosen] for field in (a, b)]
            headline.append(
                Headline(f"{name}: rank correlation of {COLUMNS[a]} and {COLUMNS[b]}", spearman(*values))
            )
    settings = {"scale": setup.scale, "seed": setup.seed, "cell": dataclasses.asdict(cell)}
    return GridResult(settings, rows, headline)


def entries(cell: Cell, outcomes: Sequence[Outcome], adapter_ranks: Sequence[int]) -> list[Entry]:
    """Adapters that were asked for, then turns' KV."""
    shape, costs = shape_named(cell.model), cell_costs(cell)
    now = max(outcome.end_s for outcome in outcomes)
    last_use: dict[object, float] = {}
    num_turns: collections.Counter[int] = collections.Counter()
    asked: collections.Counter[int] = collections.Counter()
    for outcome in outcomes:
        request = outcome.request
        assert request.adapter is not None, "every request of a scenario names an adapter"
        asked[request.adapter] += 1
        num_turns[request.conversation] += 1
        for user in (("adapter", request.adapter), ("conversation", request.conversation)):
            last_use[user] = max(last_use.get(user, 0.0), outcome.end_s)

    def seconds(num_pages: int) -> float:
        return costs.copy_s(num_pages * shape.page_bytes(cell.page_tokens))

    found = [
        Entry(
            "LoRA",
            visits,
            seconds(shape.adapter_pages(adapter_ranks[adapter], cell.page_tokens)),
            now - last_use["adapter", adapter],
        )
        for adapter, visits in sorted(asked.items())
    ]
    for outcome in outcomes:
        request = outcome.request
        num_pages = -(-(request.new_tokens + request.output_tokens) // cell.page_tokens)
        visits = num_turns[request.conversation] - request.turn
        found.append(
            Entry("KV", visits, seconds(num_pages), now - last_use["conversation", request.conversation])
        )
    return found


def ranks(values: Sequence[float]) -> np.ndarray:
    """The rank of each value, from 0; equal ones share the mean of theirs."""
    _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: np.ndarray = ends - (counts + 1) / 2
    return means[inverse]


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The correlation of ranks; None where all of one side are equal."""
    x, y = ranks(a), ranks(b)
    if len(x) < 2 or not x.std() or not y.std():
        return None
    return round(float(np.corrcoef(x, y)[0, 1]), 4)


FIG5 = Experiment(
    "fastlibra-fig5",
    "ranks of visits, swap cost and last use of KV caches and adapters, against one another",
    "FastLibra, Figure 5 (§2.3.2)",
    run,
    Points(
        [((f"{a}_rank", f"rank of {COLUMNS[a]}"), (f"{b}_rank", f"rank of {COLUMNS[b]}")) for a, b in PAIRS],
        series="kind",
    ),
    notes=(
        "Simulated: chatbot, 7B, 100 adapters, 2 requests/s under fastlibra, looked at when the last request has "
        "ended; the paper names no scenario and no load for this figure.",
        "A KV cache: what one turn added, its prompt and reply; visits: that turn and those after it in its "
        "conversation. Swap cost: the transfer of its pages. LRU time: since the last use. Rank 0: the least.",
        "The paper gives no coefficients but says that there is no clear correlation. Ours are Spearman's, ties "
        "at their mean rank.",
    ),
)
