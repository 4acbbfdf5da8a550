"""How long it takes to read an adapter, of Llama-2-7B's shape (host memory is pinned where there is a GPU).

Three parts. ``helpers``: from its file (in the page cache) into the host pool's pages, by single calls and by
loops, by the number of helping threads, alone and beside a thread that computes in Python for 1.5 ms and sleeps
for 5, as a step loop does; ``python_ms`` is what reads make of its 1.5. ``store``: see ``store_reads``. ``runs``:
packed files out of the page cache, both ways, by the bytes that are read at a time and by the number of threads
that help, in turns. From the repository's root:

    python -m manylora_lab.benchmarks.adapter_reads
    python -m manylora_lab.benchmarks.adapter_reads --parts store --device cuda --folder /mnt/nvme --out reads.json
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from manylora.adapters import pack, read_loops, store
from manylora.adapters.jobs import Helpers
from manylora.adapters.pack import layout_of, load_into
from manylora.adapters.peft import AdapterSpec, inspect_adapter
from manylora.adapters.tensorfile import read_header
from manylora.devices.device import Device
from manylora.devices.select import open_device
from manylora.kernels.shapes import AdapterGeometry, PageShape, adapter_geometry
from manylora.memory.host import HostPool
from manylora.models.config import read_model_config
from manylora.models.spec import ModelConfig
from manylora.pricing.shapes import SHAPES
from manylora.warmup.random_adapters import write_random_adapters
from manylora_lab.bench.dummies import write_model
from manylora_lab.bench.provenance import Provenance, add_flags
from manylora_lab.benchmarks import store_reads
from manylora_lab.benchmarks.engine_rig import POSITIONS

ADAPTERS = ((16, "bfloat16"), (64, "bfloat16"), (16, "float32"))
HELPERS = (0, 1, 2, 3, 4, 6, 8, 12)
JOB_BYTES = (2**18, 2**19, 2**21, 2**22)
PYTHON_S, SLEEP_S = 1.5e-3, 5e-3
PARTS = ("helpers", "store", "runs")
RUN_BYTES, RUN_HELPERS = (2**21, 2**22, 2**23, 12 * 2**20, 2**24), (3, 6, 7, 11)
RANKS = (16, 64, 128)
SETTLE_S = 0.1


def timed(work: Callable[[], object], count: int) -> tuple[float, float]:
    """The median and the most, in ms; the first run does not count."""
    seconds = []
    for _ in range(count + 1):
        began_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began_s)
    return 1e3 * statistics.median(seconds[1:]), 1e3 * max(seconds[1:])


def read_into_pages(spec: AdapterSpec, geometry: AdapterGeometry, host: HostPool, helpers: Helpers) -> None:
    layout = layout_of(spec, geometry)
    pages = [host.page(page) for page in range(layout.num_pages)]
    load_into(spec, layout, geometry, host.dtype, pages, lambda: None, helpers)


def additions(count: int) -> None:
    total = 0
    for number in range(count):
        total += number


@contextlib.contextmanager
def computing(loops: int) -> Iterator[list[float]]:
    """A thread that computes and sleeps; the seconds that each computation took."""
    stop, seconds = threading.Event(), list[float]()

    def compute() -> None:
        while not stop.is_set():
            began_s = time.perf_counter()
            additions(loops)
            seconds.append(time.perf_counter() - began_s)
            time.sleep(SLEEP_S)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield seconds
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def by_calls(are_wanted: bool) -> Iterator[None]:
    """Adapters are read by single calls, or by loops."""
    are_ready = read_loops.are_ready
    read_loops.are_ready = lambda: not are_wanted
    try:
        yield
    finally:
        read_loops.are_ready = are_ready


def measure(
    read: Callable[[Helpers], None], helpers: Sequence[int], repeats: int, loops: int
) -> Iterator[dict[str, Any]]:
    """Milliseconds, by how it is read and by helpers."""
    for count, are_calls in itertools.product(helpers, (True, False)):
        with ThreadPoolExecutor(max(1, count)) as threads, by_calls(are_calls):
            given = Helpers(threads, count)
            cpu_s = time.process_time()
            alone, most = timed(partial(read, given), repeats)
            cpu = 1e3 * (time.process_time() - cpu_s) / (repeats + 1)
            with computing(loops) as seconds:
                beside, most_beside = timed(partial(read, given), repeats)
        row = {
            "by": "calls" if are_calls else "loops", "helpers": count, "ms": alone, "most_ms": most, "cpu_ms": cpu,
            "beside_ms": beside, "most_beside_ms": most_beside, "python_ms": 1e3 * statistics.mean(seconds),
        }  # fmt: skip
        print("  " + json.dumps(row), flush=True)
        yield row


def measure_helpers(
    folder: Path, config: ModelConfig, geometry: AdapterGeometry, device: Device, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """By rank and dtype, and for the first of them by the bytes of a job."""
    began_s = time.perf_counter()
    additions(10**6)
    loops = int(10**6 * PYTHON_S / (time.perf_counter() - began_s))
    print(f"{os.cpu_count()} cores, {device.name}, Python loops of {loops}")
    host = HostPool(64, geometry.page, torch.bfloat16, device)
    while device.copies_from_pinned and host.pinned_bytes < host.num_pages * geometry.page.page_bytes:
        time.sleep(0.1)
    host.run(0, host.num_pages).zero_()
    gc.freeze()
    read_loops.prepare()
    found = []
    for rank, dtype in ADAPTERS:
        path = write_random_adapters(folder / f"{rank}-{dtype}", config, dtype, [rank], 1)[0]
        spec = inspect_adapter(path, geometry, config.names.layer_prefix, None)
        weights = path / "adapter_model.safetensors"
        header, _ = timed(partial(read_header, weights), args.repeats)
        print(f"rank {rank} {dtype}: {weights.stat().st_size / 1e6:.0f} MB, header {header:.2f} ms")
        read = partial(read_into_pages, spec, geometry, host)
        own = pack._JOB_BYTES
        others = JOB_BYTES if (rank, dtype) == ADAPTERS[0] else ()
        for job_bytes in dict.fromkeys((*others, own)):
            print(f" jobs of {job_bytes} bytes")
            pack._JOB_BYTES = job_bytes
            for row in measure(read, args.helpers if job_bytes == own else (3, 6), args.repeats, loops):
                found.append(
                    {"rank": rank, "dtype": dtype, "header_ms": header, "job_bytes": job_bytes, **row}
                )
        pack._JOB_BYTES = own
    host.close()
    return found


def measure_store(
    folder: Path, config: ModelConfig, geometry: AdapterGeometry, device: Device, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """By rank."""
    runs = []
    for rank in args.ranks:
        path = write_random_adapters(folder / f"store-{rank}", config, "bfloat16", [rank], 1)[0]
        spec = inspect_adapter(path, geometry, config.names.layer_prefix, None)
        num_pages = layout_of(spec, geometry).num_pages
        print(
            f"rank {rank}: {num_pages} pages, {num_pages * geometry.page.page_bytes / 1e6:.0f} MB", flush=True
        )
        rig = store_reads.StoreRig(folder / f"packed-{rank}", geometry, device, torch.bfloat16, num_pages)
        try:
            time.sleep(SETTLE_S)  # what has just been written changes no more
            found: dict[str, Any] = {"rank": rank}
            if "store" in args.parts:
                found |= store_reads.measure(rig, spec, args.repeats)
            if "runs" in args.parts:
                found["runs"] = measure_runs(rig, spec, args.repeats)
            runs.append(found)
        finally:
            rig.close()
    return runs


def measure_runs(rig: store_reads.StoreRig, spec: AdapterSpec, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of reads from the store to the host, out of the page cache."""
    store_reads.fetch(next(rig.folder.glob("*.packed"), None) or rig.keep(spec))
    read_loops.prepare()
    taken: dict[tuple[bool, int, int], list[float]] = collections.defaultdict(list)
    own = rig.helpers
    with ThreadPoolExecutor(max(RUN_HELPERS)) as threads:
        for turn in range(repeats + 1):
            for are_calls, run_bytes, helpers in itertools.product((True, False), RUN_BYTES, RUN_HELPERS):
                rig.helpers = Helpers(threads, helpers)
                with by_calls(are_calls), mock.patch.object(store, "RUN_BYTES", run_bytes):
                    seconds = rig.read(True, "host", spec)
                if turn:  # the first one warms
                    taken[are_calls, run_bytes, helpers].append(1e3 * seconds)
    rig.helpers = own
    found = []
    for (are_calls, run_bytes, helpers), each in taken.items():
        row = {
            "by": "calls" if are_calls else "loops", "run_bytes": run_bytes, "helpers": helpers,
            "ms": statistics.median(each), "least_ms": min(each),
        }  # fmt: skip
        print("  " + json.dumps(row), flush=True)
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--helpers", type=json.loads, default=list(HELPERS), help="a list")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="of store and runs")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--folder", help="where files are written: on the disk to be measured")
    parser.add_argument("--out", help="write what was found to this file")
    add_flags(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device, provenance = open_device(args.device), Provenance.of(args, 0)
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        folder = Path(scratch)
        write_model(folder / "model", SHAPES["llama-2-7b"], POSITIONS)
        config = read_model_config(folder / "model")
        geometry = adapter_geometry(PageShape(32, 16, 32, 128, 2), config.layer_groups)
        found: dict[str, Any] = {}
        if "helpers" in args.parts:
            found["reads"] = measure_helpers(folder, config, geometry, device, args)
        if {"store", "runs"} & {*args.parts}:
            found["runs"] = measure_store(folder, config, geometry, device, args)
        if args.out:
            record = {"device": device.name, **found, "provenance": provenance.provenance()}
            Path(args.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
