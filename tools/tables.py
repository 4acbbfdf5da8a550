"""Tables and whole pages that are written from one record, as ``tools.figures`` puts them into pages.

Each function takes a record as JSON gives it and returns Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from manylora_lab.benchmarks import plot_reality
from manylora_lab.reproduce import fastlibra_seeds, fastlibra_table_text
from manylora_lab.reproduce.report import ExperimentReport, Headline
from manylora_lab.sim.ablation import FEATURES

from tools import aims_tables

Record = Any
Row = dict[str, Any]

POPULARITIES = ("distinct", "uniform", "skewed", "identical")
PRODUCTS = {"qkv": "qkv", "o": "o", "gate_up": "gate and up", "down": "down", "head": "head"}
SMALL = {
    "add_rms_norm": "add and RMSNorm",
    "silu_mul": "SiLU and product",
    "rotate_and_store": "rope and KV write",
}
POLICIES = ("manylora", "fastlibra", "lru", "static-lru", "s-lora", "cached")


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Markdown, without a line's end at the end."""
    rows = [f"| {' | '.join(line)} |" for line in (header, *lines)]
    return "\n".join([rows[0], "|" + "---|" * len(header), *rows[1:]])


def kernels_lora(record: Record) -> str:
    """A table for each rank: microseconds over the floor by batch and popularity."""
    rows = [row for row in record["rows"] if row["kernel"] == "lora" and "prompt" not in row]
    blocks = []
    for rank in dict.fromkeys(row["rank"] for row in rows):
        cells = {(row["batch"], row["popularity"]): row for row in rows if row["rank"] == rank}
        batches = dict.fromkeys(batch for batch, _ in cells)
        lines = [(f"{batch}", *(_over_floor(cells[batch, one]) for one in POPULARITIES)) for batch in batches]
        blocks += [f"Rank {rank}:", table(("batch", *POPULARITIES), lines)]
    return "\n\n".join(blocks)


def kernels_products(record: Record) -> str:
    rows = [row for row in record["rows"] if row["kernel"] == "linear"]
    cells = {(row["batch"], row["product"]): row for row in rows}
    batches = dict.fromkeys(batch for batch, _ in cells)
    lines = [(f"{batch}", *(_over_floor(cells[batch, one]) for one in PRODUCTS)) for batch in batches]
    return table(("batch", *PRODUCTS.values()), lines)


def kernels_attention(record: Record) -> str:
    rows = [row for row in record["rows"] if row["kernel"] in ("decode", "prefill")]
    lines = [(f"{row['kernel']}, {row['batch']} x {row['rows']}", _over_floor(row)) for row in rows]
    return table(("", "us / floor"), lines).replace("|  |", "| |", 1)


def kernels_small(record: Record) -> str:
    cells = {(row["tokens"], row["kernel"]): row for row in record["rows"] if row["kernel"] in SMALL}
    sizes = dict.fromkeys(tokens for tokens, _ in cells)
    lines = [(f"{tokens}", *(_over_floor(cells[tokens, one]) for one in SMALL)) for tokens in sizes]
    return table(("tokens", *SMALL.values()), lines)


def _over_floor(row: Mapping[str, float]) -> str:
    """Microseconds / floor (= ratio, where below ten)."""
    time, floor = f"{row['us']:.3g}", row["floor_us"]
    if row["ratio"] >= 10:
        return f"{time} / {floor:.2g}"
    return f"{time} / {floor:.3g} = {row['ratio']:.2g}"


def policy_overhead(record: Record) -> str:
    header = (
        "nodes",
        "policy",
        "host pool",
        "match + update, mean / p99 ms",
        "decision, mean / median / max ms",
    )
    lines = [
        (
            f"{row['nodes']:,}", row["policy"], "yes" if row["host_pool"] else "no",
            f"{row['request_mean_ms']:.3f} / {row['request_p99_ms']:.3f}",
            " / ".join(f"{row[f'decision_{what}_ms']:.2f}" for what in ("mean", "median", "max")),
        )
        for row in sorted(record["rows"], key=lambda row: row["nodes"])
    ]  # fmt: skip
    return table(header, lines)


