"""CaraServe's Figures 16 to 18: invoking CPU LoRA, handing rows to processes, and cores side by side (§7.4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from manylora.config.cold_start import num_cores
from manylora_lab.pricing.costs import StepWork
from manylora_lab.pricing.shapes import shape_named
from manylora_lab.reproduce.drawing import LinePanels, StackedBars
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.report import Headline, Row, change, ratio
from manylora_lab.sim.analytical import EAGER_LAUNCH_S, AnalyticalCosts
from manylora_lab.sim.hardware import HARDWARE

if TYPE_CHECKING:
    import torch

    from manylora_lab.reproduce.assist_rig import AssistPool, LayerTimes

SHAPE = shape_named("llama-2-7b")
HIDDEN, RANK = 4096, 64
PAPER_INVOCATION, PAPER_UNOPTIMISED, PAPER_PREFILL, PAPER_SPEEDUP = -0.16, 0.794, -0.579, 1.7
_QKV_SHARE = 3 * HIDDEN**2 * SHAPE.layers / SHAPE.layer_parameters

NOTES = (
    "Measured: products of q, k and v of Llama-2-7B's width, one for each layer (quick: 8 of 32), of an adapter "
    "of rank 64 in 16 bits, by the engine's CPU threads (the paper has processes) on this machine's cores, which "
    "others use too: of each product the least of some runs. More of them than cores take turns.",
    "socket (processes that have rows and give results over domain sockets) and threads (torch's own, which "
    "compute in 16 bits) are settings of the laboratory that no server offers. All give the same numbers but for "
    "rounding; error: the largest of the last layer, over its largest result.",
)


def _pool(setup: Setup) -> AssistPool:
    from manylora_lab.reproduce.assist_rig import AssistPool

    return AssistPool(*setup.pick((HIDDEN, SHAPE.layers, RANK), (HIDDEN, 8, RANK), (256, 2, 8)))


def _settings(setup: Setup, pool: AssistPool, repeats: int) -> Row:
    import torch

    return {
        "scale": setup.scale, "device": "cpu", "seed": 0, "hidden": pool.hidden, "layers": pool.layers,
        "rank": pool.rank, "repeats": repeats, "cores": num_cores(), "torch": torch.__version__,
    }  # fmt: skip


def _inputs(pool: AssistPool, tokens: int) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, pool.hidden, generator=generator).to(torch.bfloat16)


# ---------------------------------------------------------------- 17 and 18


def _timed(pool: AssistPool, name: str, count: int, tokens: int, repeats: int) -> Row:
    """A prefill's products by so many processes or threads."""
    from manylora_lab.reproduce.assist_rig import WAYS, prefill

    way, x = WAYS[name](pool, count), _inputs(pool, tokens)
    try:
        best = prefill(pool, way, x, repeats)
    finally:
        way.close()
    return {
        "way": name, "count": count, "tokens": tokens, "layers": pool.layers, "ms": _ms(best.seconds),
        "busy_ms": _ms(best.busy_s), "ipc_ms": _ms(max(best.seconds - best.busy_s, 0.0)),
        "error": best.error,
        "is_crowded": count + (name != "threads") > num_cores(),
    }  # fmt: skip


def _run(setup: Setup, cases: list[tuple[str, int, int]], panel: Callable[[Row], str]) -> GridResult:
    """``cases``: ways, processes and tokens."""
    pool, repeats = _pool(setup), setup.pick(15, 5, 1)
    rows = []
    try:
        for number, (name, count, tokens) in enumerate(cases):
            row = _timed(pool, name, count, tokens, repeats)
            rows.append({"panel": panel(row), **row})
            setup.show(f"{number + 1} of {len(cases)} timed")
        return GridResult(_settings(setup, pool, repeats), rows)
    finally:
        pool.close()


_EACH = 16


def _transports(setup: Setup) -> GridResult:
    counts = setup.pick((1, 2, 4, 8), (1, 2, 4), (1, 2))
    cases = [(name, count, _EACH * count) for count in counts for name in ("shared", "socket")]
    return _run(setup, cases, lambda row: f"{row['count']} processes")


