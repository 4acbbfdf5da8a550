"""CaraServe's Figures 4, 5 and 9: what a decode step's LoRA takes by the ranks in its batch, under two kernels.

``bgmv`` (Punica's first kernel): every row reads an adapter of its own, padded to the batch's largest rank.
``mbgmv`` (S-LoRA's): every row reads one of its own rank. Neither shares anything between rows. ``ours``: rows of
one adapter read it once.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from manylora.config.routing import RouterConfig
from manylora.protocol.routing import Asked, Assign, Held, Listed, ReplicaFacts, ReplicaUp, StepPlane
from manylora.router.router import Router
from manylora_lab.reproduce.caraserve_cells import DECODE_LINES
from manylora_lab.reproduce.caraserve_fits import MEASURES, PAPERS_LINES, fit_of
from manylora_lab.reproduce.drawing import BarPanels, LinePanels, Points
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.report import Headline, Row, ratio

if TYPE_CHECKING:
    from manylora_lab.reproduce.lora_rig import LoraBatch, LoraRig

KERNELS = ("bgmv", "mbgmv", "ours")
RANKS = (8, 16, 32, 64, 128)
ROWS_AN_ADAPTER = 4
HIDDEN = 4096
PAPER_R2 = 0.96

NOTES = (
    "One projection from 4,096 to 4,096, of which a decode step of Llama-2-7B with adapters on q, k and v has 96; "
    "by the engine's operator, which reads adapters from scattered pages. bgmv and mbgmv are that operator on "
    "other adapters: a row has one of its own, in bgmv padded with zeros to the batch's largest rank. Four rows "
    "share an adapter, which only ours makes use of.",
    "On CUDA: device time of captured launches with cold caches. On a CPU: wall time of one thread.",
)


@dataclasses.dataclass(frozen=True, slots=True)
class RankedBatch:
    """``ranks``: of each adapter, which has ``ROWS_AN_ADAPTER`` rows. ``mix``: its name in rows."""

    mix: str
    ranks: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return ROWS_AN_ADAPTER * len(self.ranks)

    @property
    def rank_sum(self) -> int:
        """As CaraServe counts: of each row."""
        return ROWS_AN_ADAPTER * sum(self.ranks)

    @property
    def rank_padded(self) -> int:
        return self.num_rows * max(self.ranks)


def adapters_of(batch: RankedBatch, kernel: str) -> tuple[list[int], list[int]]:
    """Adjacent rows of each adapter that the kernel reads, and the ranks that it reads them with."""
    if kernel == "ours":
        return [ROWS_AN_ADAPTER] * len(batch.ranks), list(batch.ranks)
    ranks = [rank for rank in batch.ranks for _ in range(ROWS_AN_ADAPTER)]
    return [1] * len(ranks), [max(ranks)] * len(ranks) if kernel == "bgmv" else ranks


def case_of(rig: LoraRig, batch: RankedBatch, kernel: str) -> LoraBatch:
    """The kernel's batch; what is padded has zeros in B."""
    counts, ranks = adapters_of(batch, kernel)
    case = rig.ranked(counts, ranks)
    if kernel == "bgmv":
        own = [rank for rank in batch.ranks for _ in range(ROWS_AN_ADAPTER)]
        for layer in range(rig.layers):
            for segment, rank in enumerate(own):
                rig.clear_b(case, layer, segment, rank)
    return case


def batches_of(sizes: Sequence[int], ranks: Sequence[int], num_mixed: int, seed: int) -> list[RankedBatch]:
    """Of every size: one of each rank alone, and some of ranks at random."""
    draws = random.Random(f"{seed} ranks")
    found = []
    for size in sizes:
        count = size // ROWS_AN_ADAPTER
        found += [RankedBatch(f"rank {rank}", (rank,) * count) for rank in ranks]
        found += [
            RankedBatch(f"mixed {number}", tuple(draws.choices(ranks, k=count)))
            for number in range(num_mixed)
        ]
    return found


