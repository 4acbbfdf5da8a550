"""Reads of an adapter by the engine's reader, from its own files and from the adapter store, out of the page cache
and from the disk, into pages of the host and of the device. ``adapter_reads --parts store`` runs it.

Kinds take turns, so that what disturbs the machine disturbs all; ratios are to a first read out of the page
cache. "raw" is the packed file read past the page cache by as many threads, with no checksum: what the disk gives.
"""

from __future__ import annotations

import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from manylora.adapters.jobs import Helpers
from manylora.adapters.pack import layout_of
from manylora.adapters.pagecache import cached_pages
from manylora.adapters.peft import WEIGHTS_NAME, AdapterSpec
from manylora.adapters.store import AdapterStore
from manylora.adapters.storefolder import StoreFolder
from manylora.devices.device import Device
from manylora.executor.reader import AdapterReader, Landed
from manylora.kernels.shapes import AdapterGeometry
from manylora.memory.arena import Arena
from manylora.memory.host import HostPool
from manylora.protocol import AdapterRead, ReadAdapter, Tier

TIERS: tuple[Tier, ...] = ("host", "device")
_BLOCK_BYTES, _RAW_THREADS = 2**20, 8
_MOST_RESIDENT = 0.01
"""A larger share of a file in the page cache, and a read is not one from the disk."""


def drop(path: Path) -> float:
    """Have a file leave the page cache; the share of it that stays all the same, by ``mincore``."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return _resident(file.fileno())


def fetch(path: Path) -> float:
    """Have the page cache hold a file; the share of it that it does not hold."""
    with open(path, "rb", buffering=0) as file:
        block = bytearray(_BLOCK_BYTES)
        while file.readinto(block):
            pass
        return 1 - _resident(file.fileno())


def _resident(file: int) -> float:
    held = cached_pages(file)
    return 1.0 if held is None else float(held.mean())


def read_raw(path: Path) -> float:
    """Seconds in which the file's bytes come from the disk; NaN where there are no direct reads."""
    size = path.stat().st_size // _BLOCK_BYTES * _BLOCK_BYTES
    target = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    target[:] = 0
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return float("nan")

    def read(begin: int) -> None:
        os.preadv(file, [target[begin : begin + _BLOCK_BYTES].data], begin)

    try:
        with ThreadPoolExecutor(_RAW_THREADS) as threads:
            began_s = time.perf_counter()
            list(threads.map(read, range(0, size, _BLOCK_BYTES)))
            return time.perf_counter() - began_s
    finally:
        os.close(file)


class StoreRig:
    """Two readers, with a store and without, on pools that hold one adapter of ``num_pages``."""

    def __init__(
        self, folder: Path, geometry: AdapterGeometry, device: Device, dtype: torch.dtype, num_pages: int
    ) -> None:
        self._host = HostPool(num_pages, geometry.page, dtype, device)
        while device.copies_from_pinned and self._host.pages_pinned < num_pages:
            time.sleep(0.1)
        self._host.run(0, num_pages).zero_()
        self._arena = Arena(num_pages, geometry.page, dtype, device)
        self._geometry = geometry
        self.folder = folder
        store = AdapterStore(StoreFolder(folder, 2**40), geometry, dtype)
        self._readers = {
            kept: AdapterReader(self._arena, self._host, geometry, device, _landed, _inspect_again, given)
            for kept, given in ((False, None), (True, store))
        }
        self._store = store

    def keep(self, spec: AdapterSpec) -> Path:
        """Have the store keep an adapter; its packed file."""
        before = set(self.folder.glob("*.packed"))
        self.read(True, "host", spec)
        while not (new := set(self.folder.glob("*.packed")) - before):
            time.sleep(0.05)
        return new.pop()

    def read(self, kept: bool, tier: Tier, spec: AdapterSpec) -> float:
        """Seconds of one read, with the store or without."""
        command = ReadAdapter(1, tuple(range(layout_of(spec, self._geometry).num_pages)), tier)
        done, answers = threading.Event(), list[AdapterRead]()

        def answered(answer: AdapterRead) -> None:
            answers.append(answer)
            done.set()

        began_s = time.perf_counter()
        self._readers[kept].start(spec, command, answered)
        done.wait()
        seconds = time.perf_counter() - began_s
        if not answers[0].ok:
            raise RuntimeError(answers[0].error)
        return seconds

    @property
    def helpers(self) -> Helpers:
        """Of reads from the store."""
        return self._readers[True]._store_helpers

    @helpers.setter
    def helpers(self, helpers: Helpers) -> None:
        self._readers[True]._store_helpers = helpers

    @property
    def hits(self) -> int:
        return self._store.counts().hits

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._host.close()
        self._arena.close()


def measure(rig: StoreRig, spec: AdapterSpec, repeats: int) -> dict[str, Any]:
    """Milliseconds by kind of read; None for what could not be measured here. Prints them."""
    packed, weights = rig.keep(spec), Path(spec.path) / WEIGHTS_NAME
    sources = {False: weights, True: packed}
    kinds: dict[str, Callable[[], float]] = {}
    for tier in TIERS:
        for kept, name in ((False, "first"), (True, "packed")):
            for prepare, place in ((fetch, "page cache"), (drop, "disk")):
                prepared = partial(_prepared, prepare, sources[kept], partial(rig.read, kept, tier, spec))
                kinds[f"{name}, {place}, {tier}"] = prepared
    kinds["raw, disk"] = partial(_prepared, drop, packed, partial(read_raw, packed))
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    hits = rig.hits
    for turn in range(repeats + 1):
        for name, read in kinds.items():
            taken = read()
            hits += name.startswith("packed") and taken == taken
            if turn:  # the first one warms
                seconds[name].append(taken)
    if rig.hits != hits:
        raise RuntimeError("the store did not have what it was asked for")
    found = {name: _median_ms(taken) for name, taken in seconds.items()}
    _show(found, packed.stat().st_size)
    return {"bytes": packed.stat().st_size, "ms": found}


def _prepared(prepare: Callable[[Path], float], path: Path, read: Callable[[], float]) -> float:
    """NaN where the page cache is not as it should be."""
    return read() if prepare(path) <= _MOST_RESIDENT else float("nan")


def _median_ms(seconds: Sequence[float]) -> float | None:
    median = statistics.median(seconds)
    return None if median != median else round(1e3 * median, 3)


def _show(found: dict[str, float | None], num_bytes: int) -> None:
    for name, taken in found.items():
        first = found.get(f"first, page cache, {name.rpartition(' ')[2]}")
        if taken is None:
            print(
                f"  {name:28} not measured: the page cache, or the file system, does not do what this needs",
                flush=True,
            )
        else:
            ratio = f", {taken / first:.2f} of a first read" if first else ""
            print(f"  {name:28} {taken:8.1f} ms, {num_bytes / taken / 1e6:6.2f} GB/s{ratio}", flush=True)


def _landed(landed: Landed) -> None:
    """Nothing runs with the adapter."""


def _inspect_again(*_: object) -> NoReturn:
    raise RuntimeError("the adapter has just been inspected")