def _transport_figures(rows: list[Row]) -> list[Headline]:
    at = {(row["way"], row["count"]): row for row in rows}
    figures = []
    for name, count in at:
        figures.append(
            Headline(f"{name}, {count} processes: ms besides computing, a prefill", at[name, count]["ipc_ms"])
        )
        if name == "shared":
            row = at[name, count]
            figures.append(
                Headline(f"shared, {count} processes: ms besides computing, a hand-over",
                         round(row["ipc_ms"] / row["layers"], 4))
            )  # fmt: skip
    most = max(count for _, count in at)
    for name in ("shared", "socket"):
        grown = ratio(at[name, most]["ipc_ms"], at[name, 1]["ipc_ms"])
        figures.append(Headline(f"{name}: besides computing, {most} processes over 1", grown))
    return figures


FIG17 = Experiment(
    "caraserve-fig17",
    "Handing rows to processes over shared memory and over sockets, 16 tokens each",
    "CaraServe, Figure 17 (§7.4)",
    _transports,
    StackedBars((("busy_ms", "computing"), ("ipc_ms", "besides")), "panel", "way", "ms a prefill"),
    (_transport_figures,),
    (*NOTES, 'The paper\'s text has "less than 1 ms" for shared memory, and sockets linear in processes.'),
    devices=("cpu",),
)

_ONE_CORE, _SIDE_BY_SIDE = "one core, over tokens", "128 tokens, over cores"
_TOKENS = 128


def _cores(setup: Setup) -> GridResult:
    tokens = setup.pick((1, 4, 8, 16, 32, 64, 96, 128, 256), (4, 8, 16, 32, 64, 128), (4, 8))
    counts, most = setup.pick(((1, 2, 4, 8), _TOKENS), ((1, 2), _TOKENS), ((1, 2), 8))
    cases = [("shared", 1, number) for number in tokens]
    cases += [(name, count, most) for count in counts for name in ("shared", "threads")]
    single = len(tokens)
    found = _run(setup, cases, lambda row: _ONE_CORE)
    rows = [
        {**row, "panel": _ONE_CORE, "x": row["tokens"]}
        if place < single
        else {**row, "panel": _SIDE_BY_SIDE, "x": row["count"]}
        for place, row in enumerate(found.rows)
    ]
    return GridResult(found.settings, rows, [*_line(found.settings, rows), *_side_by_side(rows)])


def _line(settings: Row, rows: list[Row]) -> list[Headline]:
    """What a core takes, by a line through what it computed for each number of tokens."""
    from manylora_lab.pricing.fit import relative_fit

    single = [row for row in rows if row["panel"] == _ONE_CORE]
    layer_bytes = 2 * 3 * 2 * settings["rank"] * settings["hidden"]
    busy_s = [row["busy_ms"] * 1e-3 / settings["layers"] for row in single]
    fixed_s, token_s = relative_fit([(1.0, float(row["tokens"])) for row in single], busy_s)
    besides_ms = [row["ipc_ms"] / settings["layers"] for row in single]
    return [
        Headline("one core: us a product, whatever its tokens", round(1e6 * fixed_s, 1)),
        Headline("one core: us a product for each token", round(1e6 * token_s, 2)),
        Headline("one core: GFLOP/s at the most tokens",
                 round(layer_bytes * single[-1]["tokens"] / busy_s[-1] * 1e-9, 2)),
        Headline("one core: us besides computing, a hand-over", round(1e3 * min(besides_ms), 1)),
    ]  # fmt: skip


def _side_by_side(rows: list[Row]) -> list[Headline]:
    at = {(row["way"], row["count"]): row["ms"] for row in rows if row["panel"] == _SIDE_BY_SIDE}
    figures = []
    for name, count in at:
        figures.append(Headline(f"{name}: {count} over 1, ms", ratio(at[name, count], at[name, 1])))
    for count in sorted({count for _, count in at}):
        paper = PAPER_SPEEDUP if count == 8 else None
        found = ratio(at["threads", count], at["shared", count])
        figures.append(Headline(f"{count} cores: torch's threads over processes, ms", found, paper))
    return figures


