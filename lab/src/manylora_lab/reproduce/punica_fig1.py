"""Punica's Figure 1: what prefill and decode steps take by batch size and sequence length (§2.1)."""

from __future__ import annotations

from manylora_lab.pricing.costs import StepWork, prefill_pairs
from manylora_lab.pricing.shapes import ModelShape, shape_named
from manylora_lab.reproduce.drawing import LinePanels
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.report import Headline, Row, ratio
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.hardware import HARDWARE

MODEL, HARDWARE_NAME = "llama-2-7b", "a100-80"
LENGTHS = (128, 512, 1024, 1536, 2048)
"""The published benchmarks/bench_model_prefill_decode.py has these; the text says short and longer."""
PAPER_DECODE_MS = {"shortest": (11.0, 13.0), "longest": (17.0, 34.0)}
"""§2.1: at batch 1 and 32, "short sequences" and "longer sequences", taken for the ends of LENGTHS."""
NOTES = (
    "The base model alone, without adapters, as in the published benchmark.",
    "The text names neither model nor lengths: Llama-2-7B's shape and the lengths of the published benchmark.",
    "The paper states times alone: 11 and 13 ms (short) at batch 1 and 32, 17 and 34 (long): 1.2 and 2.0 times.",
    "A decode step of length n attends to n earlier tokens; a prefill step computes prompts of n tokens at once.",
)
SIM_NOTE = (
    "Simulated: arithmetic costs of an A100-80 (manylora_lab.sim.analytical), an eager engine's launch "
    "included."
)
REAL_NOTE = (
    "The real executor, synchronous steps, inputs and sampling included; dummy weights. On a CPU: the demo "
    "model's sizes in float32 on one thread, shorter sequences, and nothing to compare with the paper's figures."
)


def run(setup: Setup) -> GridResult:
    """Simulated, or measured with the engine's executor."""
    batches, lengths = _sizes(setup)
    wanted = [(stage, n, b) for stage in ("prefill", "decode") for n in lengths for b in batches]
    if setup.device == "sim":
        seconds, about = _simulated(wanted)
    else:
        seconds, about = _measured(wanted, setup)
    rows: list[Row] = [
        {"stage": stage, "length": length, "batch": batch, "ms": 1e3 * taken}
        for (stage, length, batch), taken in zip(wanted, seconds, strict=True)
    ]
    settings = {"scale": setup.scale, "device": setup.device, **about}
    headline = _headline(rows, batches, lengths, setup.device != "cpu")
    return GridResult(settings, rows, headline, (SIM_NOTE if setup.device == "sim" else REAL_NOTE,))


def _sizes(setup: Setup) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Batch sizes and lengths."""
    all_of = tuple(range(1, 33))
    if setup.device == "sim":
        return setup.pick(all_of, all_of, (1, 8, 32)), LENGTHS
    some = (1, 2, 4, 8, 16, 24, 32)
    if setup.device == "cuda":
        return setup.pick(some, (1, 8, 32), (1, 4)), setup.pick(LENGTHS, (128, 2048), (16, 32))
    return setup.pick(some, (1, 8, 32), (1, 4)), setup.pick((16, 64, 128, 256), (16, 64, 256), (8, 32))


def _simulated(wanted: list[tuple[str, int, int]]) -> tuple[list[float], Row]:
    costs = AnalyticalCosts(shape_named(MODEL), HARDWARE[HARDWARE_NAME])
    seconds = []
    for stage, length, batch in wanted:
        if stage == "decode":
            seconds.append(costs.step_s(StepWork(batch, 0, batch * (length + 1), 0)))
        else:
            tokens, pairs = batch * length, batch * prefill_pairs(0, length)
            seconds.append(costs.step_s(StepWork(0, tokens, tokens, 0, 0, pairs)))
    return seconds, {"model": MODEL, "hardware": HARDWARE_NAME}


def _measured(wanted: list[tuple[str, int, int]], setup: Setup) -> tuple[list[float], Row]:
    from manylora_lab.bench.dummies import DEMO
    from manylora_lab.bench.profile_grid import Batch
    from manylora_lab.bench.step_times import step_seconds

    # At smoke scale a GPU runs the demo's sizes too.
    shape: ModelShape = DEMO if setup.device == "cpu" or setup.scale == "smoke" else shape_named(MODEL)
    steps = [
        Batch(contexts=(length,) * batch) if stage == "decode" else Batch(prefills=((0, length),) * batch)
        for stage, length, batch in wanted
    ]
    repeats = setup.pick(15, 7, 2)

    seconds, machine = step_seconds(shape, setup.device, steps, repeats, setup.show)
    return seconds, {"model": shape.name, "machine": machine, "repeats": repeats}


def _headline(
    rows: list[Row], batches: tuple[int, ...], lengths: tuple[int, ...], is_papers: bool
) -> list[Headline]:
    at = {(row["stage"], row["length"], row["batch"]): row["ms"] for row in rows}
    last = batches[-1]
    is_papers = is_papers and last == 32 and lengths[-1] == LENGTHS[-1]
    figures = []
    for name, length in (("shortest", lengths[0]), ("longest", lengths[-1])):
        one, many = PAPER_DECODE_MS[name] if is_papers else (None, None)
        ours = at["decode", length, 1], at["decode", length, last]
        figures += [
            Headline(f"decode, {name} ({length}): batch {last} over 1", ratio(ours[1], ours[0])),
            Headline(f"decode, {name} ({length}): batch 1, ms", ours[0], one),
            Headline(f"decode, {name} ({length}): batch {last}, ms", ours[1], many),
        ]
        prefill = ratio(at["prefill", length, last], at["prefill", length, 1])
        figures.append(Headline(f"prefill, {name} ({length}): batch {last} over 1", prefill))
    return figures


FIG1 = Experiment(
    "punica-fig1",
    "Latency of prefill and decode steps by batch size and sequence length",
    "Punica, Figure 1 (§2.1)",
    run,
    LinePanels(panel="stage", series="length", x=("batch", "batch size"), y=("ms", "ms"), is_shared=False),
    notes=NOTES,
    devices=("sim", "cpu", "cuda"),
)
