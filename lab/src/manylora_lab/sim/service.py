"""How much more one client is served than another while both want more: the measure of fairness of VTC's paper.

Records of requests in, two numbers out. Does not know where requests ran.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

WINDOW_S = 60.0
_NO_SHARES: Mapping[str, float] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """One request. It waits until ``admitted_s``, when its ``input_service`` counts; its ``output_service`` counts
    from ``first_s`` to ``end_s``, evenly."""

    client: str
    arrived_s: float
    admitted_s: float
    first_s: float
    end_s: float
    input_service: float
    output_service: float


def service_difference(
    requests: Iterable[Served], shares: Mapping[str, float] = _NO_SHARES, window_s: float = WINDOW_S
) -> dict[str, float] | None:
    """Of each pair of clients that both have requests waiting throughout a window, the difference of what they
    were served in it, over their shares: the largest, the mean, and of how many. None where there is no such pair.

    Windows follow one another from 0.
    """
    waits: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    service: dict[tuple[int, str], float] = collections.defaultdict(float)
    for request in requests:
        share = shares.get(request.client, 1.0)
        waits[request.client].append((request.arrived_s, request.admitted_s))
        service[int(request.admitted_s / window_s), request.client] += request.input_service / share
        for window, part in _parts(request.first_s, request.end_s, window_s):
            service[window, request.client] += part * request.output_service / share
    backlogged: dict[int, list[float]] = collections.defaultdict(list)
    for client, spans in waits.items():
        for begin, end in _joined(spans):
            for window in range(math.ceil(begin / window_s), int(end / window_s)):
                backlogged[window].append(service.get((window, client), 0.0))
    differences = [of_pairs for values in backlogged.values() if (of_pairs := _differences(values))]
    num_pairs = sum(count for _, _, count in differences)
    if not num_pairs:
        return None
    return {
        "max": max(largest for largest, _, _ in differences),
        "mean": sum(total for _, total, _ in differences) / num_pairs,
        "pairs": num_pairs,
    }


def _parts(begin: float, end: float, window_s: float) -> Iterable[tuple[int, float]]:
    """Each window with its share of a span."""
    first, last = int(begin / window_s), int(end / window_s)
    if first == last:
        yield first, 1.0
        return
    for window in range(first, last + 1):
        length = min(end, (window + 1) * window_s) - max(begin, window * window_s)
        yield window, length / (end - begin)


def _joined(spans: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """Spans that overlap or touch as one."""
    ordered = sorted(spans)
    begin, end = ordered[0]
    for following, until in ordered[1:]:
        if following > end:
            yield begin, end
            begin, end = following, until
        end = max(end, until)
    yield begin, end


def _differences(values: Sequence[float]) -> tuple[float, float, int] | None:
    """The largest difference of two, the sum of all, and how many."""
    if len(values) < 2:
        return None
    ordered = sorted(values)
    total = 0.0
    for place, (low, high) in enumerate(itertools.pairwise(ordered), 1):
        total += (high - low) * place * (len(ordered) - place)
    return ordered[-1] - ordered[0], total, len(ordered) * (len(ordered) - 1) // 2