FIG18 = Experiment(
    "caraserve-fig18",
    "What one core takes over tokens, and processes beside torch's threads",
    "CaraServe, Figure 18 (§7.4)",
    _cores,
    LinePanels("panel", "way", ("x", "tokens, or cores"), ("ms", "ms a prefill"), is_shared=False),
    (),
    NOTES,
    devices=("cpu",),
)

# ---------------------------------------------------------------- 16

_WAYS = {
    "no cold row": (None, False),
    "queued, shared": ("shared", False),
    "native, shared": ("shared", True),
    "native, socket": ("socket", True),
    "native, threads": ("threads", True),
}
"""How invoked, and by which way."""


def layer_times(tokens: int) -> LayerTimes:
    """Of Llama-2-7B on an A10, by arithmetic."""
    from manylora_lab.reproduce.assist_rig import LayerTimes

    costs = AnalyticalCosts(SHAPE, HARDWARE["a10"], launch_s=0.0)
    layer_s = costs.step_s(StepWork(0, tokens, tokens, 0, 0, tokens * (tokens + 1) // 2)) / SHAPE.layers
    return LayerTimes((1 - _QKV_SHARE) * layer_s, _QKV_SHARE * layer_s, EAGER_LAUNCH_S / SHAPE.layers)


def _invocations(setup: Setup) -> GridResult:
    from manylora_lab.reproduce.assist_rig import WAYS, beside_device

    pool, repeats = _pool(setup), setup.pick(15, 5, 1)
    sizes = setup.pick((16, 32, 64, 128, 256), (16, 64, 128), (4, 8))
    rows: list[Row] = []
    try:
        for name, (way_name, is_native) in _WAYS.items():
            way = None if way_name is None else WAYS[way_name](pool, 1)
            try:
                for tokens in sizes:
                    x, times = _inputs(pool, tokens), layer_times(tokens)
                    taken = [
                        beside_device(pool, way, x, times, is_native=is_native) for _ in range(repeats + 1)
                    ]
                    rows.append(
                        {"panel": "a prefill", "system": name, "tokens": tokens, "ms": _ms(min(taken[1:]))}
                    )
            finally:
                if way is not None:
                    way.close()
            setup.show(f"{len(rows) // len(sizes)} of {len(_WAYS)} timed")
        return GridResult(_settings(setup, pool, repeats), rows)
    finally:
        pool.close()


def _invocation_figures(rows: list[Row]) -> list[Headline]:
    at = {(row["system"], row["tokens"]): row["ms"] for row in rows}
    figures = []
    for tokens in sorted({tokens for _, tokens in at}):
        best, plain = at["queued, shared", tokens], at["no cold row", tokens]
        figures += [
            Headline(f"{tokens} tokens: queued against native",
                     change(best, at["native, shared", tokens]), PAPER_INVOCATION),
            Headline(f"{tokens} tokens: native over sockets against no cold row",
                     change(at["native, socket", tokens], plain), PAPER_UNOPTIMISED),
            Headline(f"{tokens} tokens: all together against native over sockets",
                     change(best, at["native, socket", tokens]), PAPER_PREFILL),
            Headline(f"{tokens} tokens: queued over no cold row", ratio(best, plain)),
        ]  # fmt: skip
    return figures


FIG16 = Experiment(
    "caraserve-fig16",
    "A prefill whose rows' products a CPU process computes, by how that is invoked",
    "CaraServe, Figure 16 (§7.4)",
    _invocations,
    LinePanels("panel", "system", ("tokens", "tokens"), ("ms", "ms")),
    (_invocation_figures,),
    (
        *NOTES,
        "A thread stands for the device: its kernels sleep for what an A10 takes by arithmetic, and to launch a "
        "layer's takes the host 94 us, as the simulator assumes of an eager engine (3 ms a step). So what queued "
        "gains over native follows from that assumption; the products are real, by one process.",
        "The paper's +79.4 % is of an invocation that is not optimised, its -57.9 % of all that it has together; "
        "its text has one number each (-16 %: at most), beside which ours stand for every size.",
    ),
    devices=("cpu",),
)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
