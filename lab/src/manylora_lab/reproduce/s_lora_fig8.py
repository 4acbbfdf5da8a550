"""S-LoRA's Figure 8 (§7.4): throughput of models that several cards share by tensor parallelism."""

from __future__ import annotations

import dataclasses
from typing import Literal

from manylora.config.policy import CacheConfig
from manylora_lab.pricing.shapes import ATTENTION_MODULES
from manylora_lab.reproduce.cells import in_parallel
from manylora_lab.reproduce.drawing import BarPanels
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.report import Headline, Row, ratio
from manylora_lab.reproduce.s_lora_cells import (
    PAGE_TOKENS,
    SETTINGS,
    ServingCase,
    engine_config,
    stream_of,
    summary,
)
from manylora_lab.sim.hardware import HARDWARE
from manylora_lab.sim.parallel import ParallelCosts, adapter_pages
from manylora_lab.sim.replay import Replay
from manylora_lab.workloads.stream import Stream

System = Literal["s-lora", "no LoRA communication", "base only", "replicated"]
SYSTEMS: tuple[System, ...] = ("s-lora", "no LoRA communication", "base only", "replicated")
PLACES = (("S5", "a100-40", 10), ("S5", "a100-40", 100), ("S6", "a100-80", 10))
CARDS = (2, 4)
RATES = {("S5", 2): 6.0, ("S5", 4): 60.0, ("S6", 2): 6.0, ("S6", 4): 60.0}
"""Requests a second: about three times what is served, so that memory and steps decide, not arrivals."""
FIGURE = {
    ("S5", 10, 2): (0.60, 0.86, 1.21), ("S5", 10, 4): (3.30, 4.10, 5.10), ("S5", 100, 2): (0.60, 0.73, 1.31),
    ("S5", 100, 4): (2.73, 3.43, 5.12), ("S6", 10, 2): (0.22, 0.29, 0.60), ("S6", 10, 4): (1.81, 2.41, 3.46),
}  # fmt: skip
"""Requests a second of the first three systems, by setting, adapters and cards: read by eye, to some 0.03, off the
picture in the authors' repository."""


@dataclasses.dataclass(frozen=True, slots=True)
class ParallelCase:
    """One bar."""

    setting: str
    hardware: str
    num_adapters: int
    cards: int
    system: System
    duration_s: float
    seed: int


def measure(case: ParallelCase) -> Row:
    """Simulate it. Equal cases give equal rows."""
    shape, card = SETTINGS[case.setting].shape, HARDWARE[case.hardware]
    sharding: Literal["sharded", "replicated"] = "replicated" if case.system == "replicated" else "sharded"
    costs = ParallelCosts(
        shape, card, case.cards, sharding=sharding, lora_communicates=case.system != "no LoRA communication"
    )
    stream = _stream_of(case)
    pages = [
        adapter_pages(shape, case.cards, sharding, rank, PAGE_TOKENS, ATTENTION_MODULES)
        for rank in stream.ranks
    ]
    page_bytes = costs.shape.page_bytes(PAGE_TOKENS)
    num_pages = costs.pool_bytes() // page_bytes
    replay = Replay(stream, engine_config(num_pages, page_bytes, CacheConfig("s-lora")), costs, pages)
    replay.run()
    return {**summary(replay.outcomes), "pool_tokens": num_pages * PAGE_TOKENS, "adapter_pages": max(pages)}


def _stream_of(case: ParallelCase) -> Stream:
    rate = RATES[case.setting, case.cards]
    load = ServingCase(case.setting, case.hardware, case.num_adapters, rate, case.duration_s, seed=case.seed)
    stream = stream_of(load)
    if case.system != "base only":
        return stream
    return dataclasses.replace(
        stream, requests=tuple(dataclasses.replace(request, adapter=None) for request in stream.requests)
    )


def _grid(setup: Setup) -> GridResult:
    places = setup.pick(PLACES, PLACES, PLACES[:1])
    duration_s = setup.pick(120.0, 20.0, 2.0)
    cases = [
        ParallelCase(*place, cards, system, duration_s, setup.seed)
        for place in places
        for cards in CARDS
        for system in SYSTEMS
    ]
    found = in_parallel(
        measure, {case: case for case in cases}, setup.num_workers, setup.show, "simulations done"
    )
    rows: list[Row] = [
        {
            "case": f"{SETTINGS[case.setting].model}, {case.num_adapters} adapters, {case.cards} cards",
            "setting": case.setting, "hardware": case.hardware, "num_adapters": case.num_adapters,
            "cards": case.cards, "system": case.system, **row,
        }
        for case, row in found.items()
    ]  # fmt: skip
    settings = {
        "scale": setup.scale, "seed": setup.seed, "duration_s": duration_s, "systems": list(SYSTEMS),
        "rates_per_s": {f"{setting}, {cards} cards": rate for (setting, cards), rate in RATES.items()},
        "links": {name: HARDWARE[name].interconnect.name for name in {place[1] for place in places}},  # type: ignore[union-attr]
    }  # fmt: skip
    return GridResult(settings, rows)


def _headline(rows: list[Row]) -> list[Headline]:
    """The paper's text has "small" for the share of communication, and "more than 2 times" for the cards."""
    figures = []
    at = {(row["setting"], row["num_adapters"], row["cards"], row["system"]): row for row in rows}
    for setting, count, cards in dict.fromkeys(key[:3] for key in at):
        served = {system: at[setting, count, cards, system]["throughput_per_s"] for system in SYSTEMS}
        name = at[setting, count, cards, "s-lora"]["case"]
        drawn = FIGURE[setting, count, cards]
        figures += [
            Headline(f"{name}: requests/s, {system}", served[system], artifact=value)
            for system, value in zip(SYSTEMS, drawn)
        ]
        figures.append(Headline(f"{name}: requests/s, replicated", served["replicated"]))
        loss = ratio(served["s-lora"], served["no LoRA communication"])
        figures.append(
            Headline(f"{name}: s-lora over no LoRA communication", loss, artifact=ratio(drawn[0], drawn[1]))
        )
    for setting, count in dict.fromkeys(key[:2] for key in at):
        two, four = (at[setting, count, cards, "s-lora"]["throughput_per_s"] for cards in CARDS)
        drawn_two, drawn_four = (FIGURE[setting, count, cards][0] for cards in CARDS)
        name = f"{SETTINGS[setting].model}, {count} adapters: s-lora on 4 cards over 2"
        figures.append(Headline(name, ratio(four, two), artifact=ratio(drawn_four, drawn_two)))
    return figures


FIG8 = Experiment(
    "s-lora-fig8",
    "Throughput of a model on two and four cards, with and without what adapters exchange",
    "S-LoRA, Figure 8 (§7.4)",
    _grid,
    BarPanels((("throughput_per_s", "throughput, requests/s"),), group="case", series="system"),
    (_headline,),
    (
        "Simulated: the engine's own policy on cards of assumed costs that exchange over an assumed link "
        "(manylora_lab.sim.parallel): nothing of an exchange is hidden. Not measured on any GPU.",
        "The text calls the cost of LoRA's communication small; the authors' own picture has 18 to 30 %. The code "
        "they published has no tensor parallelism for adapters, so there is nothing to run beside.",
        "Rates are not given: more is offered here than can be served. Settings S5 and S6 are recalled; Llama 2's "
        "sizes for the 70B model.",
        "no LoRA communication: its tokens would be wrong. base only: the same requests, of no adapter. "
        "replicated: Punica's partition, which exchanges nothing, and whose adapters take more pages.",
    ),
)
