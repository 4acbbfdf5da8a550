"""Punica's Figure 11: text generation on one card, by popularity, against one adapter a batch (§7.2)."""

from __future__ import annotations

import contextlib
import dataclasses

from manylora.config.policy import CacheConfig, PolicyConfig
from manylora_lab.bench.closed_loop import BatchGate, LoopGate, LoopRequest, LoopResult, StaticGate
from manylora_lab.bench.kernels.settings import POPULARITIES
from manylora_lab.pricing.shapes import ModelShape, shape_named
from manylora_lab.reproduce.cells import HOST_POOL_BYTES, PAGE_TOKENS, in_parallel
from manylora_lab.reproduce.drawing import BarPanels
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.punica_loop import SimulatedLoop
from manylora_lab.reproduce.punica_workload import LENGTHS_NOTE, MOST_TOKENS, RANK, TextRequest, text_requests
from manylora_lab.reproduce.report import Headline, Row, mean, ratio
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.hardware import HARDWARE

AT_ONCE = 32
HARDWARE_NAME = "a100-80"
MIXED, SINGLE, BACKBONE = "mixed adapters", "one adapter a batch", "one adapter a batch, backbone"
ALIKE = "mixed adapters, as many requests"
"""Where systems that batch one adapter run a part of the requests: mixed adapters on that part, beside them."""
STATIC, STATIC_BACKBONE = "one adapter a static batch", "one adapter a static batch, backbone"
SYSTEMS = (MIXED, SINGLE, BACKBONE, STATIC, STATIC_BACKBONE)
PAPER_MIXED = {"llama-2-7b": 1044.0, "llama-2-13b": 693.0}
"""§7.2: Punica, tokens per second, "consistently ... regardless of workloads"."""
PAPER_BACKBONE = {"llama-2-7b": 1140.0, "llama-2-13b": 789.0}
"""§7.2: vLLM, backbone only, where all requests are for the same model."""
PAPER_TIMES = 12.0
"""§1: "12x higher throughput compared to state-of-the-art LLM serving systems"; the text names no setting."""
NOTES = (
    "The paper's 12 times (section 1) has no setting, model or baseline: it stands beside the most of each model.",
    "A gate before the engine holds requests back: first come first served, 32 at once, one handed over after a "
    "step at most, so that a step has one new prompt at most; this is how the published "
    "benchmarks/bench_textgen_lora.py drives every system. The engine's own policy is unchanged.",
    f"{SINGLE}: the same engine; who is first in line joins only those of its adapter, else waits until they "
    f"have ended. {BACKBONE}: the same without the adapters' arithmetic and loading, as the paper lets vLLM run.",
    f"{STATIC}: as the paper's HuggingFace Transformers and DeepSpeed with PEFT; {STATIC_BACKBONE}: as its "
    "FasterTransformer. Neighbours in line of one adapter are a batch, of 32 at most. Nothing joins it, and "
    "every row is computed until the longest has ended (section 5.4, Figure 6); of a row's tokens those that "
    "were asked for count. Prompts are not padded and caches not copied, which those systems do.",
    "Ratios are of the same requests: where systems that batch one adapter run a part of them, mixed adapters run "
    f"it too ({ALIKE}).",
    "Tokens per second are generated ones (tokens_per_s); all_tokens_per_s counts prompts too, as the published "
    "benchmark prints it. The text does not say which it plots.",
    LENGTHS_NOTE,
)
SIM_NOTE = (
    "Simulated: the engine's own policy on arithmetic costs of an A100-80 (manylora_lab.sim.analytical), an eager "
    "engine's launch included. All adapters are in the host's memory from the start."
)
REAL_NOTE = (
    "Measured on the engine in this process; dummy weights; lengths divided as the settings say. Every adapter "
    "was asked for once before; those that fit stay on the device, others on the host. Of repeats the "
    "median counts."
)


