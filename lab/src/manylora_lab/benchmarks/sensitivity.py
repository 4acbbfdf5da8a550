"""How much the cache policy, and its numbers, matter: the engine's own policy in virtual time, no GPU.

Chat traces over 100 adapters on an assumed device (``manylora.pricing.costs``: Llama-2-7B in bfloat16 on an H200).
Nothing here is measured on a device; equal inputs give equal reports. From the repository's root:

    python -m manylora_lab.benchmarks.sensitivity --folder docs/results

It writes ``cache_sensitivity.json`` and ``.md`` there, in about ten minutes. ``--quick``: the first 60 turns and a
coarse grid, in half a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from manylora.config import CACHE_POLICIES, CacheConfig, PolicyConfig, parse_size
from manylora.pricing.costs import DeviceCosts
from manylora_lab.bench.provenance import Provenance, add_flags
from manylora_lab.sim.replay import Replay
from manylora_lab.sim.summary import Summary, summarize
from manylora_lab.workloads.chat import TRACES, Turn, read_turns, to_stream

NUM_ADAPTERS = 100
TOKEN_BYTES = 2**19  # K and V of one token: 32 layers, 2 x 4096 numbers of 2 bytes
RANK_BYTES = 2**21  # of one rank of an adapter on q, k, v, o
STEP_BASES_S = (6.3e-3, 6.5e-3, 6.7e-3)
"""Policies are compared by means over these: a saturated run depends by a percent on when each request comes."""
TAUS_S = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
WINDOWS_S = (10.0, 30.0, 60.0, 120.0, 300.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A trace at some speed on a device with some room."""

    trace_rps: int
    rate_scale: float = 1.0
    pool: str = "12.6GiB"

    @property
    def name(self) -> str:
        return f"{self.trace_rps * self.rate_scale:g}/s, {self.pool}"


WORKLOADS = (
    Workload(5),
    Workload(10),
    Workload(10, 1.5),
    Workload(20),
    Workload(20, 1.5),
    Workload(10, pool="6GiB"),
    Workload(20, pool="6GiB"),
)
GRID_WORKLOADS = (Workload(10), Workload(20), Workload(10, pool="6GiB"))


def simulate(
    workload: Workload,
    cache: CacheConfig,
    limit: int | None = None,
    step_bases_s: Sequence[float] = STEP_BASES_S[1:2],
) -> Summary:
    """One cell: mean figures over these assumed step times; ``limit`` turns of the trace (None: all)."""
    page_tokens = 32 if cache.policy == "static-lru" else 16
    page_bytes = page_tokens * TOKEN_BYTES
    config = PolicyConfig(
        num_pages=parse_size(workload.pool) // page_bytes,
        page_tokens=page_tokens,
        max_model_len=4096,
        max_num_seqs=64,
        max_batch_tokens=8192,
        num_host_pages=parse_size("48GiB") // page_bytes,
        page_bytes=page_bytes,
        cache=cache,
    )
    turns = read_turns(TRACES / f"chat_{workload.trace_rps}rps.jsonl.gz", limit)
    stream = to_stream(turns, ranks=ranks_of(turns)).with_rate(workload.rate_scale)
    pages = [pages_of(rank, page_bytes) for rank in stream.ranks]
    runs = []
    for step_base_s in step_bases_s:
        replay = Replay(stream, config, DeviceCosts(step_base_s=step_base_s), pages)
        replay.run()
        print(
            f"{workload.name}, {cache.policy}: {replay.num_events} events, "
            f"{1e6 * replay.handle_s / replay.num_events:.0f} us each",
            file=sys.stderr,
        )
        runs.append(summarize(replay))
    return {name: round(statistics.fmean(run[name] for run in runs), 4) for name in runs[0]}


def ranks_of(turns: Sequence[Turn]) -> list[int]:
    """Of all adapters that are served; the traces' even ones have rank 32, odd ones 64."""
    ranks = [64 if adapter % 2 else 32 for adapter in range(NUM_ADAPTERS)]
    for turn in turns:
        ranks[turn.adapter] = turn.rank
    return ranks