def run(setup: Setup) -> GridResult:
    """Every kernel on every batch, in turn."""
    from manylora_lab.reproduce.lora_rig import LoraRig

    sizes = setup.pick((8, 16, 24, 32, 48, 64), (8, 16, 32, 64), (4, 8))
    ranks, hidden = setup.pick((RANKS, HIDDEN), (RANKS, HIDDEN), ((8, 16), 256))
    repeats, num_mixed = setup.pick(60, 10, 2), setup.pick(4, 2, 2)
    rig = LoraRig(setup.device, hidden, hidden, sizes[-1], ranks[-1])
    rows: list[Row] = []
    batches = batches_of(sizes, ranks, num_mixed, setup.seed)
    for number, batch in enumerate(batches):
        cases = [case_of(rig, batch, kernel) for kernel in KERNELS]
        found = rig.seconds([rig.sgmv(case) for case in cases], repeats)
        for kernel, case, seconds in zip(KERNELS, cases, found, strict=True):
            rows.append(
                {
                    "kernel": kernel, "mix": batch.mix, "batch": batch.num_rows, "rank_sum": batch.rank_sum,
                    "rank_mean": batch.rank_sum // batch.num_rows, "rank_max": max(batch.ranks),
                    "rank_padded": batch.rank_padded, "us": round(seconds * 1e6, 3), **rig.errors(case),
                }
            )  # fmt: skip
        setup.show(f"{number + 1} of {len(batches)} timed")
    settings = {
        "scale": setup.scale, "device": setup.device, "hidden": hidden, "repeats": repeats, "ranks": list(ranks),
        "seed": setup.seed, "rows_an_adapter": ROWS_AN_ADAPTER, **rig.description,
    }  # fmt: skip
    return GridResult(settings, rows)


# ---------------------------------------------------------------- figures


def _figure4(rows: list[Row]) -> list[Headline]:
    """What one adapter of large rank does to a batch, by kernel."""
    figures = []
    most, size = max(row["rank_max"] for row in rows), max(row["batch"] for row in rows)
    least = min(row["rank_max"] for row in rows)
    for kernel in KERNELS:
        mine = [row for row in rows if row["kernel"] == kernel and row["batch"] == size]
        alone = {row["rank_max"]: row["us"] for row in mine if row["mix"].startswith("rank")}
        mixed = [row for row in mine if row["mix"].startswith("mixed") and row["rank_max"] == most]
        figures.append(
            Headline(
                f"{kernel}: batch {size} of rank {most} over rank {least}", ratio(alone[most], alone[least])
            )
        )
        if mixed:
            mean_us = statistics.fmean(row["us"] for row in mixed)
            figures.append(
                Headline(f"{kernel}: batch {size} of mixed ranks up to {most} over rank {most} alone",
                         ratio(mean_us, alone[most]))
            )  # fmt: skip
    return figures


def _figure9(rows: list[Row]) -> list[Headline]:
    """The paper's two lines, and ours: the same with the largest rank beside."""
    figures = []
    for kernel, measure, beside in itertools.product(KERNELS, MEASURES, ((), ("rank_max",))):
        fit = fit_of(rows, kernel, (measure, *beside))
        if fit is None:
            continue
        over = f"{kernel} over {MEASURES[measure]}" + (", the largest rank beside" if beside else "")
        is_papers = PAPERS_LINES.get(kernel) == measure and not beside
        figures.append(Headline(f"{over}: R2 on points held out", fit.r2, PAPER_R2 if is_papers else None))
        figures.append(Headline(f"{over}: ns a unit", fit.slopes_ns[0]))
        if beside:
            figures.append(Headline(f"{over}: ns a unit of that", fit.slopes_ns[1]))
        figures.append(Headline(f"{over}: us besides", fit.base_us))
    return figures


FIG4 = Experiment(
    "caraserve-fig4",
    "What LoRA takes in a decode step by batch and rank, under kernels that pad, that share nothing, and ours",
    "CaraServe, Figure 4 (§2.4)",
    run,
    LinePanels("mix", "kernel", ("batch", "rows"), ("us", "us"), is_shared=False),
    (_figure4,),
    NOTES,
    devices=("cpu", "cuda"),
)