@dataclasses.dataclass(frozen=True, slots=True)
class PunicaRun:
    """One bar. ``num_requests``: how many of the workload's first are run."""

    model: str
    popularity: str
    system: str
    num_requests: int


@dataclasses.dataclass(frozen=True, slots=True)
class RequestLoad:
    """The workload: ``total`` requests, of which a system that batches one adapter runs the first ``slow``."""

    total: int
    slow: int
    divisor: int
    seed: int

    def requests(self, run: PunicaRun) -> list[TextRequest]:
        found = text_requests(run.popularity, self.total, self.seed, self.divisor)
        return found[: run.num_requests]


def run(setup: Setup) -> GridResult:
    """Every system under every popularity."""
    load = _load(setup)
    models = _models(setup)
    runs = [
        PunicaRun(model, popularity, system, _num_requests(load, popularity, system))
        for model in models
        for popularity in POPULARITIES
        for system in (*SYSTEMS, ALIKE)
        if system != ALIKE or _num_requests(load, popularity, SINGLE) < load.total
    ]
    if setup.device == "sim":
        found = in_parallel(
            _simulate, {one: (one, load) for one in runs}, setup.num_workers, setup.show, "runs done"
        )
        about: Row = {"hardware": HARDWARE_NAME}
    else:
        found, about = _measure(runs, load, models, setup)
    rows = [_row(one, found[one]) for one in runs]
    settings = {
        "scale": setup.scale, "device": setup.device, "seed": setup.seed, "at_once": AT_ONCE, "rank": RANK,
        "requests": load.total, "lengths_divided_by": load.divisor, **about,
    }  # fmt: skip
    return GridResult(
        settings, rows, _headline(rows, load), (SIM_NOTE if setup.device == "sim" else REAL_NOTE,)
    )


def _load(setup: Setup) -> RequestLoad:
    if setup.device == "sim":
        return setup.pick(
            RequestLoad(1000, 1000, 1, setup.seed),
            RequestLoad(100, 50, 1, setup.seed),
            RequestLoad(16, 8, 16, setup.seed),
        )
    if setup.device == "cuda":
        return setup.pick(
            RequestLoad(1000, 50, 1, setup.seed),
            RequestLoad(64, 4, 1, setup.seed),
            RequestLoad(8, 4, 64, setup.seed),
        )
    return setup.pick(
        RequestLoad(1000, 100, 8, setup.seed),
        RequestLoad(64, 16, 8, setup.seed),
        RequestLoad(8, 4, 128, setup.seed),
    )


def _models(setup: Setup) -> tuple[str, ...]:
    both, smaller = tuple(PAPER_MIXED), ("llama-2-7b",)
    if setup.device == "cpu":
        return ("demo",)
    if setup.device == "cuda":  # the larger one takes as long again
        return setup.pick(both, smaller, ("demo",))
    return setup.pick(both, both, smaller)


def _num_requests(load: RequestLoad, popularity: str, system: str) -> int:
    """Batches of one or two take many steps, and their pace soon shows."""
    return load.total if system == MIXED or popularity == "identical" else load.slow


def gated(
    requests: list[TextRequest], is_mixed: bool, is_backbone: bool
) -> tuple[BatchGate, list[LoopRequest]]:
    """The gate before an engine that batches one adapter or several, and the requests of adapters or of none."""
    gate = BatchGate([request.model for request in requests], AT_ONCE, is_mixed)
    return gate, [
        LoopRequest(None if is_backbone else request.model, request.prompt_tokens, request.output_tokens)
        for request in requests
    ]