def simulator_speed(record: Record) -> str:
    header = (
        "code", "requests", "virtual s", "wall s", "CPU s", "times real time by the clock", "by CPU time",
        "events", "us an event", "most memory, MiB (before the replay)",
    )  # fmt: skip
    lines = [
        (
            f"{_code(run)}, {run['commit']}", f"{run['requests']:,}", f"{run['virtual_s']:,.0f}",
            f"{run['wall_s']:.0f}", f"{run['cpu_s']:.0f}", f"{run['times_real_time']:.0f}",
            f"{run['times_real_time_by_cpu']:.0f}", f"{run['events']:,}", f"{run['cpu_us_per_event']:.0f}",
            f"{run['most_memory_mib']:.0f} ({run['of_it_before_the_replay_mib']:.0f})",
        )
        for run in record["runs"]
    ]  # fmt: skip
    return table(header, lines)


def _code(run: Row) -> str:
    if "code" in run:
        return str(run["code"])
    return "compiled" if "compiled" in run["interpreter"] else "as it is"


def npu_bandwidth_half(record: Record) -> str:
    return _npu_bandwidth(record, 0.5)


def npu_bandwidth_most(record: Record) -> str:
    return _npu_bandwidth(record, 0.9)


def _npu_bandwidth(record: Record, share: float) -> str:
    header = (
        "scenario", "TB/s", "peak found, /s", "`manylora` ms", "`fastlibra`", "`lru`", "`static-lru`", "`s-lora`",
        "`cached`", "`fastlibra` over `static-lru`", "over `s-lora`", "`manylora` over `fastlibra`",
        "TPOT over `static-lru`, over `s-lora`",
    )  # fmt: skip
    lines = []
    for peak in record["peaks"]:
        place = (peak["scenario"], peak["hardware"], share)
        of = {
            row["policy"]: row
            for row in record["rows"]
            if (row["scenario"], row["hardware"], row["share"]) == place
        }
        ttft = {policy: of[policy]["ttft_mean_ms"] for policy in POLICIES}
        tpot = {policy: of[policy]["tpot_mean_ms"] for policy in POLICIES}
        found = peak["hardware"].removeprefix("fastlibra-npu").lstrip("-")
        lines.append(
            (
                peak["scenario"], f"{int(found or 1200) / 1000:g}", f"{peak['fastlibra_per_s']:g}",
                *(f"{ms:,.0f}" if ms >= 1000 else f"{ms:.1f}" for ms in ttft.values()),
                *(f"{ttft['fastlibra'] / ttft[other]:.2f}" for other in ("static-lru", "s-lora")),
                f"{ttft['manylora'] / ttft['fastlibra']:.2f}",
                ", ".join(f"{tpot['fastlibra'] / tpot[other]:.2f}" for other in ("static-lru", "s-lora")),
            )
        )  # fmt: skip
    return table(header, lines)


def h200_shapes(record: Record) -> str:
    header = (
        "shape", "base tokens/s", "64 mixed adapters tokens/s", "ratio", "ratio by bytes alone",
        "base: mean step / floor ms", "mixed: mean step / floor ms", "adapter read ms",
    )  # fmt: skip
    lines = [
        (
            shape, f"{of['base']['tokens_per_s']:.0f}", f"{of['mixed']['tokens_per_s']:.0f}",
            f"{of['mixed_over_base_tokens']:.2f}", f"{of['floor_ratio']:.2f}",
            _step_over_floor(of["base"]), _step_over_floor(of["mixed"]), f"{of['adapter_read_ms_mean']:.0f}",
        )
        for shape, of in record["shapes"].items()
    ]  # fmt: skip
    return table(header, lines)


def _step_over_floor(of: Mapping[str, float]) -> str:
    return f"{of['mean_step_ms']:.1f} / {of['floor_step_ms']:.2f} = {of['step_over_floor']:.2f} x"


def chat_policies(record: Record) -> str:
    """The runs of one rate, measured and simulated, the fastest first."""
    header = ["policy"]
    for what in ("mean TTFT ms", "p99", "TPOT ms", "done per s"):
        header += [f"{what}, measured", "simulated"]
    runs = sorted(record["runs"], key=lambda run: run["summary"]["ttft_ms"]["mean"])
    lines = []
    for run in runs:
        cells = [run["policy"]]
        for (*keys, digits), given in zip(_CHAT, _CHAT_SIMULATED, strict=True):
            measured: Any = run["summary"]
            for key in keys:
                measured = measured[key]
            simulated = record["simulated"]["results"][run["policy"]][given]
            cells += [_chat_number(value, int(digits)) for value in (measured, simulated)]
        lines.append(cells)
    return table(header, lines)


