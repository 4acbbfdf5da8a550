"""A server on a GPU that pins a large host pool ends by itself, with all that it holds."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from manylora import main
from manylora.server import lifecycle
from tests.e2e.process import Server, completion, events, wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

POOL_GIB = 32
DRAIN_S = 3


@pytest.mark.skipif(
    os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 2 * POOL_GIB * 2**30,
    reason="too little memory",
)
@pytest.mark.parametrize("cold_start", ["wait", "auto"])
def test_a_server_with_a_large_pinned_pool_ends_by_itself(cold_start: str) -> None:
    """Under ``auto`` CPU workers map the pool too."""
    args = ("--device", "cuda", "--host-pool", f"{POOL_GIB}GiB", "--drain-timeout", str(DRAIN_S))
    before = set(Path("/dev/shm").iterdir())
    env = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    with Server(*args, "--cold-start", cold_start, env=env) as server, ThreadPoolExecutor() as clients:
        server.wait_ready()
        wait_until(lambda: "pinned the host pool" in server.log, "pinned memory", 300)
        asked = completion(max_tokens=900, ignore_eos=True, n=8)
        running = [clients.submit(server.complete, **asked) for _ in range(16)]
        with server.http.stream("POST", "/v1/completions", json=asked | {"stream": True}) as stream:
            next(events(stream))
            server.process.send_signal(signal.SIGTERM)
            told_s = time.monotonic()
        code = server.process.wait(600)
        took_s = time.monotonic() - told_s
        print(f"{cold_start}: gone {took_s:.1f} s after SIGTERM, {DRAIN_S} s of them to drain")
        assert code == 0
        assert "killed" not in server.log
        assert "leaves it behind" not in server.log
        server.assert_all_gone()
        assert {answer.result().status_code for answer in running} <= {200, 503}
        limit_s = DRAIN_S + lifecycle._AFTER_DRAIN_S + POOL_GIB * 2**30 / main.RELEASED_BYTES_PER_S
        assert took_s < limit_s + main.OWN_EXIT_S
    assert set(Path("/dev/shm").iterdir()) == before