def static(
    requests: list[TextRequest], is_backbone: bool, most_tokens: int = MOST_TOKENS
) -> tuple[StaticGate, list[LoopRequest]]:
    """The gate before an engine of static batches, and the requests, each as long as its batch's longest, or as a
    context of ``most_tokens`` allows."""
    batches: list[list[int]] = []
    for number, request in enumerate(requests):
        is_alike = bool(batches) and requests[batches[-1][0]].model == request.model
        if is_alike and len(batches[-1]) < AT_ONCE:
            batches[-1].append(number)
        else:
            batches.append([number])
    padded = []
    for batch in batches:
        longest = max(requests[number].output_tokens for number in batch)
        for number in batch:
            one = requests[number]
            output = max(one.output_tokens, min(longest, most_tokens - one.prompt_tokens))
            padded.append(LoopRequest(None if is_backbone else one.model, one.prompt_tokens, output))
    return StaticGate(batches), padded


def _gate(
    run: PunicaRun, load: RequestLoad, requests: list[TextRequest]
) -> tuple[LoopGate, list[LoopRequest]]:
    if run.system in (STATIC, STATIC_BACKBONE):
        return static(requests, run.system == STATIC_BACKBONE, MOST_TOKENS // load.divisor)
    return gated(requests, run.system in (MIXED, ALIKE), run.system == BACKBONE)


def simulated(
    costs: AnalyticalCosts, gate: LoopGate, requests: list[LoopRequest], adapter_pages: int
) -> LoopResult:
    """The loop on an engine that has all of the card's pool, its own cache policy and the paper's batch; a static
    batch's prompts are one step."""
    num_prompts = AT_ONCE if isinstance(gate, StaticGate) else 1
    page_bytes = costs.shape.page_bytes(PAGE_TOKENS)
    config = PolicyConfig(
        num_pages=costs.pool_bytes() // page_bytes,
        page_tokens=PAGE_TOKENS,
        max_model_len=MOST_TOKENS,
        max_num_seqs=AT_ONCE,
        max_batch_tokens=num_prompts * MOST_TOKENS + AT_ONCE,
        num_host_pages=HOST_POOL_BYTES // page_bytes,
        page_bytes=page_bytes,
        cache=CacheConfig(),
    )
    return SimulatedLoop(requests, gate, config, costs, adapter_pages).run()


def _simulate(arguments: tuple[PunicaRun, RequestLoad]) -> LoopResult:
    one, load = arguments
    shape = shape_named(one.model)
    costs = AnalyticalCosts(shape, HARDWARE[HARDWARE_NAME])
    adapter_pages = shape.adapter_pages(RANK, PAGE_TOKENS, shape.modules)
    asked = load.requests(one)
    return _counted(simulated(costs, *_gate(one, load, asked), adapter_pages), asked)


def _counted(result: LoopResult, requests: list[TextRequest]) -> LoopResult:
    """With the tokens that were asked for: a static batch computes more."""
    return dataclasses.replace(result, output_tokens=sum(request.output_tokens for request in requests))


def _measure(
    runs: list[PunicaRun], load: RequestLoad, models: tuple[str, ...], setup: Setup
) -> tuple[dict[PunicaRun, LoopResult], Row]:
    from manylora_lab.bench.closed_loop import dummy_loop
    from manylora_lab.bench.dummies import DEMO
    from manylora_lab.bench.kernels.timing import one_thread

    # A GPU's runs take minutes, and no other work disturbs them.
    repeats = setup.pick(3, 3, 1) if setup.device == "cpu" else 1
    found: dict[PunicaRun, LoopResult] = {}
    with one_thread() if setup.device == "cpu" else contextlib.nullcontext():
        for model in models:
            shape: ModelShape = DEMO if model == "demo" else shape_named(model)
            longest = MOST_TOKENS // load.divisor + 2  # both lengths are at least 1
            with dummy_loop(shape, setup.device, RANK, load.total, AT_ONCE, longest) as loop:
                loop.warm_up(_warm_requests(load))
                mine = [one for one in runs if one.model == model]
                repeated: dict[PunicaRun, list[LoopResult]] = {one: [] for one in mine}
                for number in range(repeats):
                    for done, one in enumerate(mine):
                        asked = load.requests(one)
                        gate, requests = _gate(one, load, asked)
                        repeated[one].append(_counted(loop.run(requests, gate), asked))
                        setup.show(f"{model}, repeat {number + 1}: {done + 1} of {len(mine)} runs done")
                found |= {one: _median(results) for one, results in repeated.items()}
                machine = loop.machine
    return found, {"machine": machine, "repeats": repeats}


def _median(results: list[LoopResult]) -> LoopResult:
    """The result of median duration."""
    return sorted(results, key=lambda result: result.duration_s)[len(results) // 2]


def _warm_requests(load: RequestLoad) -> list[LoopRequest]:
    """Every adapter once, and some of the prompts, of adapters and of the base."""
    asked = text_requests("distinct", load.total, load.seed, load.divisor)[:AT_ONCE]
    return [
        *(LoopRequest(adapter, 1, 1) for adapter in range(load.total)),
        *(LoopRequest(one.model if i % 2 else None, one.prompt_tokens, 2) for i, one in enumerate(asked)),
    ]


def _row(run: PunicaRun, result: LoopResult) -> Row:
    return {
        "case": f"{run.model} {run.popularity}", "model": run.model, "popularity": run.popularity,
        "system": run.system, "requests": run.num_requests,
        "tokens_per_s": result.output_tokens / result.duration_s,
        "all_tokens_per_s": (result.prompt_tokens + result.output_tokens) / result.duration_s,
        "mean_batch": result.output_tokens / result.num_steps,
        "output_tokens": result.output_tokens, "duration_s": result.duration_s,
    }  # fmt: skip


def _headline(rows: list[Row], load: RequestLoad) -> list[Headline]:
    """The paper's figures stand beside ours where models and lengths are the paper's, and its ratio where all
    systems ran as many requests as in the paper. Ratios are of the same requests."""
    at = {(row["model"], row["popularity"], row["system"]): row["tokens_per_s"] for row in rows}
    is_papers = load.divisor == 1
    figures = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mixed = [at[model, popularity, MIXED] for popularity in POPULARITIES]
        stated = PAPER_MIXED.get(model) if is_papers else None
        figures.append(Headline(f"{model}: tokens/s, {MIXED}, mean of popularities", mean(mixed), stated))
        figures.append(
            Headline(f"{model}: {MIXED}, slowest popularity over fastest", ratio(min(mixed), max(mixed)))
        )
        stated = PAPER_BACKBONE.get(model) if is_papers else None
        name = f"{model}: tokens/s, {BACKBONE}, identical"
        figures.append(Headline(name, at[model, "identical", BACKBONE], stated))
        times = {
            system: {
                p: ratio(at.get((model, p, ALIKE), at[model, p, MIXED]), at[model, p, system])
                for p in POPULARITIES
            }
            for system in (BACKBONE, STATIC_BACKBONE, STATIC)
        }
        figures += [
            Headline(f"{model}: {MIXED} over {BACKBONE}, {p}", times[BACKBONE][p]) for p in POPULARITIES
        ]
        for system, each in times.items():
            most = max(value for value in each.values() if value is not None)
            is_stated = is_papers and model in PAPER_MIXED and load.slow == load.total
            stated = PAPER_TIMES if is_stated and system == BACKBONE else None
            figures.append(Headline(f"{model}: {MIXED} over {system}, most", most, stated))
        for system in (STATIC, STATIC_BACKBONE):
            name = f"{model}: {MIXED} over {system}, identical"
            figures.append(Headline(name, times[system]["identical"]))
    return figures


FIG11 = Experiment(
    "punica-fig11",
    "Text generation on one card, batching across adapters or within one",
    "Punica, Figure 11 (§7.2)",
    run,
    BarPanels((("tokens_per_s", "tokens/s"),), group="case", series="system"),
    notes=NOTES,
    devices=("sim", "cpu", "cuda"),
)
