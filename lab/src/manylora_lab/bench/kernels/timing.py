"""Times of several things on one device, measured in turn: what disturbs the machine disturbs all alike. And what
no kernel of the device can pass: the ceilings of its memory and its arithmetic."""

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
    graphs = [_captured(module, step) for step in steps]
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


def _captured(module: Any, step: Step) -> Any:
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


def ceilings(
    device: torch.device, dtype: torch.dtype, repeats: int, is_small: bool = False
) -> tuple[float, float]:
    """(bytes per second of a copy, read and written counted; FLOP per second of a matrix product), of large ones
    unless ``is_small``."""
    is_cpu = device.type == "cpu"
    elements = 2**18 if is_small else 2**24 if is_cpu else 2**29
    side = 256 if is_small else 1024 if is_cpu else 8192
    source = torch.randn(elements, dtype=dtype, device=device)
    target = torch.empty_like(source)
    left = torch.randn(side, side, dtype=dtype, device=device)
    product = torch.empty_like(left)
    copy_s, product_s = medians(
        device,
        # By a kernel: what a graph captures of copy_() runs at two thirds of the speed on an H200.
        [lambda: torch.mul(source, 2.0, out=target), lambda: torch.mm(left, left, out=product)],
        repeats,
    )
    return 2 * source.nbytes / copy_s, 2 * side**3 / product_s


def device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))
