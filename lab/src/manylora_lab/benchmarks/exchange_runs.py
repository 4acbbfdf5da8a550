"""What several ranks' exchanges take by size, and how the GPUs of a host are linked. No engine is here.

One process a GPU; they exchange through ``GroupPeers`` as ranks do (a toy: on the CPU, through gloo). Each
operation is timed as launched one after the other and, on GPUs, as captured in a CUDA graph: the group's sum and
gather themselves, and ``add_up``, which is what the engine asks for. Of all ranks the longest time counts. Run by
``h200_ranks``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed

from manylora.devices.peers import GroupPeers
from manylora.executor.ranks.start import ENVIRONMENT
from manylora_lab.benchmarks.run_report import Row, copy_bandwidth, peer_copy_bandwidth, replace

SIZES = tuple(2**power for power in range(13, 27))
"""Bytes of a rank's tensor: 8 KiB to 64 MiB."""
TOY_SIZES = (2**13, 2**16)
CAPTURED, REPLAYS = 20, 10
"""Operations in a graph, and how often it is replayed."""
RANKS_S = 90.0
"""After which the ranks are ended."""


# ---------------------------------------------------------------- a rank


def rank_main(file: int, rank: int, count: int, out: Path, is_toy: bool) -> None:
    """One of the processes: its times go into ``out``."""
    device = torch.device("cpu") if is_toy else torch.device("cuda", rank)
    if not is_toy:
        torch.cuda.set_device(device)
    found: Row = {"bandwidth_bytes_per_s": copy_bandwidth(device.type)}
    if not is_toy and rank == 0:
        found["peer_copy_bytes_per_s"] = peer_copy_bandwidth()
    out.write_text(json.dumps(found))
    peers = GroupPeers(file, rank, count, device)
    found["exchanges"] = [
        row for size in (TOY_SIZES if is_toy else SIZES) for row in times(peers, size, device, count)
    ]
    replace(out, json.dumps(found).encode())
    os._exit(0)  # NCCL's own end waits for graphs and for the other rank


def times(peers: GroupPeers, size: int, device: torch.device, count: int) -> list[Row]:
    """Microseconds of each operation on tensors of so many bytes."""
    tensor = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    planes = torch.zeros(count * size // 2, dtype=torch.bfloat16, device=device)
    operations: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: torch.distributed.all_reduce(tensor),
        "all_gather": lambda: torch.distributed.all_gather_into_tensor(planes, tensor),
        "add_up": lambda: peers.add_up(tensor, "base"),
    }
    rows = []
    for name, operation in operations.items():
        row: Row = {"operation": name, "bytes": size, "eager_us": eager_us(operation, device)}
        if device.type == "cuda":
            try:
                row |= graph_times(operation)
            except RuntimeError as error:
                row["error"] = str(error).partition("\n")[0]
        rows.append(row)
    return rows


def eager_us(operation: Callable[[], object], device: torch.device) -> float:
    """Launched back to back."""
    for _ in range(5):
        operation()
    repeats = CAPTURED if device.type == "cpu" else CAPTURED * REPLAYS
    if device.type == "cuda":
        torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(repeats):
        operation()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - began_s) / repeats


def graph_times(operation: Callable[[], object]) -> Row:
    """Captured back to back, and replayed; and the memory that one holds in a graph."""
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads that look at events
        for _ in range(CAPTURED):
            operation()
    begin, end = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    held_bytes = free_bytes - torch.cuda.mem_get_info()[0]
    return {
        "graph_us": 1e3 * float(begin.elapsed_time(end)) / (CAPTURED * REPLAYS),
        "graph_kib": held_bytes / CAPTURED / 1024,
    }


# ---------------------------------------------------------------- all of them


def measure(is_toy: bool, count: int) -> Row:
    """The link, and the longest time of so many ranks; what failed as ``exchanges_error``."""
    found: Row = {} if is_toy else topology(count)
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as meeting:
        outs = [Path(scratch) / str(rank) for rank in range(count)]
        codes = ended(meeting.fileno(), outs, is_toy)
        told = [json.loads(out.read_text()) for out in outs if out.exists()]
    if any(codes):
        found["exchanges_error"] = f"exit codes {codes} (None: it did not end)"
    if told:
        found["bandwidth_bytes_per_s"] = min(one["bandwidth_bytes_per_s"] for one in told)
        found |= {name: value for name, value in told[0].items() if name == "peer_copy_bytes_per_s"}
    every = [one.get("exchanges", []) for one in told]
    found["exchanges"] = [longest(rows) for rows in zip(*every, strict=False)] if len(told) == count else []
    return found


def ended(meeting: int, outs: Sequence[Path], is_toy: bool) -> list[int | None]:
    """Exit codes of the ranks' processes, none of which goes on."""
    kind = ["toy"] if is_toy else []
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(meeting), str(rank), str(len(outs)), str(out), *kind],
            pass_fds=(meeting,),
            env={**os.environ, **ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank, out in enumerate(outs)
    ]
    ends_s, codes = time.monotonic() + RANKS_S, []
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, ends_s - time.monotonic()))
        codes.append(rank.poll())
    for rank in ranks:
        rank.kill()
        rank.wait()
    return codes


def longest(rows: Sequence[Row]) -> Row:
    """Of one operation on every rank, with the bandwidth of the wire that its bytes make: a sum's as a ring moves
    them."""
    row, count = dict(rows[0]), len(rows)
    wire = (2 if row["operation"] != "all_gather" else count) * (count - 1) / count * row["bytes"]
    for name in ("eager", "graph"):
        if all(f"{name}_us" in one for one in rows):
            microseconds = max(one[f"{name}_us"] for one in rows)
            row[f"{name}_us"] = round(microseconds, 2)
            row[f"{name}_bus_gb_per_s"] = round(wire / microseconds / 1e3, 3)
    return row


def topology(count: int) -> Row:
    """What the system says of the link, and whether each GPU reaches the others' memory."""
    pairs = list(itertools.permutations(range(count), 2))
    return {
        "gpus": [torch.cuda.get_device_name(number) for number in range(count)],
        "can_access_peer": [torch.cuda.can_device_access_peer(*pair) for pair in pairs],
        "topology": said_by("nvidia-smi", "topo", "-m"),
        "nvlink": said_by("nvidia-smi", "nvlink", "-s"),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
    }


def said_by(*command: str) -> list[str]:
    """Lines."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [str(error)]
    return [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]


if __name__ == "__main__":
    file, rank, count = map(int, sys.argv[1:4])
    rank_main(file, rank, count, Path(sys.argv[4]), sys.argv[5:] == ["toy"])
