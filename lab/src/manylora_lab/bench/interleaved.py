"""Times of several things on one device, measured in turn: what disturbs the machine disturbs all alike."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_FLUSH_BYTES = 256 * 2**20
"""More than a GPU's last cache holds."""

Step = Callable[[], object]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch works on the calling thread alone: threads that wait for a core which others use cost milliseconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def medians(device: torch.device, steps: Sequence[Step], repeats: int) -> list[float]:
    """Seconds of one call of each of ``steps``: the median of ``repeats`` rounds, each of which runs all of them.

    On CUDA every step is captured in a graph and starts with cold caches: its device time, without what the host
    needs to launch it. On a CPU it is the wall time on one thread; caches are as the step before left them.
    """
    if device.type == "cpu":
        with one_thread():
            return _on_cpu(steps, repeats)
    return _on_cuda(device, steps, repeats)


def _on_cpu(steps: Sequence[Step], repeats: int) -> list[float]:
    for step in steps:
        step()
    samples: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for step, found in zip(steps, samples):
            began = time.perf_counter()
            step()
            found.append(time.perf_counter() - began)
    return [statistics.median(found) for found in samples]


def _on_cuda(device: torch.device, steps: Sequence[Step], repeats: int) -> list[float]:
    module = torch.get_device_module(device)
    graphs = [captured(module, step) for step in steps]
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
    pairs: list[list[tuple[torch.Event, torch.Event]]] = [[] for _ in steps]
    for number in range(repeats + 1):
        for graph, found in zip(graphs, pairs):
            pair = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
            flush.zero_()
            pair[0].record()
            graph.replay()
            pair[1].record()
            if number:  # the first replay uploads the graph
                found.append(pair)
    module.synchronize()
    return [
        statistics.median(begin.elapsed_time(end) for begin, end in found) / 1e3  # milliseconds
        for found in pairs
    ]


def captured(module: Any, step: Step) -> Any:
    """A CUDA graph of the step, which has run once before, so that its kernels are compiled."""
    side = module.Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        step()  # compiles
    module.current_stream().wait_stream(side)
    graph = module.CUDAGraph()
    with module.graph(graph):
        step()
    return graph
