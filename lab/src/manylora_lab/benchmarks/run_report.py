"""What every run on a whole engine writes: the record's file, with the machine's ceilings; and the time that is
left."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from manylora_lab.bench.provenance import Provenance, add_flags

Row = dict[str, Any]


# ---------------------------------------------------------------- the machine


def copy_bandwidth(device: str) -> float:
    """Bytes per second of a large copy on the device, read plus written."""
    size = 4 * 2**30 if device == "cuda" else 2**22
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * size / _seconds(device, lambda: target.copy_(source))


def peer_copy_bandwidth(is_toy: bool = False, *, through_host: bool = False) -> float:
    """Bytes per second of a large copy from the first GPU to the second, by itself or through the host."""
    size, devices = (2**22, ("cpu", "cpu")) if is_toy else (2**30, ("cuda:0", "cuda:1"))
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for device in devices)
    between = torch.ones(size, dtype=torch.uint8, pin_memory=not is_toy) if through_host else source

    def copy() -> None:
        if through_host:
            between.copy_(source)
        target.copy_(between)  # on the first GPU's stream, for which is waited

    return size / _seconds(source.device.type, copy)


def ceilings(device: str) -> dict[str, float]:
    """What the machine can do: copies on the device and to it, and matrix products."""
    size, width = (2**30, 8192) if device == "cuda" else (2**22, 256)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=device == "cuda")
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    square = torch.randn(width, width, dtype=torch.bfloat16, device=device)
    found = {
        "device_copy_bytes_per_s": copy_bandwidth(device),
        "host_to_device_bytes_per_s": size / _seconds(device, lambda: there.copy_(host, non_blocking=True)),
        "device_to_host_bytes_per_s": size / _seconds(device, lambda: host.copy_(there, non_blocking=True)),
        "gemm_flops_per_s": 2 * width**3 / _seconds(device, lambda: square @ square),
    }
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def _seconds(device: str, work: Callable[[], object], repeats: int = 10) -> float:
    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        work()
    wait()
    began_s = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return (time.perf_counter() - began_s) / repeats


# ---------------------------------------------------------------- the record


def spread(ms: Sequence[float]) -> Row:
    """Of milliseconds: the median, the least, the most, and how many they are."""
    return {"ms": statistics.median(ms), "least_ms": min(ms), "most_ms": max(ms), "count": len(ms)}


def run_parser(text: str | None, time_budget: float = 1e9) -> argparse.ArgumentParser:
    """A parser with what every run has. ``text``: its module's."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="a JSON file")
    parser.add_argument("--toy", action="store_true", help="tiny, on a CPU, in seconds")
    parser.add_argument(
        "--time-budget", type=float, default=time_budget, metavar="S", help="begin nothing that may pass it"
    )
    add_flags(parser)
    return parser


class RunReport:
    """A record: its head, and the rows of its parts. Its file is written after every row."""

    def __init__(
        self, args: argparse.Namespace, seed: int | str, device: str | None = None, **head: Any
    ) -> None:
        """``device``: its name, where that is not the GPU's, or a toy's."""
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s")
        self.args = args
        self.out = Path(args.out)
        self.repeats = 1
        """Of every run, where its parts know of repeats."""
        self.recording = Provenance.of(args, seed)
        self._began_s = time.monotonic()
        device = device or ("cpu" if args.toy else torch.cuda.get_device_name())
        self.values: Row = {
            "command": self.recording.command, "commit": self.recording.commit, "device": device,
            "torch": torch.__version__, "left_out": [], **head,
        }  # fmt: skip

    def has(self, seconds: float, what: str) -> bool:
        """Whether so much time is left; else it is said what is left out. A toy takes a tenth of it."""
        is_left: bool = self.left_s() >= (seconds / 10 if self.args.toy else seconds)
        if not is_left:
            self.values["left_out"].append(what)
            self.say(f"no time left for {what}")
        return is_left

    def left_s(self) -> float:
        """Of the time budget, in seconds."""
        left_s: float = self.args.time_budget - (time.monotonic() - self._began_s)
        return left_s

    def note(self, part: str, row: Row) -> None:
        """One row more of the part."""
        row = {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
        self.values.setdefault(part, []).append(row)
        self.say(f"{part}: {json.dumps(row)}")
        self.save()
        gc.collect()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began_s:6.1f} s  {text}", flush=True)

    def save(self) -> None:
        """Whole or not at all."""
        self.values["provenance"] = self.provenance()
        replace(self.out, (json.dumps(self.values, indent=1) + "\n").encode())

    def provenance(self) -> list[Row]:
        """Where the record comes from, as of now."""
        return self.recording.provenance()


def replace(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_bytes(data)
    scratch.replace(path)
