"""Two ranks on two GPUs of one host, which exchange through NCCL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from manylora.executor.ranks.start import ENVIRONMENT
from tests.e2e.test_ranks import asked, dies_with_a_rank
from tests.executor.test_peers import own
from tests.gpu.test_parity import tokens

NUM_GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"two GPUs of one host are needed, {NUM_GPUS} can be seen"),
]

RANK = """
import sys, torch
from manylora.devices.peers import GroupPeers
from tests.executor.test_peers import DTYPES, SIZES, own
file, rank, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
peers = GroupPeers(file, rank, 2, device)
found = {}
for size in SIZES:
    for dtype in DTYPES:
        total = own(rank, size, dtype).to(device)
        peers.add_up(total, "base")
        found["eager", size, dtype] = total.cpu()
        source, total = own(rank, size, dtype).to(device), torch.empty(size, dtype=dtype, device=device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # as ranks do: NCCL has threads
            total.copy_(source)
            torch.distributed.all_reduce(total)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        found["graph", size, dtype] = total.cpu()
        del graph
torch.save(found, out)
"""


def test_sums_through_nccl_eager_and_in_a_graph(tmp_path: Path) -> None:
    """The same bits on both ranks, within rounding of the exact sum; a replay gives what the first one gave."""
    with tempfile.TemporaryFile() as meeting:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(meeting.fileno()), str(rank), str(tmp_path / str(rank))],
                pass_fds=(meeting.fileno(),),
                env={**os.environ, **ENVIRONMENT},
            )
            for rank in range(2)
        ]
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    first, second = (torch.load(tmp_path / str(rank), weights_only=False) for rank in range(2))
    assert first.keys() == second.keys()
    for (way, size, dtype), total in first.items():
        assert torch.equal(total, second[way, size, dtype])
        parts = [own(rank, size, dtype).double() for rank in range(2)]
        most = (parts[0].abs() + parts[1].abs()) * 2 * torch.finfo(dtype).eps
        assert ((total.double() - parts[0] - parts[1]).abs() <= most).all(), way


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("sharding", ["sharded", "replicated"])
def test_prompts_and_decoding_give_the_tokens_of_one_gpu(sharding: str, graphs: str) -> None:
    """Eager steps, and captured ones with NCCL's exchanges in them."""
    fixed: dict[str, Any] = {"device": "cuda", "dtype": "float32", "device_pool": "1GiB"}
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "lora_sharding": sharding, "cuda_graphs": graphs}
    assert tokens(**fixed, **ranks) == tokens(**fixed)


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "rank 1 has died"), (signal.SIGSTOP, "rank 1 has been stopped")]
)
def test_a_rank_that_is_lost(number: signal.Signals, words: str, graphs: str) -> None:
    (line,) = asked(lambda rank: os.kill(rank, number), device="cuda", cuda_graphs=graphs)
    assert words in line


def test_a_server_whose_rank_is_killed() -> None:
    """By default, which captures."""
    args = ("--device", "cuda", "--device-pool", "1GiB", "--tensor-parallel-size", "2")
    dies_with_a_rank(*args, CUDA_VISIBLE_DEVICES="0,1")
