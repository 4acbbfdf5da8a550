"""Exchanges between ranks in real processes: what comes out is exact, and the same bits everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from manylora.devices.peers import GATHERED_BYTES

COUNT = 3
SIZES = [(1,), (3, 5), (GATHERED_BYTES // 4 + 7,), (2 * GATHERED_BYTES + 9,)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

RANK = f"""
import os, socket, sys, torch
from tests.executor.test_peers import SIZES, DTYPES, own
group, rank, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
from manylora.devices.peers import GroupPeers
found = {{}}
peers = GroupPeers(group, rank, {COUNT}, torch.device("cpu"))
others = socket.socketpair()
os.dup2(others[0].fileno(), group)  # the descriptor is closed, and its number another's
for size in SIZES:
    for dtype in DTYPES:
        total = own(rank, size, dtype)
        peers.add_up(total, "base")
        found["sum", size, dtype] = total
wide = own(rank, (4, 12), torch.float32)
peers.add_up(wide[:, 3:7], "lora")
found["columns"] = wide
packed = own(rank, (2, 5), torch.float32).to(torch.int64)
found["gather"] = torch.stack(peers.gather(packed, "sampling"))
drawn = packed.clone()
peers.broadcast(drawn, "sampling")
found["broadcast"] = drawn
if rank == 1:  # alone, as in a rehearsal
    with peers.leaving_out():
        for size in SIZES[:2]:
            peers.add_up(own(rank, size, torch.bfloat16), "base")
        peers.broadcast(drawn.clone(), "sampling")
        assert all(one is packed for one in peers.gather(packed, "sampling"))
found["account"] = (peers.num_exchanges, peers.digest, peers.traffic)
found["looked"] = torch.distributed.distributed_c10d._get_default_store().check(["what nobody has said"])
torch.save(found, out)
"""


def own(rank: int, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (10 * torch.randn(size, generator=generator)).to(dtype)


def test_three_processes(tmp_path: Path) -> None:
    with tempfile.TemporaryFile() as meeting:
        files = (meeting.fileno(),)
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, *map(str, files), str(rank), str(tmp_path / str(rank))],
                pass_fds=files,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(COUNT)
        ]
        assert [rank.wait(60) for rank in ranks] == [0] * COUNT
    found = [torch.load(tmp_path / str(rank), weights_only=False) for rank in range(COUNT)]
    # A thread of NCCL looks into where ranks met once a second, long after the descriptor was closed.
    assert [one["looked"] for one in found] == [False] * COUNT
    for size in SIZES:
        for dtype in DTYPES:
            parts = [own(rank, size, dtype).double() for rank in range(COUNT)]
            exact = torch.stack(parts).sum(0)
            totals = [one["sum", size, dtype] for one in found]
            assert all(torch.equal(total, totals[0]) for total in totals)
            most = torch.stack(parts).abs().sum(0)
            error = (totals[0].double() - exact).abs()
            assert (error <= 2 * torch.finfo(dtype).eps * most).all()
            if exact.numel() * dtype.itemsize <= GATHERED_BYTES:
                # Added up in float32, and rounded once.
                once = 0.501 * torch.finfo(dtype).eps * exact.abs()
                assert (error <= once + 2 * torch.finfo(torch.float32).eps * most).all()
    for rank, one in enumerate(found):
        wide = own(rank, (4, 12), torch.float32)
        outside = [0, 1, 2, 7, 8, 9, 10, 11]
        assert torch.equal(one["columns"][:, outside], wide[:, outside])
        assert torch.equal(one["columns"][:, 3:7], found[0]["columns"][:, 3:7])
        packed = [own(rank, (2, 5), torch.float32).to(torch.int64) for rank in range(COUNT)]
        assert torch.equal(one["gather"], torch.stack(packed))
        assert torch.equal(one["broadcast"], packed[0])
        assert one["account"] == found[0]["account"]
