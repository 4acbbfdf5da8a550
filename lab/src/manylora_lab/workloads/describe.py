"""What a stream is like, in numbers: load, lengths, reuse, popularity. Not what serving it took."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from manylora_lab.workloads.stream import Stream, prompt_tokens


def describe(stream: Stream) -> dict[str, Any]:
    """Statistics of a stream, ready for JSON; None where a number has no meaning.

    ``rate``: requests a second up to the last arrival. ``interarrival_cv``: standard deviation over mean of the
    times between arrivals. ``history_share``, ``shared_prefix_share``: of all prompt tokens, those of earlier
    turns of the conversation, and those with which a prompt begins as an earlier one of the same adapter did (no
    adapter can use another's KV). ``zipf_exponent``: of a least-squares line through log(count) over log(rank).
    """
    requests = stream.requests
    turns = Counter(request.conversation for request in requests)
    counts = popularity_counts(stream)
    whole = prompt_tokens(requests)
    new = [request.new_tokens for request in requests]
    total = sum(whole)
    return {
        "name": stream.name,
        "requests": len(requests),
        "duration_s": stream.duration_s,
        "rate": len(requests) / stream.duration_s if stream.duration_s else None,
        "interarrival_cv": _interarrival_cv([request.arrival_s for request in requests]),
        "conversations": len(turns),
        "turns_per_conversation": summary(list(turns.values())),
        "prompt_tokens": summary(whole),
        "new_tokens": summary(new),
        "output_tokens": summary([request.output_tokens for request in requests]),
        "history_share": (total - sum(new)) / total,
        "shared_prefix_share": _shared_prefix_tokens(stream) / total,
        "adapters_served": len(stream.ranks),
        "adapters_used": len(counts),
        "base_requests": sum(request.adapter is None for request in requests),
        "top_share": counts[0] / len(requests) if counts else None,
        "top10_share": sum(counts[:10]) / len(requests) if counts else None,
        "zipf_exponent": zipf_exponent(counts),
        "ranks": {str(rank): count for rank, count in sorted(Counter(stream.ranks).items())},
        "notes": list(stream.notes),
    }


def popularity_counts(stream: Stream) -> list[int]:
    """Requests of each adapter that is used, most first."""
    counts = Counter(request.adapter for request in stream.requests if request.adapter is not None)
    return sorted(counts.values(), reverse=True)


def summary(values: Sequence[int]) -> dict[str, float]:
    """Mean and percentiles; a percentile is the smallest value that so many per cent do not exceed."""
    ordered = sorted(values)
    found = {"mean": sum(ordered) / len(ordered)}
    for percent in (50, 90, 99):
        found[f"p{percent}"] = ordered[math.ceil(percent * len(ordered) / 100) - 1]
    return found


def zipf_exponent(counts: Sequence[int]) -> float | None:
    """s of counts ~ rank^-s, fitted in logarithms; None for fewer than two adapters."""
    if len(counts) < 2:
        return None
    ranks = [math.log(rank) for rank in range(1, len(counts) + 1)]
    heights = [math.log(count) for count in counts]
    middle, height = sum(ranks) / len(ranks), sum(heights) / len(heights)
    slope = sum((x - middle) * (y - height) for x, y in zip(ranks, heights))
    return 0.0 - slope / sum((x - middle) ** 2 for x in ranks)


def _interarrival_cv(moments: Sequence[float]) -> float | None:
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    mean = sum(gaps) / len(gaps) if gaps else 0.0
    if mean == 0:
        return None
    return math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean


def _shared_prefix_tokens(stream: Stream) -> int:
    """Tokens with which conversations' first prompts repeat earlier first prompts under the same adapter.

    Later turns begin with their own replies, which no other conversation has.
    """
    children: dict[tuple[int, Hashable], int] = {}
    roots: dict[int | None, int] = {}
    shared = 0
    for request in stream.requests:
        if request.turn > 0:
            continue
        node = roots.setdefault(request.adapter, -1 - len(roots))
        for piece in request.prompt:
            key = (node, (piece.identity, piece.num_tokens))
            if key in children:
                shared += piece.num_tokens
            node = children.setdefault(key, len(children))
    return shared


def text(found: Mapping[str, Any]) -> str:
    """``describe``'s numbers as lines for a person."""

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    def spread(name: str) -> str:
        its = found[name]
        return f"mean {its['mean']:,.1f}   p50 {its['p50']:,}   p90 {its['p90']:,}   p99 {its['p99']:,}"

    ranks = ", ".join(f"{count} of rank {rank}" for rank, count in found["ranks"].items()) or "-"
    lines = [
        ("workload", found["name"]),
        ("requests", f"{found['requests']:,} in {found['duration_s']:,.1f} s"),
        ("rate", f"{number(found['rate'])} a second, inter-arrival CV {number(found['interarrival_cv'])}"),
        ("conversations", f"{found['conversations']:,}"),
        ("turns of each", spread("turns_per_conversation")),
        ("prompt tokens", spread("prompt_tokens")),
        ("new tokens", spread("new_tokens")),
        ("output tokens", spread("output_tokens")),
        (
            "reuse",
            f"{found['history_share']:.1%} of prompt tokens are history, "
            f"{found['shared_prefix_share']:.1%} a prefix shared with others",
        ),
        ("adapters", f"{found['adapters_used']:,} used of {found['adapters_served']:,} served"),
        ("base model", f"{found['base_requests']:,} requests"),
        ("ranks", ranks),
    ]
    if found["adapters_used"]:
        lines.append(
            (
                "popularity",
                f"first {found['top_share']:.1%}, first ten {found['top10_share']:.1%} of requests; "
                f"Zipf exponent {number(found['zipf_exponent'])}",
            )
        )
    return "\n".join(
        [f"{name:<16}{value}" for name, value in lines] + [f"  {note}" for note in found["notes"]]
    )
