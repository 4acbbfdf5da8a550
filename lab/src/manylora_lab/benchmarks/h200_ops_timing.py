"""Times of calls inside CUDA graphs, and errors: what the parts of ``h200_ops`` share."""

# mypy: disallow-untyped-calls=False
# torch's streams and events have no annotations.

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

ROUNDS = 5


def graph_time(step: Callable[[], object], calls: int = 1, rounds: int = ROUNDS) -> float:
    """Seconds of one call, of ``calls`` one after the other in a captured graph; the median of ``rounds``."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            step()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    events[-1].synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return float(times[len(times) // 2]) / calls / 1e3


def cold_time(step: Callable[[Any], object], arguments: Sequence[Any], rounds: int = ROUNDS) -> float:
    """The same over arguments that together do not fit the cache, each used once a round (or twice)."""
    repeats = 2 if len(arguments) < 4 else 1

    def all_of_them() -> None:
        for _ in range(repeats):
            for argument in arguments:
                step(argument)

    return graph_time(all_of_them, rounds=rounds) / (repeats * len(arguments))


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """||out - truth|| / ||truth||; NaN where anything is NaN."""
    wide = truth.double()
    return float((out.double() - wide).norm() / wide.norm())