FIG9 = Experiment(
    "caraserve-fig9",
    "The same over rows times the largest rank, and over the sum of ranks, with fitted lines",
    "CaraServe, Figure 9 (§5)",
    run,
    Points(
        (
            (("rank_padded", "rows x largest rank"), ("us", "us")),
            (("rank_sum", "sum of ranks"), ("us", "us")),
        ),
        "kernel",
    ),
    (_figure9,),
    (
        *NOTES,
        "Lines by least squares through two thirds of the points; R2 is of the other third. Rows run beside each "
        "other, so a launch takes its work over what the device does at once and, however few rows there are, as "
        "long as the longest of them: the fits with the largest rank beside have both.",
    ),
    devices=("cpu", "cuda"),
)

# ---------------------------------------------------------------- 5

FIG5_SERVERS = ((24, 32), (16, 64))
"""Requests of a rank that run on each server; the new one has rank 64."""
FIG5_OBJECTIVE_S = 0.036
PAPER_CHOICE = {"bgmv": 2, "mbgmv": 1}
_FACTS = ReplicaFacts(1000, 16, 4096, 32, (StepPlane(DECODE_LINES["mbgmv"][1]),), 1e-4, 1e-4, 1e-3)


def choice_of(kernel: str) -> int:
    """The server that the caraserve router takes for the new request, from 1."""
    slope_s, base_s = DECODE_LINES[kernel]
    values = {
        "kernel": kernel, "decode_slope_s": slope_s, "decode_base_s": base_s, "prefill_slope_s": 0.0,
        "prefill_base_s": 0.0, "slo_s": FIG5_OBJECTIVE_S,
    }  # fmt: skip
    router = Router(RouterConfig("caraserve", tuple((key, str(value)) for key, value in values.items())))
    for server, (count, rank) in enumerate(FIG5_SERVERS):
        router.handle(Listed(server + 1, rank, 4), 0.0)
        router.handle(ReplicaUp(server, 1, _FACTS), 0.0)
        for number in range(count):
            asked = Asked(f"{server}-{number}", server + 1, 100, 100, attempts=1)
            router.handle(Held(asked, server, 1), 0.0)
    said = router.handle(Asked("new", len(FIG5_SERVERS), 100, 100), 0.0)
    (assigned,) = (command for command in said if isinstance(command, Assign))
    return assigned.replica + 1


def _choices(setup: Setup) -> GridResult:
    """Both lines, through the latencies that the figure prints, on both servers; and the router's choice."""
    rows: list[Row] = []
    new_rank = FIG5_SERVERS[-1][1]
    figures = []
    for kernel, (slope_s, base_s) in DECODE_LINES.items():
        chosen = choice_of(kernel)
        figures.append(Headline(f"{kernel}: the server that is chosen", chosen, PAPER_CHOICE[kernel]))
        for server, (count, rank) in enumerate(FIG5_SERVERS, 1):
            units = (count + 1) * new_rank if kernel == "bgmv" else count * rank + new_rank
            decode_ms = round(1e3 * (slope_s * units + base_s), 3)
            rows.append(
                {
                    "kernel": kernel, "server": f"{count} of rank {rank}", "decode_ms": decode_ms,
                    "is_chosen": server == chosen,
                }
            )  # fmt: skip
            figures.append(
                Headline(f"{kernel}: a step of server {server} with the new request, ms", decode_ms)
            )
    settings = {"scale": setup.scale, "seed": setup.seed, "objective_ms": 1e3 * FIG5_OBJECTIVE_S}
    return GridResult(settings, rows, figures)


FIG5 = Experiment(
    "caraserve-fig5",
    "Where a request of rank 64 goes, by kernel: to 24 requests of rank 32, or to 16 of rank 64",
    "CaraServe, Figure 5 (§2.4)",
    _choices,
    BarPanels((("decode_ms", "a step with the new request, ms"),), "kernel", "server"),
    (),
    (
        "The router itself chooses, by lines through the two latencies that the figure prints for each kernel. By "
        "these the bgmv choice misses the objective of 36 ms by 0.05 ms.",
    ),
)
