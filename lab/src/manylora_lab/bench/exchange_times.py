"""What a sum over several ranks takes: of tensors like those that steps add up. No engine is here.

Each rank is a process, and they exchange through ``GroupPeers`` as an engine's ranks do. On GPUs the sums are
captured, as steps are. Of all ranks the longest time counts.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import msgspec
import torch

from manylora.devices.cuda import visible_gpus
from manylora.devices.device import Device, Tensors, open_device
from manylora.devices.peers import GroupPeers, Peers
from manylora.executor.ranks.start import ENVIRONMENT

EXCHANGES = 16
"""One after the other, as in a step: what is launched ahead of the device does not count."""

_ROUNDS = 7
_RANKS_S = 120.0
"""After which the ranks are ended."""


def measure_exchanges(device: str, count: int, dtype: str, sizes: Sequence[int]) -> list[float]:
    """Seconds of a sum of tensors of so many bytes on each of ``count`` ranks. Raises RuntimeError."""
    with tempfile.TemporaryFile() as meeting:
        ranks = []
        try:
            for rank in range(count):
                environment = {**os.environ, **ENVIRONMENT}
                if device == "cuda":
                    environment["CUDA_VISIBLE_DEVICES"] = visible_gpus()[rank]
                asked = map(str, (meeting.fileno(), rank, count, device, dtype, *sizes))
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", __name__, *asked],
                        pass_fds=(meeting.fileno(),),
                        env=environment,
                        stdout=subprocess.PIPE,
                    )
                )
            ends_s = time.monotonic() + _RANKS_S
            told = [rank.communicate(timeout=max(0.0, ends_s - time.monotonic()))[0] for rank in ranks]
        except subprocess.TimeoutExpired as error:
            raise RuntimeError("the ranks' exchanges do not end") from error
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"the ranks' exchanges failed: {[process.returncode for process in ranks]}")
    return [max(times) for times in zip(*(msgspec.json.decode(one, type=list[float]) for one in told))]


def exchange_seconds(peers: Peers, device: Device, dtype: torch.dtype, num_bytes: int) -> float:
    """The median of some rounds, for one exchange. All ranks ask for the same."""
    tensor = device.zeros((max(1, num_bytes // dtype.itemsize),), dtype)

    def add_up() -> Tensors:
        for _ in range(EXCHANGES):
            peers.add_up(tensor, "start")
        return (tensor,)

    run = device.capture(add_up) if device.captures else add_up
    run()
    rounds = []
    for _ in range(_ROUNDS):
        device.synchronize()
        began_s = time.perf_counter()
        run()
        device.synchronize()
        rounds.append((time.perf_counter() - began_s) / EXCHANGES)
    return statistics.median(rounds)


def main(file: int, rank: int, count: int, kind: str, dtype: str, sizes: list[int]) -> None:
    """One of the processes: its times go to the output."""
    device = open_device(kind)
    torch.set_num_threads(max(1, torch.get_num_threads() // count))
    peers = GroupPeers(file, rank, count, device.torch_device)
    times = [exchange_seconds(peers, device, getattr(torch, dtype), size) for size in sizes]
    sys.stdout.buffer.write(msgspec.json.encode(times))
    sys.stdout.flush()
    os._exit(0)  # NCCL's own end waits for graphs and for the other ranks


if __name__ == "__main__":
    file, rank, count = map(int, sys.argv[1:4])
    main(file, rank, count, sys.argv[4], sys.argv[5], [int(size) for size in sys.argv[6:]])
