"""Where merging pays on an H200: steps by rank and batch, and streams in phases of one hot adapter each."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random

from manylora_lab.pricing.costs import StepWork, prefill_pairs
from manylora_lab.reproduce.drawing import Matrix
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.merge_cells import (
    BATCH_TOKENS,
    FREE,
    MEASURED,
    PAGE_TOKENS,
    PROFILE_NOTE,
    PricedCard,
    place_named,
    simulate,
)
from manylora_lab.reproduce.parts import run_cases
from manylora_lab.reproduce.report import ExperimentReport, Headline, Row, ratio
from manylora_lab.sim.merging import merge_times
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest

RANKS = (8, 16, 32, 64, 128, 256)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
KV_TOKENS = 512
"""Of each row of a decoding step."""
PROMPT = 64
"""Tokens of each row of a step that reads prompts, so that 128 rows are one step."""
NUM_ADAPTERS = 8
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
MOST_PAUSELESS = ("unmerged", "manylora", FREE)
SYSTEMS = ("unmerged", "merged", "dlora", "manylora", "manylora, wait", FREE)
MEMORY_GIB, SHORT_GIB = 40, 14
"""For pages and a copy of the weights, which is 12.1 GiB; of 14 GiB it leaves room for some 20 requests of 32."""
LOAD_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class PhasesCase:
    """One run: ``share`` of a phase's requests ask for its hot adapter, the others for any other; ``phase_s`` of
    service: so many requests as the unmerged engine serves of one adapter in that time, of ``load_s`` in all; they
    are there from the start, so what is measured is throughput."""

    system: str
    phase_s: float
    share: float
    rank: int = 16
    batch: int = 32
    memory_gib: int = MEMORY_GIB
    load_s: float = LOAD_S
    seed: int = 0


def stream_of(case: PhasesCase, requests_s: float) -> Stream:
    """The phases, where the unmerged engine serves ``requests_s`` a second."""
    rng = Random(f"{case.seed} phases")
    in_phase, count = max(1, round(case.phase_s * requests_s)), max(1, round(case.load_s * requests_s))
    requests = []
    for number in range(count):
        hot = number // in_phase % NUM_ADAPTERS
        adapter = hot
        if rng.random() >= case.share:
            adapter = (hot + rng.randrange(1, NUM_ADAPTERS)) % NUM_ADAPTERS
        piece = Piece(number, PROMPT_TOKENS)
        requests.append(StreamRequest(0.0, adapter, number, 0, (piece,), OUTPUT_TOKENS))
    return Stream("phases", tuple(requests), (case.rank,) * NUM_ADAPTERS)


def measure(case: PhasesCase) -> Row:
    """Equal cases give equal rows."""
    place = place_named(MEASURED)
    alone = dataclasses.replace(case, phase_s=1e6, share=1.0, load_s=1.0)
    memory_bytes = case.memory_gib * 2**30
    # The rate of some hundred requests of one adapter, with which a phase's seconds become requests.
    few = simulate(stream_of(alone, 4.0 * case.batch), place, "unmerged", case.batch, memory_bytes)
    stream = stream_of(case, few["tokens_per_s"] / OUTPUT_TOKENS)
    return simulate(stream, place, case.system, case.batch, memory_bytes)


def _cases(setup: Setup) -> list[PhasesCase]:
    """Share and phase's length together; then rank, batch and memory, one at a time, with one adapter alone."""
    phases = setup.pick((0.1, 0.3, 1.0, 3.0, 10.0, 30.0), (0.3, 3.0, 10.0), (1.0,))
    shares = setup.pick((0.5, 0.9, 0.95, 0.99, 1.0), (0.9, 1.0), (1.0,))
    load_s = setup.pick(60.0, 20.0, 2.0)
    systems = setup.pick(SYSTEMS, SYSTEMS, MOST_PAUSELESS)
    base = PhasesCase("unmerged", phases[-1], 1.0, load_s=load_s, seed=setup.seed)
    places = [
        dataclasses.replace(base, phase_s=phase_s, share=share) for share in shares for phase_s in phases
    ]
    pairs = [(each, systems) for each in places]
    alone = [dataclasses.replace(base, rank=rank) for rank in setup.pick(RANKS, (8, 64, 256), ())]
    alone += [dataclasses.replace(base, batch=batch) for batch in setup.pick(BATCHES, (1, 128), ())]
    alone += [dataclasses.replace(base, memory_gib=SHORT_GIB)]
    pairs += [(each, MOST_PAUSELESS) for each in alone]
    return [dataclasses.replace(each, system=system) for each, names in pairs for system in names]


