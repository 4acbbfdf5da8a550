"""CaraServe's Figures 19 and 20: its rank-aware scheduler beside others (§7.5)."""

from __future__ import annotations

from manylora_lab.reproduce.caraserve_cells import (
    MEASURED,
    NOTES,
    PRINTED,
    SCHEDULERS,
    ServersCase,
    lines_of,
    measure,
    slo_s,
    speed_of,
)
from manylora_lab.reproduce.drawing import BarPanels
from manylora_lab.reproduce.experiment import Experiment, GridResult, Setup
from manylora_lab.reproduce.parts import run_cases
from manylora_lab.reproduce.report import Headline, Row, change
from manylora_lab.sim.device import Kernel

PAPER_CHANGES = {"most-idle": -0.161, "random": -0.188, "first-fit": -0.364}
"""§7.5, MBGMV: the average time per token against each."""
PAPER_ATTAINMENT = {"mbgmv": 0.99, "bgmv": 0.99}
PAPER_BEST_CHANGE = {"bgmv": -0.360}
"""§7.5: "up to" so much, for BGMV."""
PAPER_TESTBED_ATTAINMENT = 0.80
_DRAW = BarPanels(
    (
        ("slo_attainment", "within the objective"),
        ("tpot_mean_ms", "time per token, ms"),
        ("ttft_mean_ms", "time to first token, ms"),
    ),
    "servers",
    "scheduler",
)
_TIMES = (PRINTED, MEASURED)


def _run(setup: Setup, cases: list[ServersCase]) -> list[Row]:
    found = run_cases(measure, cases, setup)
    return [
        {
            "servers": f"{case.kernel}, {case.times}", "kernel": case.kernel, "times": case.times,
            "scheduler": case.scheduler, **row,
        }
        for case, row in found.items()
    ]  # fmt: skip


def _settings(setup: Setup, case: ServersCase, kernels: tuple[Kernel, ...]) -> Row:
    """``times``: of each kind of servers, the objective, the requests a second, and the scheduler's lines."""
    times = {}
    for name in _TIMES:
        fitted = {}
        for kernel in kernels:
            lines = lines_of(kernel, name)
            line = lines.mbgmv if kernel == "mbgmv" else lines.bgmv
            fitted[kernel] = {"slope_s": line.slope_s, "base_s": line.base_s, "r2": line.r2}
        times[name] = {
            "slo_tpot_s": round(slo_s(name), 6), "rate_per_s": round(case.rate * speed_of(name), 2),
            "lines": fitted,
        }  # fmt: skip
    return {
        "scale": setup.scale, "seed": setup.seed, "servers": case.servers, "functions": case.functions,
        "duration_s": case.duration_s, "times": times,
    }  # fmt: skip


def _simulation(setup: Setup) -> GridResult:
    kernels: tuple[Kernel, ...] = ("mbgmv", "bgmv")
    servers, functions, rate = setup.pick((60, 40_000, 340.0), (60, 40_000, 340.0), (6, 400, 34.0))
    duration_s = setup.pick(300.0, 12.0, 4.0)
    cases = [
        ServersCase(kernel, scheduler, servers, functions, rate, duration_s, setup.seed, times=times)
        for times in _TIMES
        for kernel in kernels
        for scheduler in SCHEDULERS
    ]
    return GridResult(_settings(setup, cases[0], kernels), _run(setup, cases))


def _testbed(setup: Setup) -> GridResult:
    requests = setup.pick(1200, 1200, 100)
    cases = [
        ServersCase(
            "bgmv", scheduler, 8, 40_000 if setup.scale != "smoke" else 400, 60.0, 60.0, setup.seed, requests,
            times,
        )
        for times in _TIMES
        for scheduler in SCHEDULERS
    ]  # fmt: skip
    return GridResult(_settings(setup, cases[0], ("bgmv",)), _run(setup, cases))


def _of(rows: list[Row], kernel: str, times: str) -> dict[str, Row]:
    return {row["scheduler"]: row for row in rows if (row["kernel"], row["times"]) == (kernel, times)}


def _name(what: str, times: str) -> str:
    """What stands beside the paper's figures keeps its name."""
    return what if times == PRINTED else f"{times}: {what}"


def _attained(rows: list[Row]) -> list[Headline]:
    return [
        Headline(
            _name(f"{kernel}, {name}: within the objective", times),
            row["slo_attainment"],
            PAPER_ATTAINMENT[kernel] if (name, times) == ("caraserve", PRINTED) else None,
        )
        for times in _TIMES
        for kernel in ("mbgmv", "bgmv")
        for name, row in _of(rows, kernel, times).items()
    ]


def _faster(rows: list[Row]) -> list[Headline]:
    kinds = [(kernel, times) for times in _TIMES for kernel in ("mbgmv", "bgmv")]
    return [figure for kernel, times in kinds for figure in _faster_on(rows, kernel, times)]


def _faster_on(rows: list[Row], kernel: str, times: str) -> list[Headline]:
    """The time per token of the paper's scheduler, and of ours."""
    of, is_printed = _of(rows, kernel, times), times == PRINTED
    changes = {
        name: change(of["caraserve"]["tpot_mean_ms"], of[name]["tpot_mean_ms"]) for name in PAPER_CHANGES
    }
    figures = []
    for name, value in changes.items():
        paper = PAPER_CHANGES[name] if kernel == "mbgmv" and is_printed else None
        figures.append(
            Headline(_name(f"{kernel}: time per token, caraserve against {name}", times), value, paper)
        )
    if kernel in PAPER_BEST_CHANGE and is_printed:
        most = min(value for value in changes.values() if value is not None)
        figures.append(Headline(f"{kernel}: the most of these", most, PAPER_BEST_CHANGE[kernel]))
    ours = change(of["manylora"]["tpot_mean_ms"], of["caraserve"]["tpot_mean_ms"])
    figures.append(Headline(_name(f"{kernel}: time per token, manylora against caraserve", times), ours))
    return figures


def _testbed_attained(rows: list[Row]) -> list[Headline]:
    return [
        Headline(
            _name(f"{row['scheduler']}: within the objective", row["times"]),
            row["slo_attainment"],
            PAPER_TESTBED_ATTAINMENT if (row["scheduler"], row["times"]) == ("caraserve", PRINTED) else None,
        )
        for row in rows
    ]


FIG19 = Experiment(
    "caraserve-fig19",
    "Schedulers over 60 servers: requests within the objective, and the time per token",
    "CaraServe, Figure 19 (§7.5)",
    _simulation,
    _DRAW,
    (_attained, _faster),
    NOTES,
    is_stored=True,
)

FIG20 = Experiment(
    "caraserve-fig20",
    "Schedulers over 8 servers: requests within the objective, and the time per token",
    "CaraServe, Figure 20 (§7.5)",
    _testbed,
    _DRAW,
    (_testbed_attained,),
    (*NOTES, "The paper's is a testbed of 8 A10; this one is simulated."),
    is_stored=True,
)