def pages_of(rank: int, page_bytes: int) -> int:
    """What an adapter takes."""
    return -(-rank * RANK_BYTES // page_bytes)


def compare_policies(workloads: Iterable[Workload], limit: int | None) -> dict[str, dict[str, Summary]]:
    """The summaries by workload and by policy."""
    return {
        workload.name: {
            policy: simulate(workload, CacheConfig(policy), limit, STEP_BASES_S) for policy in CACHE_POLICIES
        }
        for workload in workloads
    }


def sweep_fastlibra(
    workloads: Iterable[Workload], taus_s: Iterable[float], windows_s: Iterable[float], limit: int | None
) -> dict[str, dict[str, Summary]]:
    """The summaries by workload and by "tau x window"."""
    taus_s, windows_s = list(taus_s), list(windows_s)
    return {
        workload.name: {
            f"{tau_s:g} x {window_s:g}": simulate(
                workload, CacheConfig("fastlibra", tau_s=tau_s, window_s=window_s), limit
            )
            for tau_s in taus_s
            for window_s in windows_s
        }
        for workload in workloads
    }


def sweep_manylora(
    workloads: Iterable[Workload], agings_s: Iterable[float], limit: int | None
) -> dict[str, dict[str, Summary]]:
    """The summaries by workload and by aging constant."""
    agings_s = list(agings_s)
    return {
        workload.name: {
            f"{aging_s:g}": simulate(workload, CacheConfig("manylora", window_s=aging_s), limit)
            for aging_s in agings_s
        }
        for workload in workloads
    }


# ---------------------------------------------------------------- tables

COLUMNS = (
    ("TTFT mean ms", "ttft_mean_ms", ".1f"),
    ("p50", "ttft_p50_ms", ".1f"),
    ("p99", "ttft_p99_ms", ".1f"),
    ("TPOT ms", "tpot_mean_ms", ".2f"),
    ("done/s", "done_per_s", ".2f"),
    ("KV hit, device", "kv_hit_device", ".2f"),
    ("host", "kv_hit_host", ".2f"),
    ("adapter hit, device", "adapter_hit_device", ".2f"),
    ("host", "adapter_hit_host", ".2f"),
    ("preempted", "preemptions", ".0f"),
    ("pages in", "pages_in", ".0f"),
    ("out", "pages_out", ".0f"),
    ("invalid", "invalid_share", ".3f"),
)


def table_of(rows: dict[str, Summary], first: str) -> str:
    """Markdown."""
    lines = [
        "| " + " | ".join([first, *(title for title, _, _ in COLUMNS)]) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for name, summary in rows.items():
        cells = [format(summary[key], spec) for _, key, spec in COLUMNS]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def grid_of(cells: dict[str, Summary]) -> str:
    """Markdown: tau down, window across; mean TTFT ms, and the device's hits of KV and of adapters."""
    found = {tuple(name.split(" x ")): summary for name, summary in cells.items()}
    taus, windows = (list(dict.fromkeys(key[axis] for key in found)) for axis in (0, 1))
    lines = [
        "| tau s | " + " | ".join(f"window {window} s" for window in windows) + " |",
        "|---" * (len(windows) + 1) + "|",
    ]
    for tau in taus:
        row = [found[tau, window] for window in windows]
        cells_of_row = [
            f"{s['ttft_mean_ms']:.1f} ({s['kv_hit_device']:.2f}, {s['adapter_hit_device']:.2f})" for s in row
        ]
        lines.append(f"| {tau} | " + " | ".join(cells_of_row) + " |")
    return "\n".join(lines)


def page_of(report: dict[str, Any], command: str) -> str:
    """The whole document."""
    costs = ", ".join(f"{name} {value:g}" for name, value in report["costs"].items())
    parts = [
        "# Cache policies and their numbers, in virtual time",
        "**Simulated, not measured**: the engine's own policy code, event by event, on a device that only takes "
        f"time, with *assumed* costs ({costs}). Use it to compare policies, not to predict milliseconds.",
        f"    {command}",
        "Llama-2-7B's shape in bfloat16 (0.5 MiB of KV a token; an adapter of rank 32 is 64 MiB), 16 tokens a "
        "page (static-lru: 32), host pool 48 GiB, max_num_seqs 64, max_batch_tokens 8192, 100 adapters, all "
        "requested once before. The shipped chat traces; 15/s and 30/s are those of 10/s and 20/s, "
        "faster. Hits are shares of prompt tokens, and of admissions that need an adapter. Where requests queue "
        "(20/s on, and 6 GiB) runs with slightly different costs differ by about 1 %: less means nothing.",
        "## Policies",
        "Means of three runs, with steps of 6.3, 6.5 and 6.7 ms at least.",
    ]
    for workload, rows in report["policies"].items():
        parts += [f"### {workload}", table_of(rows, "policy")]
    parts += [
        "## FastLibra's tau and window",
        "The paper gives neither. One run each: mean TTFT in ms (KV hits on the device, adapter hits there).",
    ]
    for workload, cells in report["fastlibra"].items():
        parts += [f"### {workload}", grid_of(cells)]
    parts += ["## manylora's aging", "One run each."]
    for workload, rows in report["manylora"].items():
        parts += [f"### {workload}", table_of(rows, "aging s")]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where to write the report")
    parser.add_argument("--quick", action="store_true", help="60 turns of each trace, a coarse grid")
    add_flags(parser)
    args = parser.parse_args()
    recording = Provenance.of(args, "none: the traces are stored")
    if not args.folder.is_dir():
        parser.error(f"--folder {args.folder}: there is no such folder")
    limit = 60 if args.quick else None
    taus_s, windows_s = (TAUS_S[::3], WINDOWS_S[::2]) if args.quick else (TAUS_S, WINDOWS_S)
    report: dict[str, Any] = {
        "costs": {**dataclasses.asdict(DeviceCosts()), "step_base_s": STEP_BASES_S[1]},
        "policies": compare_policies(WORKLOADS, limit),
        "fastlibra": sweep_fastlibra(GRID_WORKLOADS, taus_s, windows_s, limit),
        "manylora": sweep_manylora(GRID_WORKLOADS, (*TAUS_S[:1], 5.0, *WINDOWS_S), limit),
    }
    report["provenance"] = recording.provenance()
    quick = " --quick" if args.quick else ""
    page = page_of(report, f"python -m manylora_lab.benchmarks.sensitivity{quick} --folder docs/results")
    (args.folder / "cache_sensitivity.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.folder / "cache_sensitivity.md").write_text(page)


if __name__ == "__main__":
    main()
