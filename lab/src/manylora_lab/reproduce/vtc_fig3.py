"""VTC's Figure 3: what two overloading clients are served, in arrival order and by virtual token counters."""

from __future__ import annotations

import collections

from manylora.config.policy import CacheConfig, PolicyConfig
from manylora.config.queueing import QueueConfig
from manylora.protocol.commands import Admitted, Command, Emit
from manylora_lab.reproduce.drawing import Curves
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.report import Headline, Row
from manylora_lab.reproduce.s_lora_cells import PAGE_TOKENS, POOL_TOKENS, SETTINGS
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.hardware import HARDWARE
from manylora_lab.sim.replay import Replay
from manylora_lab.workloads.arrivals import even
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

TOKENS = 256
"""Of each prompt and each reply."""
CASES = {
    "two clients": ((1.5, 3.0), (1, 1)),
    "shares 1:2:3:4": ((0.8, 0.8, 1.2, 1.6), (1, 2, 3, 4)),
}
"""Requests a second of each client, and its share under vtc."""
EVERY_S = 30.0
RANK = 8


def _replayed(
    rates: tuple[float, ...], shares: tuple[int, ...], fairness: str, duration_s: float
) -> list[Row]:
    """What each client was served so far, over its share, at each interval's end."""
    arrivals = sorted(
        (moment, client) for client, rate in enumerate(rates) for moment in even(rate, duration_s)
    )
    requests = tuple(
        StreamRequest(moment, client, number, 0, (Piece(number, TOKENS),), TOKENS)
        for number, (moment, client) in enumerate(arrivals)
    )
    shape = SETTINGS["S1"].shape
    names = tuple(f"adapter-{client}={share}" for client, share in enumerate(shares))
    queue = QueueConfig(fairness="vtc", fair_share=names) if fairness == "vtc" else QueueConfig()
    config = PolicyConfig(
        num_pages=POOL_TOKENS["S1", "a10"] // PAGE_TOKENS,
        page_tokens=PAGE_TOKENS,
        max_model_len=2048,
        max_num_seqs=256,
        max_batch_tokens=8192,
        num_host_pages=2000,
        page_bytes=shape.page_bytes(PAGE_TOKENS),
        cache=CacheConfig("s-lora"),
        queue=queue,
    )
    served = [collections.Counter[int]() for _ in range(int(duration_s / EVERY_S))]
    clients = {f"{number}-0": client for number, (_, client) in enumerate(arrivals)}

    def watch(now: float, command: Command) -> None:
        if isinstance(command, Admitted | Emit) and command.request in clients:
            interval = int((replay.since_start_s or 0.0) / EVERY_S)
            if interval < len(served):
                client = clients[command.request]
                served[interval][client] += TOKENS if isinstance(command, Admitted) else 2

    pages = [shape.adapter_pages(RANK, PAGE_TOKENS)] * len(rates)
    costs = AnalyticalCosts(shape, HARDWARE["a10"])
    replay = Replay(Stream("clients", requests, (RANK,) * len(rates)), config, costs, pages, watch=watch)
    while replay.advance() and (replay.since_start_s or 0.0) < duration_s:
        pass
    rows, so_far = [], collections.Counter[int]()
    for number, of_interval in enumerate(served, 1):
        so_far += of_interval
        each = [so_far[client] / share for client, share in enumerate(shares)]
        now = [of_interval[client] / share for client, share in enumerate(shares)]
        rows.append(
            {
                "time_s": number * EVERY_S, "difference": round(max(each) - min(each), 1),
                "difference_in_interval": round(max(now) - min(now), 1), "served": sum(so_far.values()),
            }
        )  # fmt: skip
    return rows


def _grid(setup: Setup) -> GridResult:
    duration_s = setup.pick(360.0, 360.0, 90.0)
    names = setup.pick(tuple(CASES), tuple(CASES), ("two clients",))
    rows: list[Row] = [
        {"panel": f"{name}, {fairness}", "case": name, "fairness": fairness, **row}
        for name in names
        for fairness in ("fcfs", "vtc")
        for row in _replayed(*CASES[name], fairness, duration_s)
    ]
    settings = {"scale": setup.scale, "duration_s": duration_s, "tokens": TOKENS, "every_s": EVERY_S}
    return GridResult(settings, rows)


def _last(rows: list[Row]) -> list[Headline]:
    return [
        Headline(f"{panel}: difference of service after {of[-1]['time_s']:g} s", of[-1]["difference"])
        for panel in dict.fromkeys(row["panel"] for row in rows)
        if (of := [row for row in rows if row["panel"] == panel])
    ]


FIG3 = Experiment(
    "vtc-fig3",
    "Service of overloading clients beside each other, in arrival order and by virtual token counters",
    "VTC (Sheng et al., OSDI '24), Figure 3 (§5)",
    _grid,
    Curves(
        (("difference", "since the start"), ("difference_in_interval", "in 30 s")),
        x=("time_s", "time, s"),
        panel="panel",
        y="difference of service",
    ),
    (_last,),
    (
        "Simulated: the engine's own policy on an A10 of assumed costs with S-LoRA's pool. Clients are adapters "
        "of rank 8; service is 1 for an input token and 2 for an output token, over the client's share.",
        "Rates and lengths are recalled: the paper's text was not at hand. The second case has the weights of its "
        "weighted figure, at rates that leave each client with requests waiting.",
        "Arrivals are even; a seed changes nothing.",
    ),
)
