"""Tables of ``h200_aims``: what workloads gave over its repeats, beside floors, vLLM's figures and the aims."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

Record = Any
Row = dict[str, Any]
Line = tuple[str, ...]

OFFLINE = (
    ("some", 32, None, "1,000 requests at once, 32 sequences, no LoRA, tokens/s"),
    ("some", 32, "identical", "the same, one adapter of rank 16"),
    ("some", 32, "skewed", "skewed"),
    ("some", 32, "uniform", "uniform"),
    ("many", 32, "distinct", "distinct: 128 adapters"),
    ("wide", 128, None, "128 sequences, no LoRA"),
    ("wide", 128, "distinct", "128 sequences, distinct"),
)
"""Run, sequences, popularity, and what it is called."""

MANY_AIM = 0.95
FIRST_FLOORS = {"no adapter": "about 3.5", "warm adapter": "about 3.5", "adapter in host memory": "5"}
CHAT = {
    2.0: (("ttft_ms/mean", 18.0), ("tpot_ms/mean", 4.3)),
    10.0: (("ttft_ms/mean", 35.0), ("ttft_ms/p99", 150.0), ("tpot_ms/mean", 7.0)),
    20.0: (("ttft_ms/mean", 300.0), ("done_per_s", 19.0)),
}
"""By requests a second: figures of the summary and their aims."""

MIXED_ROWS = 64
MIXED = {
    "base": "64 requests at once, 128 tokens in and 256 out, no LoRA, tokens/s",
    "mixed": "the same, 64 adapters of ranks 8 to 64",
}
"""By kind of the part of that name. Its floor is that of its mean step of decoding."""

FIGURES = {
    "ttft_ms/mean": "TTFT mean, ms", "ttft_ms/p99": "TTFT p99, ms", "tpot_ms/mean": "TPOT mean, ms",
    "done_per_s": "requests done a second",
}  # fmt: skip
COLUMNS = ("what", "floor", "vLLM 0.26", "manylora", "aim", "")

MOMENTS = {
    "read": "asked to read", "was read": "read",
    "issue": "step issued from", "issued": "to", "computed": "computed", "delivered": "delivered",
}  # fmt: skip
OF_READS = ("read", "was read")
"""Of an adapter that was never read alone. Copies are not: the record does not tell the adapter's own from
those of what leaves the device meanwhile."""


def lines(record: Record) -> Iterator[Line]:
    """The table's, after ``COLUMNS``."""
    runs = {run["name"]: run for run in record["runs"]}
    yield from _offline(runs)
    for row in runs["rest"]["prefill"]:
        what = (
            "8 prompts of 2,000 tokens, no LoRA, prompt tokens/s"
            if row["kind"] is None
            else "the same, 8 adapters of rank 16"
        )
        yield _line(
            what, _number(row["floor"]), _number(row["vllm"]), [row["tokens_per_s"]], row["aim"], more=True
        )
    for kind in dict.fromkeys(row["kind"] for row in runs["rest"]["first"]):
        rows = [row for row in runs["rest"]["first"] if row["kind"] == kind]
        vllm = rows[0]["vllm_ms"]
        what = (
            f"one request of 64 tokens, first token, {kind}, ms"
            if kind == "no adapter"
            else f"the same, {kind}"
        )
        yield _line(
            what, FIRST_FLOORS.get(kind, "-"), "-" if vllm is None else f"{vllm:.1f}", [row["ms"] for row in rows],
            rows[0]["aim_ms"], more=False, spec=".1f",
        )  # fmt: skip
    for rate, figures in CHAT.items():
        rows = [row for row in runs["chat"]["chat"] if row["offered_per_s"] == rate]
        for figure, aim in figures:
            name, _, part = figure.partition("/")
            values = [row["summary"][name][part] if part else row["summary"][name] for row in rows]
            told = rows[0]["vllm"].get(f"{name.removesuffix('_ms')}_{part}_ms") if part else None
            spec = ".2f" if name == "tpot_ms" else ".1f"
            what, vllm = (
                f"chat at {rate:g} requests/s: {FIGURES[figure]}",
                "-" if told is None else f"{told:{spec}}",
            )
            yield _line(what, "-", vllm, values, aim, more=not part, spec=spec)
    by_http = [
        row["summary"]["ttft_ms"]["mean"] for row in runs["rest"]["http"] if row["offered_per_s"] == 2.0
    ]
    yield _line(
        "the same at 2 requests/s over HTTP: TTFT mean, ms", "-", "-", by_http, None, more=False, spec=".1f"
    )
    for kind, what in MIXED.items():
        rows = [row for row in runs["rest"]["mixed"] if row["kind"] == kind]
        floor = 1e3 * MIXED_ROWS / rows[0]["floor_step_ms"]
        yield _line(what, f"{floor:,.0f}", "-", [row["tokens_per_s"] for row in rows], None, more=True)


def moments(record: Record) -> Iterator[Line]:
    """Milliseconds after the request, means over repeats, by where its adapter was."""
    (rest,) = (run for run in record["runs"] if run["name"] == "rest")
    for kind in dict.fromkeys(row["kind"] for row in rest["first"]):
        rows = [row["moments_ms"] for row in rest["first"] if row["kind"] == kind]
        left_out = () if kind == "adapter never read" else OF_READS
        yield (
            kind,
            *(
                "" if name in left_out else f"{statistics.fmean(row[name] for row in rows):.2f}"
                for name in MOMENTS
            ),
        )


def _offline(runs: dict[str, Any]) -> Iterator[Line]:
    for name, sequences, popularity, what in OFFLINE:
        rows = [
            row for row in runs[name]["offline"]
            if (row["max_num_seqs"], row["popularity"]) == (sequences, popularity)
        ]  # fmt: skip
        values, first = [row["tokens_per_s"] for row in rows], rows[0]
        yield _line(what, _number(first["floor"]), _number(first["vllm"]), values, first["aim"], more=True)
        if name == "many":
            many = [row["tokens_per_s"] for row in runs[name]["many"]]
            share = statistics.fmean(many) / statistics.fmean(values)
            reached = "reached" if share >= MANY_AIM else "missed"
            found = f"{_range(many, ',.0f')}, {100 * share:.1f} % of distinct over 128"
            yield (
                "distinct over 1,000 adapters in host memory",
                "-",
                "-",
                found,
                f"{100 * MANY_AIM:.0f} %",
                reached,
            )


def _line(
    what: str,
    floor: str,
    vllm: str,
    values: Sequence[float],
    aim: float | None,
    *,
    more: bool,
    spec: str = ",.0f",
) -> Line:
    """``more``: it is to be so much at least, else at most."""
    if aim is None:
        return what, floor, vllm, _range(values, spec), "-", "-"
    mean = statistics.fmean(values)
    share = mean / aim if more else aim / mean
    return (
        what,
        floor,
        vllm,
        _range(values, spec),
        _number(aim),
        "reached" if share >= 1 else f"{100 * share:.0f} %",
    )


def _range(values: Sequence[float], spec: str) -> str:
    """The mean, and the least and the most where there are several."""
    mean = f"{statistics.fmean(values):{spec}}"
    return mean if len(values) == 1 else f"{mean} ({min(values):{spec}} to {max(values):{spec}})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,g}"