def _steps(place: PricedCard, ranks: tuple[int, ...], batches: tuple[int, ...]) -> list[Row]:
    """Steps whose rows are all one adapter's, unmerged and merged (as the base's alone), and how long a phase of
    such steps has to be to pay for a switch there and back. Contexts have ``KV_TOKENS``, prompts ``PROMPT``."""
    page_bytes = place.shape.page_bytes(PAGE_TOKENS)
    rows: list[Row] = []
    for kind in ("decode", "prefill"):
        for rank in ranks:
            num_bytes = place.adapter_pages(rank) * page_bytes
            switches = {
                copy: merge_times(
                    place.costs, num_bytes, place.shape.layer_bytes, 128, BATCH_TOKENS, on_host=copy == "host"
                )
                for copy in ("device", "host")
            }
            for batch in batches:
                tokens = batch * PROMPT
                adapter = (num_bytes, 1)
                if kind == "decode":
                    work = StepWork(batch, 0, batch * KV_TOKENS, *adapter, 0, batch * num_bytes)
                else:
                    pairs = batch * prefill_pairs(0, PROMPT)
                    work = StepWork(0, tokens, tokens, *adapter, pairs, tokens * num_bytes)
                unmerged_s = place.costs.step_s(work)
                merged_s = place.costs.step_s(
                    work._replace(adapter_bytes=0, num_adapters=0, adapter_token_bytes=0)
                )
                saved_s = unmerged_s - merged_s
                rows.append({
                    "kind": kind, "rank": rank, "batch": batch, "unmerged_ms": round(1e3 * unmerged_s, 4),
                    "merged_ms": round(1e3 * merged_s, 4), "gain": ratio(unmerged_s, merged_s),
                    **{
                        f"pays_after_s_{copy}": round((t.merge_s + t.restore_s) / saved_s * unmerged_s, 3)
                        if saved_s > 0 else None
                        for copy, t in switches.items()
                    },
                })  # fmt: skip
    return rows


def _grid(setup: Setup) -> GridResult:
    place = place_named(MEASURED)
    ranks, batches = setup.pick(RANKS, RANKS, (16,)), setup.pick(BATCHES, BATCHES, (1, 32))
    cases = _cases(setup)
    found = run_cases(measure, cases, setup)
    rows = _steps(place, ranks, batches)
    for case, row in found.items():
        plain = found[dataclasses.replace(case, system="unmerged")]
        rows.append({
            "kind": "stream", **dataclasses.asdict(case), "panel": f"share {case.share:g}",
            "over_unmerged": ratio(row["tokens_per_s"], plain["tokens_per_s"]), **row,
        })  # fmt: skip
    settings = {
        "scale": setup.scale, "seed": setup.seed, "profile": MEASURED, "ranks": list(ranks),
        "batches": list(batches), "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS,
        "num_adapters": NUM_ADAPTERS, "memory_gib": MEMORY_GIB,
        "merged_steps": "measured" if place.has_measured else "counted as the base's alone",
    }  # fmt: skip
    return GridResult(settings, rows)


def _headline(rows: list[Row]) -> list[Headline]:
    steps = {(row["kind"], row["rank"], row["batch"]): row for row in rows if row["kind"] != "stream"}
    figures = []
    for kind, rank, batch in (("decode", 16, 1), ("decode", 16, 32), ("decode", 16, 128), ("decode", 64, 32),
                              ("decode", 256, 32), ("prefill", 16, 32), ("prefill", 64, 32)):  # fmt: skip
        row = steps.get((kind, rank, batch))
        if row is not None:
            name = f"{kind}, rank {rank}, {batch} rows"
            figures.append(Headline(f"{name}: unmerged over merged", row["gain"]))
            for copy in ("device", "host"):
                figures.append(Headline(f"{name}: pays after s, copy on {copy}", row[f"pays_after_s_{copy}"]))
    for row in rows:
        if row["kind"] == "stream" and row["system"] != "unmerged":
            name = f"{row['system']}: share {row['share']:g}, phases of {row['phase_s']:g} s"
            name += f", rank {row['rank']}, {row['batch']} at once, {row['memory_gib']} GiB"
            figures.append(Headline(f"{name}: tokens/s over unmerged", row["over_unmerged"]))
    return figures


@dataclasses.dataclass(frozen=True, slots=True)
class _Phases:
    """Draws the streams over phase and share; steps, and what varies rank, batch or memory, are in the rows."""

    matrix: Matrix

    def __call__(self, report: ExperimentReport, path: Path) -> None:
        usual = (16, 32, MEMORY_GIB)
        rows = [
            row
            for row in report.rows
            if row["kind"] == "stream" and (row["rank"], row["batch"], row["memory_gib"]) == usual
        ]
        self.matrix(dataclasses.replace(report, rows=rows), path)


H200 = Experiment(
    "merge-h200",
    "Where merging pays on an H200: share of the hottest adapter, phases, rank, batch",
    "merge: our own, of what dLoRA proposes (§4)",
    _grid,
    _Phases(
        Matrix(
            (("over_unmerged", "tokens/s over unmerged"), ("switches", "switches")),
            x=("phase_s", "phase, s"),
            series="system",
            column="panel",
        )
    ),
    (_headline,),
    (
        PROFILE_NOTE,
        "The profile's steps have adapters of the ranks that it measured; others are its fit's, extended.",
        "Streams: 128 tokens in, 64 out, all there from the start, in phases of one hot adapter each. Memory is "
        "that of pages and the copy of the weights together: modes that merge have the smaller pool.",
        f"{FREE}: unmerged, where steps of one adapter take what the base's do, and switches nothing; about the "
        "most for systems that pause no request. merged, dlora and wait pause some and can do better, at others' "
        "cost.",
    ),
    is_stored=True,
)