_CHAT: tuple[tuple[str, ...], ...] = (
    ("ttft_ms", "mean", "1"), ("ttft_ms", "p99", "0"), ("tpot_ms", "mean", "2"), ("done_per_s", "2"),
)  # fmt: skip
_CHAT_SIMULATED = ("ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms", "done_per_s")


def _chat_number(value: float, digits: int) -> str:
    return f"{value:.{digits if value < 100 else 0}f}"


def reality_rates(record: Record) -> str:
    return plot_reality.lines_of(record["comparison"]).partition("\n\n")[0]


def reality_runs(record: Record) -> str:
    return plot_reality.lines_of(record["comparison"]).partition("\n\n")[2]


def fastlibra_table(record: Record) -> str:
    fields = {name: record[name] for name in ("experiment", "title", "settings", "rows")}
    headline = [Headline(one["metric"], one["ours"], one["paper"]) for one in record["headline"]]
    return fastlibra_table_text.markdown(
        ExperimentReport(**fields, headline=headline, notes=tuple(record["notes"]))
    )


def seeds(record: Record) -> str:
    """A table for each load: what each policy takes at each rate, and how far ``manylora`` is from it."""
    blocks = []
    for case in dict.fromkeys(row["case"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["case"] == case]
        shares = sorted({row["share"] for row in rows} - {0.0})
        by = {(row["policy"], row["share"]): row for row in rows}
        simple = rows[0]["best_simple"]
        lines = []
        for policy in dict.fromkeys(row["policy"] for row in rows):
            whole = by[policy, 0.0]
            invalid = whole["invalid_share"]
            lines.append(
                (
                    f"`{policy}`",
                    *(f"{by[policy, share]['ttft_mean_ms']:,.1f}" for share in shares),
                    _against(
                        by, policy, simple, shares
                    ),  # the record's own has four digits, and rounds twice
                    "" if policy == "manylora" else _against(by, "manylora", policy, shares),
                    "-" if invalid is None else f"{100 * invalid:.1f}",
                    f"{whole['adapter_reads']:,.0f}",
                )
            )
        header = ("policy", *(f"{share:g} of the peak" for share in shares), f"all, against `{simple}`, %")
        blocks += [f"{case}:", table((*header, "`manylora` against it, %", "invalid KV, %", "reads"), lines)]
    return "\n\n".join(blocks)


def ablation(record: Record) -> str:
    """What each feature of ``manylora`` does: taken from the whole, and added to one LRU."""
    by = {(row["policy"], row["share"]): row for row in record["rows"]}
    shares = sorted({share for _, share in by} - {0.0})
    if not by:
        return table(("feature",), [])
    lines = [
        (
            name,
            _against(by, f"manylora-{name}", "manylora", shares),
            _against(by, f"lru+{name}", "lru", shares),
        )
        for name in FEATURES
    ]
    lines.append(("all seven", "", _against(by, "manylora", "lru", shares)))
    return table(("feature", "`manylora` without it, %", "`lru` with it, %"), lines)


def _against(by: Mapping[tuple[str, float], Row], ours: str, other: str, shares: Sequence[float]) -> str:
    mine, theirs = ([by[policy, share]["ttft_ms_by_seed"] for share in shares] for policy in (ours, other))
    return _change(fastlibra_seeds.mean_change(mine, theirs), fastlibra_seeds.interval(mine, theirs))


def _change(change: float, interval: Sequence[float]) -> str:
    """In percent."""
    low, high = interval
    return f"{100 * change:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def router_proof(record: Record) -> str:
    """Cells with reports as old as usual: ours, the best other's and its name, the bound, perfect knowledge."""
    header = (
        "workload, load", "seeds", "others", "mean TTFT: ours; the best other's, ms", "change, %",
        "attainment: ours; the best other's", "bound, ms", "`clairvoyant`, ms",
    )  # fmt: skip
    lines = [
        (
            f"{cell['workload']}, {cell['load']:g}", _range(cell["seeds"]), f"{len(cell['routers']) - 1}",
            f"{cell['ttft_ms']:,.0f}; {cell['best_ttft_ms']:,.0f} (`{cell['best_ttft']}`)",
            _kept(f"{100 * cell['ttft_change']:+.0f}", cell["is_ttft_kept"]),
            _kept(
                f"{cell['attainment']:.3f}; {cell['best_attainment']:.3f} (`{cell['best_met']}`)",
                cell["is_attainment_kept"],
            ),
            f"{cell['bound_ttft_ms']:,.0f}",
            f"{cell['clairvoyant_ttft_ms']:,.0f}" if "clairvoyant_ttft_ms" in cell else "-",
        )
        for cell in _cells(record)
        if cell["delay_s"] == 0.05
    ]  # fmt: skip
    return table(header, lines)


def router_proof_delays(record: Record) -> str:
    """The same cells with reports of other ages: the change of mean TTFT, and both attainments."""
    cells = {(cell["workload"], cell["load"], cell["delay_s"]): cell for cell in _cells(record)}
    delays = sorted({delay for _, _, delay in cells} - {0.05})
    lines = []
    for workload, load in dict.fromkeys((workload, load) for workload, load, _ in cells):
        line = [f"{workload}, {load:g}"]
        for delay in delays:
            cell = cells.get((workload, load, delay))
            if cell is None:
                line.append("not run")
                continue
            change = _kept(f"{100 * cell['ttft_change']:+.0f} %", cell["is_ttft_kept"])
            met = f"{cell['attainment']:.3f}; {cell['best_attainment']:.3f}"
            line.append(f"{change}; {_kept(met, cell['is_attainment_kept'])} ({_range(cell['seeds'])})")
        lines.append(line)
    return table(("workload, load", *(f"{1e3 * delay:,.0f} ms old" for delay in delays)), lines)


def _cells(record: Record) -> list[Row]:
    order = list(dict.fromkeys(cell["workload"] for cell in record["cells"]))
    return sorted(record["cells"], key=lambda cell: (order.index(cell["workload"]), cell["load"]))


def _range(seeds: Sequence[int]) -> str:
    return f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"


def _kept(text: str, is_pinned: bool) -> str:
    """What does not hold is printed bold."""
    return text if is_pinned else f"**{text}**"


def router_attainment(record: Record) -> str:
    """Cells whose attainment does not hold: how many meet the objective, by how many ran with them."""
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in record["rows"]:
        cells.setdefault((row["workload"], row["load"], row["delay_s"], row["seed"]), []).append(row)
    lines = []
    for (workload, load, delay, seed), (ours, other) in cells.items():
        bands = zip(_by_company(ours), _by_company(other))
        lines.append(
            (
                f"{workload}, {load:g}, {1e3 * delay:,.0f} ms", f"{seed}", f"{ours['requests']:,}",
                f"{ours['met']}; {other['met']} (`{other['router']}`)",
                *(f"{mine}; {theirs}" for mine, theirs in bands),
            )
        )  # fmt: skip
    header = (
        "workload, load, age of reports", "seed", "requests", "within: ours; the best other's",
        "of those with fewer than 10", "with 10 to 20", "with 20 and more",
    )  # fmt: skip
    return table(header, lines)


def _by_company(row: Row) -> list[str]:
    """Below 10 sequences, below 20, and the rest."""
    found = [[0, 0], [0, 0], [0, 0]]
    for band in row["by_company"]:
        place = min(band["from"] // 10, 2)
        found[place][0] += band["met"]
        found[place][1] += band["requests"]
    return [f"{met} of {requests:,}" for met, requests in found]


def router_speed(record: Record) -> str:
    """What a decision takes by the clock, a report for each adapter in it, and what the router has allocated."""
    lines = [
        (
            f"`{row['router']}`", f"{row['replicas']:,} x {row['adapters']:,}",
            *(f"{row['asked_us'][which]:.0f}" for which in ("p50", "p99", "p999")),
            f"{row['asked_cpu_us']['p99']:.0f}", f"{row['report_us_per_changed_adapter']['p99']:.1f}",
            f"{row['memory_mib']:.0f}" if "memory_mib" in row else "-",
        )
        for row in record["rows"]
    ]  # fmt: skip
    header = (
        "router", "replicas x adapters", "decision, us: p50", "p99", "p99.9", "p99 by CPU time",
        "a report, us for each changed adapter: p99", "MiB",
    )  # fmt: skip
    return table(header, lines)


COLD_MODES = ("wait", "block", "layerwise", "cpu", "auto")


def cold_cells(record: Record) -> str:
    """Milliseconds to the first token by link, rank, prompt and mode."""
    runs = record["runs"]
    ms = {(*_cell(row), row["mode"]): row["ms"] for run in runs for row in run["modes"]}
    lines = []
    for cell in (row for run in runs for row in run["cells"]):
        link, rank, prompt = _cell(cell)
        times = (f"{ms[link, rank, prompt, mode]:.1f}" for mode in COLD_MODES)
        shown = f"{link:g}" if link else "as it is"
        lines.append((shown, str(rank), str(prompt), *times, f"{cell['auto_over_best']:.2f}"))
    modes = (f"`{mode}`" for mode in COLD_MODES)
    return table(("link, GB/s", "rank", "prompt", *modes, "`auto` over the best other"), lines)


def _cell(row: Row) -> tuple[Any, Any, Any]:
    return row["link_gb_s"], row["rank"], row["prompt"]


def cold_default(record: Record) -> str:
    """Milliseconds to the first token by run, rank and where the adapter is; the ratio of each turn's medians."""
    lines = []
    for run in record["runs"]:
        if run["name"] not in ("turns", "sets", "warm"):
            continue
        ms = {(row["rank"], row["kind"], row["mode"]): row["ms"] for row in run["first"]}
        for row in run["compared"]:
            wait, auto = (f"{ms[row['rank'], row['kind'], mode]:.2f}" for mode in ("wait", "auto"))
            low, high = row["interval"]
            over = f"{row['of_turns']:.3f} ({low:.3f} to {high:.3f})"
            device = run["device"].removeprefix("NVIDIA ").partition(" ")[0]
            lines.append((run["name"], device, row["kind"], str(row["rank"]), wait, auto, over))
    lines.sort(key=lambda line: (line[2] == "on the device", line[2], int(line[3])))
    return table(("run", "GPU", "its adapter", "rank", "`wait`", "`auto`", "`auto` over `wait`"), lines)


def adapter_reads(record: Record) -> str:
    """Milliseconds of reads by single calls and by loops, of an adapter's own files and of its packed one."""
    ways, own = ("calls", "loops"), record["reads"][-1]["job_bytes"]
    cores = record["provenance"][0]["machine"]["cores"]
    reads = [row for row in record["reads"] if row["job_bytes"] == own and row["helpers"] < cores]
    found = {(row["dtype"], row["rank"], row["helpers"], row["by"]): row for row in reads}
    lines = []
    for dtype, rank, helpers in dict.fromkeys(place[:3] for place in found):
        times = (f"{found[dtype, rank, helpers, by][key]:.1f}" for key in ("ms", "beside_ms") for by in ways)
        lines.append((f"its files, {dtype}", str(rank), str(helpers), *times))
    for run in record["runs"]:
        least = (min(row["ms"] for row in run["runs"] if row["by"] == by) for by in ways)
        packed = "packed, the best", str(run["rank"]), "3 to 11"
        lines.append((*packed, *(f"{ms:.1f}" for ms in least), "-", "-"))
    beside = "calls, beside a thread of Python", "loops, likewise"
    return table(("what is read", "rank", "helpers", *ways, *beside), lines)


def aims(record: Record) -> str:
    """Workloads beside floors, vLLM and the aims."""
    return table(aims_tables.COLUMNS, aims_tables.lines(record))


def aims_moments(record: Record) -> str:
    """Where a first token's time goes."""
    return table(("", *aims_tables.MOMENTS.values()), aims_tables.moments(record))


TABLES: dict[str, Callable[[Record], str]] = {
    "aims": aims,
    "aims-moments": aims_moments,
    "adapter-reads": adapter_reads,
    "cold-cells": cold_cells,
    "cold-default": cold_default,
    "seeds": seeds,
    "ablation": ablation,
    "kernels-lora": kernels_lora,
    "kernels-products": kernels_products,
    "kernels-attention": kernels_attention,
    "kernels-small": kernels_small,
    "policy-overhead": policy_overhead,
    "simulator-speed": simulator_speed,
    "npu-bandwidth-half": npu_bandwidth_half,
    "npu-bandwidth-most": npu_bandwidth_most,
    "h200-shapes": h200_shapes,
    "chat-policies": chat_policies,
    "reality-rates": reality_rates,
    "reality-runs": reality_runs,
    "router-proof": router_proof,
    "router-proof-delays": router_proof_delays,
    "router-attainment": router_attainment,
    "router-speed": router_speed,
}

PAGES: dict[str, tuple[str, Callable[[Record], str]]] = {
    "docs/results/fastlibra-table.md": ("fastlibra-table.json", fastlibra_table),
    "docs/results/fastlibra-table-h200.md": ("fastlibra-table-h200.json", fastlibra_table),
}
"""Pages that are written as a whole: page, record, function."""
